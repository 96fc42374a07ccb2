"""Records that name this gateway and that it does not know: ended by the gateway itself.

Decides when the ledger is looked through for them and how they end. They are there when a ledger
was failed over to an older state (what ended meanwhile is live again in it), or when an end was
given up. A request's gateway knows it before it has a record and until its end is confirmed, so
what it does not know is over, whatever its record says.
"""

from __future__ import annotations

from baton.core.lifecycles import LeaseState
from baton.core.outcomes import Outcome
from baton.gateway.endings import FORGOTTEN
from baton.gateway.state import State
from baton.gateway.vocabulary import Command
from baton.ports.driving import CallLedger, Measure, Note
from baton.ports.ledger import Conflict, EndRequest, FindOwned, Owned, Reply, Unavailable

#: Unknown ones named at a time, beside all that run; the next look finds the others.
UNKNOWN_MAX = 512


class UnknownSweep:
    """Looks through the records of one gateway, once a lease TTL."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.next_at: float | None = None
        self._left: set[str] = set()
        """Requests that others were to go on with, as long as their records still name this one:
        nobody here knows whether they are over."""
        self._ending: dict[str, EndRequest] = {}

    def time_passed(self, now: float) -> list[Command]:
        """Look again if it is time."""
        limits = self.state.limits
        if self.state.lease is not LeaseState.HELD:
            self.next_at = None
        elif self.next_at is None:
            self.next_at = now + limits.lease_ttl_ms / 1000
        elif now >= self.next_at:
            self.next_at = now + limits.lease_ttl_ms / 1000
            return [CallLedger(FindOwned(self.state.me, limits.sessions_max + UNKNOWN_MAX))]
        return []

    def found(self, reply: Reply | Unavailable) -> list[Command]:
        """End what nobody here knows."""
        if not isinstance(reply, Owned):
            return []
        unknown = [name for name in reply.request_ids if not self._known(name)]
        self._left = {name for name in unknown if name in self._left or self._is_left(name)}
        self._ending.clear()
        # At no epoch: the answer says at which it stands.
        return [self._end(name, 0) for name in unknown if name not in self._left]

    def answered(self, op: EndRequest, reply: Reply | Unavailable) -> list[Command]:
        """The ledger says whether it is over, or at which epoch it stands."""
        if self._ending.pop(op.request_id, None) != op or isinstance(reply, Unavailable):
            return []
        if not isinstance(reply, Conflict):
            fields = {"request_id": op.request_id, "epoch": op.epoch}
            return [Measure("unknown_ended_total"), Note("unknown_ended", fields, "warning")]
        if reply.state is None or reply.outcome is not None or self._known(op.request_id):
            return []
        if reply.epoch > op.epoch:
            return [self._end(op.request_id, reply.epoch)]
        # Not from that state: the record is older than the answer.
        return [] if op.outcome == FORGOTTEN else [self._end(op.request_id, op.epoch, FORGOTTEN)]

    def sent(self, op: EndRequest) -> bool:
        """Whether ``op`` is one of these ends."""
        return self._ending.get(op.request_id) == op

    def check(self) -> None:
        """Assert the invariants."""
        most = self.state.limits.sessions_max + UNKNOWN_MAX
        assert len(self._left) <= most and len(self._ending) <= most

    def _known(self, request_id: str) -> bool:
        state = self.state
        return request_id in state.sessions or state.endings.waits(request_id)

    def _is_left(self, request_id: str) -> bool:
        ended = self.state.endings.recent.get(request_id)
        return ended is not None and ended.left

    def _end(self, request_id: str, epoch: int, outcome: Outcome | None = None) -> Command:
        if outcome is None:
            ended = self.state.endings.recent.get(request_id)
            outcome = FORGOTTEN if ended is None or ended.left else ended.outcome
        op = EndRequest(request_id, epoch, outcome, self.state.me)
        self._ending[request_id] = op
        return CallLedger(op)
