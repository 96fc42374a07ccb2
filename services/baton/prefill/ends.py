"""How a prompt leaves this worker without a commit: revoked, cancelled, failed, its decode lost.

Decides who has a say in it, and when its decode may hear that nothing is stored any more: while its
chunk runs, only when that has returned.
"""

from __future__ import annotations

from baton.core.ids import Peer
from baton.core.outcomes import Reason
from baton.prefill.job import Job
from baton.prefill.state import State
from baton.wire.handover import PrefillFailed, TicketRevoked, WriterStopped
from baton.wire.messages import CancelWork, RequestEnded, WorkFailed


class Ends:
    """The ends of one prefill worker's prompts."""

    def __init__(self, state: State) -> None:
        self.state = state

    # --- asked for ----------------------------------------------------------------------------

    def revoke(self, peer: Peer, message: TicketRevoked) -> None:
        """Decode wants its blocks back."""
        request_id, epoch = message.request_id, message.epoch
        self.state.early.pop((request_id, epoch), None)
        job = self.state.jobs.get(request_id)
        if job is None or job.epoch != epoch or job.decode != peer or job.ticket is None:
            # Nothing of that ticket was started, or all of it has returned.
            if not self.state.flies(request_id, epoch):
                self.state.send(peer, WriterStopped(request_id, epoch))
            return
        self.end(job, None, "revoked")

    def cancel_work(self, message: CancelWork) -> None:
        """A router that lost the request to another one has no say."""
        job = self.state.jobs.get(message.request_id)
        if job is not None and job.epoch <= message.epoch and message.turn < job.turn:
            self.state.measure("stale_messages_total", kind="turn")
        else:
            self._cancel(message.request_id, message.epoch, message.reason)

    def ended(self, gateway: Peer, message: RequestEnded) -> None:
        """A gateway that lost the request to another one has no say."""
        job = self.state.jobs.get(message.request_id)
        if job is not None and job.gateway != gateway:
            self.state.measure("stale_messages_total", kind="turn")
        else:
            self._cancel(message.request_id, message.epoch, message.outcome.reason)

    def _cancel(self, request_id: str, epoch: int, reason: Reason | None) -> None:
        job = self.state.jobs.get(request_id)
        if job is not None and job.epoch <= epoch:
            self.end(job, reason, "cancelled")

    # --- not asked for ------------------------------------------------------------------------

    def drop_work_for(self, decode: Peer, text: str) -> None:
        """Nothing is stored for it any more, once the chunk that runs has returned."""
        early = self.state.early
        for key in [key for key, (_, sender, _) in early.items() if sender == decode]:
            del early[key]
        for job in [job for job in self.state.jobs.values() if job.decode == decode]:
            self.end(job, Reason.WORKER_LOST, text)

    def fail(self, job: Job, reason: Reason, text: str, *, retryable: bool = True) -> None:
        """Tell decode (which releases the blocks) and the router (which decides what next)."""
        self.state.note("attempt_failed", job, level="warning", reason=reason, message=text)
        self.forget(job)
        request_id, epoch = job.key
        failed = PrefillFailed(request_id, epoch, reason, text, retryable=retryable)
        self.state.send(job.decode, failed)
        failure = WorkFailed(request_id, epoch, reason, text, retryable=retryable)
        self.state.send(job.router, failure)

    # --- one prompt ---------------------------------------------------------------------------

    def end(self, job: Job, reason: Reason | None, text: str) -> None:
        """Stop working on ``job``: at once, or when its chunk has returned."""
        self.state.note("cancelled", job, reason=reason, message=text)
        if self.state.flies(*job.key):
            job.stopping = True
        else:
            self.stop(job)

    def stop(self, job: Job) -> None:
        """Nothing of it is stored from now on, and decode may know."""
        self.forget(job)
        if job.ticket is not None:
            self.state.send(job.decode, WriterStopped(*job.key))

    def forget(self, job: Job) -> None:
        """It is here no more; a newer attempt of its request may be."""
        if self.state.jobs.get(job.spec.request_id) is job:
            del self.state.jobs[job.spec.request_id]
