"""The end of a request in the ledger: one compare-and-set, repeated while it cannot be reached.

Decides how an outcome becomes the terminal one and which outcome the client is told when the ledger
knows another. Bounded: the calls in flight by the sessions that existed, repetitions by time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from baton.core.ids import Peer
from baton.core.lifecycles import REQUEST_MOVES, TERMINAL, RequestState
from baton.core.outcomes import Ending, Outcome, Reason
from baton.gateway.session import TURN_BITS
from baton.gateway.timers import Timers
from baton.gateway.vocabulary import Command, End
from baton.ports.driving import CallLedger, LedgerAnswered, Note
from baton.ports.ledger import Conflict, EndRequest, Unavailable

#: Ends remembered so that late messages about them are answered, oldest forgotten first.
RECENT_MAX = 4_096
#: More ends waiting for an unreachable ledger are given up, oldest first: their records expire with
#: the gateway's lease or their deadline.
WAITING_MAX = 8_192
REPEAT_FIRST_S = 0.25
REPEAT_MAX_S = 5.0
REPEAT_FOR_S = 60.0
#: A request that was moved here ends once more after so long: a ledger that was failed over may
#: have lost the move with the end, and then its record names a gateway that does not know.
CONFIRM_S = 3.0
#: A record that was asked for before its request's end is there by then.
REPEAT_EARLY_S = 1.0
#: How a record ends that is older than its request's answer, or whose end is forgotten: a client
#: that resumes it has it made again.
FORGOTTEN = Outcome(
    Ending.REFUSED, reason=Reason.SUPERSEDED, message="its end is lost, or was never recorded"
)


@dataclass(slots=True)
class _Ending:
    op: EndRequest
    since: float
    name: str
    client_told: bool
    early: bool
    """A router may be about to make its record."""
    wait_s: float = REPEAT_FIRST_S
    confirms: bool = False
    """It was in effect; this is the look whether it still is."""


@dataclass(slots=True)
class Ended:
    """A request that is over, as far as this gateway remembers."""

    outcome: Outcome
    told: set[Peer]
    """Who has been sent its ``RequestEnded``."""
    left: bool = False
    """It is not over, only not this gateway's any more."""
    left_turn: int = 0
    """The turn since which another gateway has it, if it is known."""


class Endings:
    """All requests of this gateway whose outcome is decided."""

    def __init__(self, me: Peer) -> None:
        self._me = me
        self._waiting: OrderedDict[str, _Ending] = OrderedDict()
        self._timers = Timers()
        self.recent: OrderedDict[str, Ended] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Ends the ledger has not confirmed yet."""
        return sum(not ending.confirms for ending in self._waiting.values())

    @property
    def unconfirmed(self) -> tuple[str, ...]:
        """The requests whose end the ledger has not confirmed yet."""
        return tuple(name for name, ending in self._waiting.items() if not ending.confirms)

    def waits(self, request_id: str) -> bool:
        """Whether the ledger has not confirmed its end yet."""
        ending = self._waiting.get(request_id)
        return ending is not None and not ending.confirms

    def forget(self, request_id: str) -> None:
        """It begins here once more, under the same name."""
        self.recent.pop(request_id, None)
        if self._waiting.pop(request_id, None) is not None:
            self._timers.set(request_id, None)

    def silence(self, name: str) -> None:
        """What its client calls ``name`` begins anew: an older end under that name is nobody's."""
        for ending in self._waiting.values():
            if ending.name == name:
                ending.client_told = True

    def remember(self, request_id: str, outcome: Outcome, told: set[Peer]) -> None:
        """Remember who was told the end of ``request_id``."""
        self.recent[request_id] = Ended(outcome, told)
        while len(self.recent) > RECENT_MAX:
            self.recent.popitem(last=False)

    def leave(self, request_id: str, turn: int) -> None:
        """Somebody else answers for ``request_id``, since ``turn`` if that is known (not 0)."""
        self.remember(request_id, Outcome(Ending.CANCELLED, reason=Reason.SUPERSEDED), set())
        ended = self.recent[request_id]
        ended.left, ended.left_turn = True, turn

    def unheard(self, peer: Peer) -> None:
        """A link is over: what was said on it may be lost, so it is said again when asked."""
        for ended in self.recent.values():
            ended.told.discard(peer)

    def begin(
        self,
        request_id: str,
        epoch: int,
        outcome: Outcome,
        now: float,
        *,
        turn: int,
        tell_first: bool,
        retry_after_ms: int = 0,
        early: bool = False,
        name: str = "",
    ) -> list[Command]:
        """Propose ``outcome`` to the ledger.

        The client of a completed request is told when the ledger has answered, so that it is told
        the one outcome there is; with ``tell_first`` (nobody else could have ended it otherwise,
        or nobody listens) it does not wait. ``early``: the request was given to a router and may
        have no record yet; if so, the end is repeated once. ``name`` is what the client calls the
        request.
        """
        op = EndRequest(request_id, epoch, outcome, by=self._me, turn=turn)
        name = name or request_id
        self._waiting[request_id] = _Ending(op, now, name, client_told=tell_first, early=early)
        commands: list[Command] = []
        if tell_first:
            commands.append(End(name, outcome, retry_after_ms))
        commands.append(CallLedger(op))
        if len(self._waiting) > WAITING_MAX:
            oldest, ending = self._waiting.popitem(last=False)
            self._timers.set(oldest, None)
            if not ending.client_told:
                commands.append(End(ending.name, ending.op.outcome))
            commands.append(Note("end_given_up", {"request_id": oldest}, "warning"))
        return commands

    def answered(self, answer: LedgerAnswered, now: float) -> list[Command]:
        """Take the ledger's answer to one of our calls."""
        assert isinstance(answer.op, EndRequest)
        ending = self._waiting.get(answer.op.request_id)
        if ending is None or ending.op != answer.op:
            return []
        reply = answer.reply
        if isinstance(reply, Unavailable):
            return self._repeat_later(ending, now)
        if isinstance(reply, Conflict) and reply.state is not None:
            if reply.state not in TERMINAL and reply.epoch != ending.op.epoch:
                # The attempt moved on while the end was under way, or the ledger went back. What
                # the client has was valid in every epoch, so the end holds for this one.
                ending.op = msgspec.structs.replace(ending.op, epoch=reply.epoch)
                return [CallLedger(ending.op)]
            if reply.outcome is None and reply.epoch == ending.op.epoch:
                return self._beyond(ending, reply.state, now)
            if reply.outcome is not None:
                return self._finish(ending, _reconcile(ending.op.outcome, reply.outcome), now)
        if ending.early and reply == Conflict(0, None):
            ending.early = False
            self._timers.set(ending.op.request_id, now + REPEAT_EARLY_S)
            return []
        return self._finish(ending, ending.op.outcome, now)

    def _beyond(self, ending: _Ending, state: RequestState, now: float) -> list[Command]:
        """The record does not end so: it is another's, or the ledger went back to before the
        answer."""
        ours = ending.op.outcome
        can = RequestState(ours.ending.value) in REQUEST_MOVES[state]
        if can or ours == FORGOTTEN:
            return self._finish(ending, ours, now)
        told = [] if ending.client_told else [End(ending.name, ours)]
        ending.client_told = True
        ending.op = msgspec.structs.replace(ending.op, outcome=FORGOTTEN)
        return [*told, CallLedger(ending.op)]

    def _finish(self, ending: _Ending, outcome: Outcome, now: float) -> list[Command]:
        request_id = ending.op.request_id
        if ending.op.turn >= 1 << TURN_BITS and not ending.confirms:
            ending.confirms = True
            self._timers.set(request_id, now + CONFIRM_S)
        else:
            del self._waiting[request_id]
            self._timers.set(request_id, None)
        commands: list[Command] = []
        if not ending.client_told:
            commands.append(End(ending.name, outcome))
        ending.client_told = True
        if outcome.ending is not ending.op.outcome.ending:
            fields = {
                "request_id": request_id,
                "ours": str(ending.op.outcome.ending),
                "ledger": str(outcome.ending),
            }
            commands.append(Note("end_differs", fields, "warning"))
        return commands

    def _repeat_later(self, ending: _Ending, now: float) -> list[Command]:
        request_id = ending.op.request_id
        commands: list[Command] = []
        if not ending.client_told:
            ending.client_told = True
            commands.append(End(ending.name, ending.op.outcome))
        if now - ending.since >= REPEAT_FOR_S:
            del self._waiting[request_id]
            return [*commands, Note("end_given_up", {"request_id": request_id}, "warning")]
        self._timers.set(request_id, now + ending.wait_s)
        ending.wait_s = min(ending.wait_s * 2, REPEAT_MAX_S)
        return commands

    def deadline(self) -> float | None:
        """When the next repetition is due."""
        return self._timers.next_at()

    def time_passed(self, now: float) -> list[Command]:
        """Repeat what is due."""
        return [
            CallLedger(self._waiting[key].op)
            for key in self._timers.pop_due(now)
            if key in self._waiting
        ]

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self.recent) <= RECENT_MAX
        assert len(self._waiting) <= WAITING_MAX
        assert len(self._timers) <= len(self._waiting)


def _reconcile(ours: Outcome, ledger: Outcome) -> Outcome:
    """What the client is told when the ledger holds a terminal outcome already.

    An answer that is complete at the gateway (all ids up to the end) stays complete if the ledger
    says so too; its finish reason is the gateway's, which alone knows stop strings.
    """
    if ours.ending is Ending.COMPLETED and ledger.ending is Ending.COMPLETED:
        return ours
    return ledger
