"""Requests whose gateway and router are both gone: ended by whichever router finds them.

Decides when the ledger is looked through and how long somebody who has lost his lease may still
come back. A gateway that lives gives its requests to another router, and a router that lives ends
what its gateway left: what is ended here would otherwise be nobody's until its deadline.
"""

from __future__ import annotations

from baton.core.lifecycles import LeaseState
from baton.core.outcomes import Ending, Outcome, Reason
from baton.ports.driving import CallLedger, Note
from baton.ports.ledger import Conflict, EndRequest, FindOrphans, Orphans, Reply, Unavailable
from baton.router.state import State

#: The others are found by the next look, when these are gone.
FOUND_MAX = 512
OUTCOME = Outcome(Ending.CANCELLED, reason=Reason.GATEWAY_LOST)


class OrphanSweep:
    """Looks through the ledger of one router's pool, once a lease TTL."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.next_at: float | None = None
        self._since: dict[str, float] = {}
        """When each request was found first; only those found again and again are kept."""

    def time_passed(self, now: float) -> None:
        """Look again if it is time."""
        limits = self.state.limits
        if self.state.lease is not LeaseState.HELD:
            self.next_at = None
            self._since.clear()  # while the ledger is away nobody can be lost
        elif self.next_at is None:
            self.next_at = now + limits.lease_ttl_ms / 1000
        elif now >= self.next_at:
            self.next_at = now + limits.lease_ttl_ms / 1000
            op = FindOrphans(self.state.me, limits.lease_ttl_ms, FOUND_MAX)
            self.state.emit(CallLedger(op))

    def found(self, reply: Reply | Unavailable, now: float) -> None:
        """End what was found again long enough after the first time."""
        if not isinstance(reply, Orphans):
            return
        limits = self.state.limits
        self._since = {
            request_id: self._since.get(request_id, now)
            for request_id in reply.request_ids[:FOUND_MAX]
            if request_id not in self.state.entries
        }
        # A lease, its loss and two looks apart, the whole takes no longer than any other recovery.
        patience_ms = limits.recovery_ms - 2 * limits.lease_ttl_ms
        for request_id, since in self._since.items():
            if (now - since) * 1000 >= patience_ms:
                # At no epoch: the answer says at which it stands, if its owners are lost.
                self._end(request_id, 0)

    def ended(self, op: EndRequest, reply: Reply | Unavailable) -> None:
        """The ledger says whether it is over, or at which epoch it stands."""
        if op.outcome != OUTCOME or op.request_id not in self._since:
            return
        if isinstance(reply, Conflict) and reply.outcome is None and reply.epoch > op.epoch:
            self._end(op.request_id, reply.epoch)
        elif not isinstance(reply, Conflict | Unavailable):
            del self._since[op.request_id]
            self.state.measure("orphans_ended_total")
            fields = {"request_id": op.request_id, "epoch": op.epoch}
            self.state.emit(Note("orphan_ended", fields, "warning"))

    def check(self) -> None:
        """Assert the bound."""
        assert len(self._since) <= FOUND_MAX

    def _end(self, request_id: str, epoch: int) -> None:
        self.state.emit(CallLedger(EndRequest(request_id, epoch, OUTCOME, self.state.me)))
