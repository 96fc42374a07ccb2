"""What a prefill worker takes in: assignments and tickets, which come over two links.

Decides which assignments are refused, whether a ticket fits its own, and how long one waits for the
other: nothing is computed for either alone.
"""

from __future__ import annotations

from baton.core.ids import Peer
from baton.core.lifecycles import LeaseState
from baton.core.outcomes import Reason
from baton.prefill.arenas import Arenas
from baton.prefill.ends import Ends
from baton.prefill.job import Job
from baton.prefill.state import State
from baton.wire.handover import PrefillFailed, Ticket
from baton.wire.messages import AssignPrefill, WorkAdopted, WorkFailed, WorkRefused


class Admission:
    """The door of one prefill worker."""

    def __init__(self, state: State, arenas: Arenas, ends: Ends) -> None:
        self.state = state
        self.arenas = arenas
        self.ends = ends
        self.placements = 0
        """Heard of, taken in or not: a router counts each as load until the next status."""

    # --- assignments --------------------------------------------------------------------------

    def assign(self, router: Peer, message: AssignPrefill, now: float) -> None:
        """Take it in, or say why not; what is here of an older attempt gives way."""
        self.placements += 1
        request_id, epoch = message.spec.request_id, message.epoch
        known = self.state.jobs.get(request_id)
        if known is not None and known.epoch >= epoch:
            if known.epoch > epoch:
                self._refuse(router, message, Reason.STALE_EPOCH, f"epoch {known.epoch} is here")
            return
        if known is not None:
            self.ends.end(known, Reason.SUPERSEDED, f"epoch {epoch} begins")
        refusal = self._why_not(message)
        if request_id in self.state.jobs and refusal is None:
            refusal = Reason.QUEUE_FULL, "the chunk of an older attempt still runs"
        if refusal is not None:
            self._refuse(router, message, *refusal)
            return
        job = Job.create(message, router, now)
        self.state.jobs[request_id] = job
        early = self.state.early.pop(job.key, None)
        if early is not None:
            self.ticket(early[1], early[0], now)

    def _why_not(self, message: AssignPrefill) -> tuple[Reason, str] | None:
        if self.state.draining:
            return Reason.DRAINING, "this worker is draining"
        if self.state.lease is not LeaseState.HELD:
            return Reason.SUSPECT, "this worker cannot renew its lease"
        if len(self.state.jobs) >= self.state.limits.prefill_queue_max:
            return Reason.QUEUE_FULL, "prefill_queue_max prompts are here"
        if message.decode not in self.state.peers:
            return Reason.NO_LINK, f"no link to {message.decode} yet"
        return None

    def _refuse(self, router: Peer, message: AssignPrefill, reason: Reason, text: str) -> None:
        request_id, epoch = message.spec.request_id, message.epoch
        self.state.note(
            "work_refused", request_id=request_id, epoch=epoch, reason=reason, message=text
        )
        self.state.send(router, WorkRefused(request_id, epoch, reason, text))

    def adopted(self, router: Peer, message: WorkAdopted) -> None:
        """Another router answers for the attempt from now on. A ticket that still waits for its
        assignment waits for a router that is gone."""
        key = message.request_id, message.epoch
        job = self.state.jobs.get(message.request_id)
        if job is not None and job.key == key and job.turn <= message.turn:
            job.router, job.turn, job.gateway = router, message.turn, message.gateway
        early = self.state.early.pop(key, None)
        if early is not None:
            self.state.send(early[1], PrefillFailed(*key, Reason.FENCED, "no assignment came"))

    # --- tickets ------------------------------------------------------------------------------

    def ticket(self, peer: Peer, ticket: Ticket, now: float) -> None:
        """Give it to its job, or keep it until that is assigned."""
        job = self.state.jobs.get(ticket.request_id)
        if job is not None and job.epoch == ticket.epoch and job.decode == peer:
            if job.ticket is None:
                self._accept(job, ticket, peer)
            return
        # Of the same epoch, but another decode worker's: the ledger had lost where it was placed.
        stale = job is not None and job.epoch >= ticket.epoch
        if stale or len(self.state.early) >= self.state.limits.prefill_queue_max:
            reason = Reason.STALE_EPOCH if stale else Reason.QUEUE_FULL
            self.state.send(peer, PrefillFailed(ticket.request_id, ticket.epoch, reason))
            return
        self.state.early[ticket.request_id, ticket.epoch] = (ticket, peer, now)

    def _accept(self, job: Job, ticket: Ticket, peer: Peer) -> None:
        if not ticket.blocks and not ticket.prefix:
            self.state.note("not_needed", job)
            self.ends.forget(job)
            return
        if not self.arenas.allows(ticket.arena):
            self.ends.fail(job, Reason.FENCED, f"the arena of {peer} is not mapped here")
            return
        wrong = job.accept(ticket, self.state.root, self.state.block_size)
        if wrong is not None:
            job.ticket = ticket
            self.ends.fail(job, Reason.FENCED, wrong)

    # --- time ---------------------------------------------------------------------------------

    def give_up(self, now: float) -> None:
        """One of the two has not come in time: who sent the other hears it."""
        wait_s = self.state.limits.ticket_wait_ms / 1000
        for key, (_, sender, since) in list(self.state.early.items()):
            if now - since > wait_s:
                del self.state.early[key]
                self.state.send(sender, PrefillFailed(*key, Reason.FENCED, "no assignment came"))
        for job in list(self.state.jobs.values()):
            if job.ticket is None and now - job.assigned_at > wait_s:
                self.ends.forget(job)
                self.state.note("ticket_never_came", job, level="warning")
                text = "decode's ticket did not come in time"
                self.state.send(job.router, WorkFailed(*job.key, Reason.FENCED, text))
