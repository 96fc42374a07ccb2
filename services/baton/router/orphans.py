"""Requests that nobody sees to: ended by whichever router finds them.

Their gateway and their router are both gone, however they went; or their gateway is, and this is
their router and does not know them (the ledger has again what had ended). Decides when the ledger
is looked through and how long somebody who has lost his lease may still come back. A gateway that
lives gives its requests to another router or ends what it does not know, and a router that lives
ends what its gateway left: what is ended here would otherwise be nobody's until its deadline. A
client that may come back has its whole window for it, whoever is gone. What
this router has for a gateway that lives is not over, whatever its record says: that is made right.
"""

from __future__ import annotations

from itertools import islice

from baton.core.lifecycles import LeaseState
from baton.core.outcomes import Ending, Outcome, Reason
from baton.ports.driving import CallLedger, Note
from baton.ports.ledger import Conflict, EndRequest, FindOrphans, Orphans, Reply, Unavailable
from baton.router.attempts import Attempts
from baton.router.state import State
from baton.wire.messages import CancelWork

#: The others are found by the next look, when these are gone.
FOUND_MAX = 512
OUTCOME = Outcome(Ending.CANCELLED, reason=Reason.GATEWAY_LOST)


class OrphanSweep:
    """Looks through the ledger of one router's pool, once a lease TTL."""

    def __init__(self, state: State, attempts: Attempts) -> None:
        self.state = state
        self.attempts = attempts
        self.next_at: float | None = None
        self._until: dict[str, float] = {}
        """When each request is ended; only those found again and again are kept."""

    def time_passed(self, now: float) -> None:
        """Look again if it is time."""
        limits = self.state.limits
        if self.state.lease is not LeaseState.HELD:
            self.next_at = None
            self._until.clear()  # while the ledger is away nobody can be lost
        elif self.next_at is None:
            self.next_at = now + limits.lease_ttl_ms / 1000
        elif now >= self.next_at:
            self.next_at = now + limits.lease_ttl_ms / 1000
            # Those that are not linked here are taken for somebody who sees to it, for now.
            workers = tuple(sorted(self.state.placement.workers))
            op = FindOrphans(self.state.me, limits.lease_ttl_ms, FOUND_MAX, workers)
            self.state.emit(CallLedger(op))

    def found(self, reply: Reply | Unavailable, now: float) -> None:
        """End what was found again long enough after the first time."""
        if not isinstance(reply, Orphans):
            return
        limits, entries = self.state.limits, self.state.entries
        for request_id in entries.keys() & reply.windows_ms.keys():
            if entries[request_id].gateway_lost_at is None:
                # A ledger that lost that it was moved: others would end it as we end theirs.
                self.attempts.restore_what_stands(entries[request_id])
        # A lease, its loss and two looks apart, the whole takes no longer than any other recovery.
        # Nobody has seen to it for all that time: a gateway that comes back has it for itself.
        patience_ms = limits.recovery_ms - 2 * limits.lease_ttl_ms
        self._until = {
            request_id: self._until.get(request_id, now + (patience_ms + window_ms) / 1000)
            for request_id, window_ms in islice(reply.windows_ms.items(), FOUND_MAX)
            if request_id not in entries
        }
        for request_id, until in self._until.items():
            if now >= until:
                # At no epoch: the answer says at which it stands, if its owners are lost.
                self._end(request_id, 0, 0)

    def ended(self, op: EndRequest, reply: Reply | Unavailable) -> None:
        """The ledger says whether it is over, or at which epoch it stands."""
        if op.outcome != OUTCOME or op.request_id in self.state.entries:
            return
        found = op.request_id in self._until
        if isinstance(reply, Conflict):
            live = reply.state is not None and reply.outcome is None
            if live and reply.epoch < op.epoch:
                # Ended here, and the ledger has lost that it came so far.
                self._end(op.request_id, reply.epoch, op.turn)
            elif live and found and reply.epoch > op.epoch:
                self._end(op.request_id, reply.epoch, reply.turn)
        elif found and not isinstance(reply, Unavailable):
            del self._until[op.request_id]
            self.state.measure("orphans_ended_total")
            fields = {"request_id": op.request_id, "epoch": op.epoch}
            self.state.emit(Note("orphan_ended", fields, "warning"))
            # Who works on it waits for a client that has nothing to come back to any more.
            cancel = CancelWork(op.request_id, op.epoch, Reason.GATEWAY_LOST, max(op.turn, 1))
            for worker in sorted(self.state.placement.workers):
                self.state.send(worker, cancel)

    def check(self) -> None:
        """Assert the bound."""
        assert len(self._until) <= FOUND_MAX

    def _end(self, request_id: str, epoch: int, turn: int) -> None:
        """``turn`` is the record's own: it gives no right to end it, and the workers obey it; one
        that this router had may be higher."""
        self.state.emit(CallLedger(EndRequest(request_id, epoch, OUTCOME, self.state.me, turn)))
