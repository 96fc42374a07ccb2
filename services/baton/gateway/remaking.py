"""Making an answer again whose ids are nowhere: they died with the gateway that had them.

Decides when the requests of a claimed answer run once more, under new names, and what its readers
hear if they cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from baton.core.outcomes import Ending, Outcome, Reason
from baton.gateway.attempts import Attempts
from baton.gateway.keeping import SUPERSEDED, Keeping, count, note
from baton.gateway.kept import CLAIMS_MAX, Kept
from baton.gateway.session import Session
from baton.gateway.state import State
from baton.gateway.timers import Timers
from baton.gateway.vocabulary import Command
from baton.ports.driving import CallLedger
from baton.ports.ledger import (
    ClaimResumable,
    CloseResumable,
    Denial,
    Denied,
    EndRequest,
    Reply,
    Resumable,
    Unavailable,
)

LEDGER_AGAIN_S = 0.2

_OVER = Outcome(
    Ending.CANCELLED, reason=Reason.GATEWAY_LOST, message="nobody came back within its window"
)
_NO_LEDGER = Outcome(
    Ending.REFUSED, reason=Reason.LEDGER_UNAVAILABLE, message="the ledger cannot be reached"
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The ledger has not said yet whether it may be made again."""

    op: ClaimResumable
    since: float


class Remaking:
    """All answers of one gateway that are to be made again."""

    def __init__(self, state: State, attempts: Attempts, keeping: Keeping) -> None:
        self.state = state
        self.attempts = attempts
        self.keeping = keeping
        self._asked: dict[str, _Asked] = {}
        """By claim."""
        self._ask_again = Timers()

    def deadline(self) -> float | None:
        """When time matters next."""
        return self._ask_again.next_at()

    def lost(self, session: Session, now: float) -> list[Command]:
        """A request that was claimed is complete, and its ids are nowhere: make them again."""
        kept = self.state.kept[session.kept]
        told = any(each.ids for each in self.keeping.sessions(kept))
        told = told or any(answer.ids for answer in kept.answers.values())
        commands: list[Command] = [note("resumable_lost", kept, told=told)]
        for each in self.keeping.sessions(kept):
            self.state.remove(each)
            if each is not session:
                outcome = Outcome(Ending.CANCELLED, reason=Reason.SUPERSEDED)
                end = EndRequest(each.request_id, each.epoch, outcome, self.state.me, each.turn)
                commands.append(CallLedger(end))
        kept.answers.clear()
        if told:
            # Its reader has a part of the others: it comes back, and all begins anew.
            op = CloseResumable(kept.resumable_id, kept.turn, kept.window_ms, repeat=kept.repeat)
            return [*commands, CallLedger(op), *self.keeping.leave(kept, SUPERSEDED)]
        claim = kept.again_claim = f"{self.state.me}:{kept.resumable_id}:{kept.turn}"
        again = ClaimResumable(
            kept.resumable_id, self.state.me, claim, kept.owner, token=kept.token, again=True
        )
        self._asked[claim] = _Asked(again, now)
        return [*commands, CallLedger(again)]

    def answered(self, op: ClaimResumable, reply: Reply | Unavailable, now: float) -> list[Command]:
        """Take the ledger's answer to a claim of this part."""
        asked = self._asked.get(op.claim)
        if asked is None or asked.op != op:
            return []
        self._ask_again.set(op.claim, None)
        match reply:
            case Unavailable() if (now - asked.since) * 1000 < self.state.limits.ledger_wait_ms:
                self._ask_again.set(op.claim, now + LEDGER_AGAIN_S)
                return []
            case Unavailable():
                outcome = _NO_LEDGER
            case Resumable() if reply.turn <= CLAIMS_MAX:
                del self._asked[op.claim]
                return self._given(op, reply, now)
            case Resumable() | Denied(Denial.OVER):
                outcome = _OVER
            case Denied():
                outcome = SUPERSEDED
            case _:
                raise AssertionError(f"{type(reply).__name__} does not answer {type(op).__name__}")
        del self._asked[op.claim]
        kept = self.state.kept.get(op.resumable_id)
        if kept is None or kept.closing is not None or op.claim != kept.again_claim:
            return []  # it was left meanwhile, or is over
        return self.keeping.leave(kept, outcome)

    def _given(self, op: ClaimResumable, given: Resumable, now: float) -> list[Command]:
        kept = self.state.kept.get(op.resumable_id)
        if kept is None or op.claim != kept.again_claim:
            return []  # it was left meanwhile
        if kept.closing is not None:
            # It is over meanwhile, and the ledger has a new turn of it.
            kept.closing = replace(kept.closing, turn=given.turn)
            return [CallLedger(kept.closing)]
        if kept.ended:
            return []  # the ledger knows that, and a reader is about to hear it
        return self._go_on(kept, given, now)

    def _go_on(self, kept: Kept, given: Resumable, now: float) -> list[Command]:
        """Tell the answer that the ledger has after all, or make it again."""
        kept.turn, kept.again = given.turn, given.again
        if given.answer:
            kept.load(given.answer)
            if kept.away_since is not None:
                self.keeping.forget(kept)
                return []
            return [count("kept"), *self.keeping.tell(kept, now)]
        commands: list[Command] = [count("again")]
        for choice in kept.choices:
            commands += self.attempts.begin(self.keeping.session(kept, choice, now), now)
        return commands

    def time_passed(self, now: float) -> list[Command]:
        """Ask the ledger again."""
        return [CallLedger(self._asked[claim].op) for claim in self._ask_again.pop_due(now)]
