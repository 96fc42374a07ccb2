"""Resumable requests as long as this gateway serves them: sessions, readers, ends.

Decides what a reader is told, how one choice's end is all choices' end, what the ledger is to keep
of an answer, and how long one is here that nobody reads. Who may have it is decided in
``resuming.py``, what becomes of lost ids in ``remaking.py``.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.outcomes import Ending, Outcome, Reason
from baton.gateway.attempts import Attempts
from baton.gateway.kept import ANOTHER_FAILED, Answer, Kept, answer_of
from baton.gateway.session import Session
from baton.gateway.state import State, measure_end
from baton.gateway.timers import Timers
from baton.gateway.vocabulary import Command, End
from baton.ports.driving import CallLedger, Measure, Note
from baton.ports.ledger import CloseResumable

CLOSE_AGAIN_FIRST_S = 0.25
CLOSE_AGAIN_MAX_S = 5.0

SUPERSEDED = Outcome(
    Ending.CANCELLED,
    reason=Reason.SUPERSEDED,
    message="this answer was resumed or cancelled on another connection",
)


class Keeping:
    """The resumable requests of one gateway."""

    def __init__(self, state: State, attempts: Attempts) -> None:
        self.state = state
        self.attempts = attempts
        self.due = Timers()
        """When a kept one is looked at: its window is over, or the ledger is told again. By id."""
        self.windows = Timers()
        """Those that the ledger keeps for their clients: they count as long as it does. By id."""

    def deadline(self) -> float | None:
        """When time matters next."""
        times = (self.due.next_at(), self.windows.next_at())
        return min((time for time in times if time is not None), default=None)

    def check(self) -> None:
        """Assert the invariants."""
        state = self.state
        for resumable_id, kept in state.kept.items():
            assert resumable_id == kept.resumable_id
            assert kept.answers.keys() <= set(kept.choices)
            assert kept.closing is None or kept.ended
        for session in state.sessions.values():
            there = not session.kept or session.kept in state.kept
            assert there, f"{session.request_id} is a choice of nothing"

    @property
    def held(self) -> int:
        """How many count towards the bound."""
        return len(self.state.kept) + len(self.windows)

    @property
    def closing(self) -> int:
        """Ends that the ledger has not confirmed yet."""
        return sum(kept.closing is not None for kept in self.state.kept.values())

    # --- choices and readers ------------------------------------------------------------------

    def session(self, kept: Kept, choice: str, now: float) -> Session:
        """Return the session in which a choice begins here."""
        request_id = kept.request_id(choice)
        spec = replace(kept.specs[choice], request_id=request_id)
        self.state.endings.forget(request_id)  # it may have been here before
        self.state.endings.silence(choice)
        if request_id != choice:
            self.state.names[choice] = request_id
        turn, claimed = kept.first_turn(), kept.turn != kept.again
        return Session(spec, now, choice=choice, kept=kept.resumable_id, turn=turn, claimed=claimed)

    def sessions(self, kept: Kept) -> list[Session]:
        """Return those of its choices that run."""
        sessions = (self.state.session_of(choice) for choice in kept.choices)
        return [session for session in sessions if session is not None]

    def attend(self, kept: Kept) -> list[Command]:
        """Somebody reads: decode may go on without a bound."""
        kept.away_since = None
        commands: list[Command] = []
        for session in self.sessions(kept):
            if session.bound is not None:
                session.bound = session.spec.max_tokens
                commands += self.state.tell_bound(session)
                session.bound = None
        return commands

    def tell(self, kept: Kept, now: float) -> list[Command]:
        """Tell its reader everything from the first id on."""
        told = [
            command
            for choice in kept.choices
            for command in kept.tell(choice, self.state.session_of(choice))
        ]
        # All that there is comes before an end.
        told.sort(key=lambda command: isinstance(command, End))
        commands = [*told, *self.attend(kept)]
        if kept.closing is None:
            if kept.ended and kept.awaited:
                self.due.set(kept.resumable_id, now + kept.window_ms / 1000)
            elif kept.ended:
                self.forget(kept)  # the ledger's answer: it is told now
            else:
                self.due.set(kept.resumable_id, None)
        return commands

    # --- ends ---------------------------------------------------------------------------------

    def refused(self, session: Session, outcome: Outcome, now: float) -> list[Command] | None:
        """Return what follows if it is refused that runs elsewhere: it is not over for that.

        What is too long never ran, and never will: that is its end."""
        kept = self.state.kept.get(session.kept)
        if kept is None or not kept.turn or outcome.ending is not Ending.REFUSED:
            return None
        if outcome.reason is Reason.TOO_LONG:
            return None
        return self.turned_away(kept, outcome, now)

    def turned_away(self, kept: Kept, outcome: Outcome, now: float) -> list[Command]:
        """Not now, or not here. What was claimed may be claimed again; what is new is over."""
        if kept.turn:
            return [*self.leave(kept, outcome), *measure_end(outcome)]
        commands = self.end_sessions(kept, outcome, now)
        for choice in kept.choices:
            if choice not in kept.answers:
                kept.answers[choice] = Answer(b"", (), None, 0, outcome)
                commands.append(End(choice, outcome))
        return commands if kept.closing is not None else [*commands, *self.close(kept, now)]

    def ended(self, session: Session, outcome: Outcome, now: float) -> list[Command]:
        """A choice has its outcome; with the last one, so has the request."""
        kept = self.state.kept.get(session.kept)
        if kept is None:
            return []
        kept.answers[session.name] = answer_of(session, outcome)
        commands: list[Command] = []
        if outcome.ending not in (Ending.COMPLETED, Ending.CANCELLED):
            commands += self.end_sessions(kept, ANOTHER_FAILED, now)
        if kept.ended and kept.closing is None:
            commands += self.close(kept, now)
        return commands

    def close(self, kept: Kept, now: float) -> list[Command]:
        """Let the ledger keep the answer for the window, or forget what nobody wants."""
        limits, closed = self.state.limits, kept.closed
        answer, keep_ms = b"", limits.terminal_ttl_ms
        if closed.keeps:
            answer, keep_ms = kept.record(), kept.window_ms
        if len(answer) > limits.resume_record_bytes_max:
            answer = b""  # it can be made again
        kept.closing = CloseResumable(
            kept.resumable_id, kept.turn, keep_ms, answer, closed, kept.repeat
        )
        kept.closing_until = now + keep_ms / 1000
        kept.wait_s = CLOSE_AGAIN_FIRST_S
        self.due.set(kept.resumable_id, None)
        if closed.keeps:
            self.windows.set(kept.resumable_id, kept.closing_until)
        return [CallLedger(kept.closing)]

    def closed(self, op: CloseResumable, unanswered: bool, now: float) -> list[Command]:
        """The ledger has answered, or not: forget it, or say it again."""
        kept = self.state.kept.get(op.resumable_id)
        if kept is None or kept.closing != op:
            return []
        if unanswered and now < kept.closing_until:
            self.due.set(kept.resumable_id, now + kept.wait_s)
            kept.wait_s = min(2 * kept.wait_s, CLOSE_AGAIN_MAX_S)
        elif kept.awaited:
            # Its reader was told that it is here, and comes for it any moment.
            kept.closing = None
            self.due.set(kept.resumable_id, now + kept.window_ms / 1000)
        else:
            self.forget(kept)
        return []

    def end_all(self, kept: Kept, reason: Reason, now: float) -> list[Command]:
        """Nobody wants it any more."""
        outcome = Outcome(Ending.CANCELLED, reason=reason)
        commands = self.end_sessions(kept, outcome, now)
        if kept.closing is None:
            # Some were never submitted: it was opened, and its client left.
            commands += [End(each, outcome) for each in kept.choices if each not in kept.answers]
            nothing = Answer(b"", (), None, 0, outcome)
            kept.answers = {each: kept.answers.get(each, nothing) for each in kept.choices}
            commands += self.close(kept, now)
        return commands

    def unsubmitted(self, kept: Kept, now: float) -> list[Command]:
        """Its client left before. What was claimed may be claimed again."""
        if kept.turn:
            return self.leave(kept, SUPERSEDED)
        return self.end_all(kept, Reason.CLIENT_DISCONNECTED, now)

    def end_sessions(self, kept: Kept, outcome: Outcome, now: float) -> list[Command]:
        """End those choices that run."""
        commands: list[Command] = []
        for session in self.sessions(kept):
            if session.request_id in self.state.sessions:
                commands += self.state.end(session, outcome, now)
        return commands

    def leave(self, kept: Kept, outcome: Outcome, turn: int = 0) -> list[Command]:
        """It goes on without this gateway: only a reader that is here is told."""
        commands: list[Command] = [note("resumable_left", kept, reason=outcome.reason)]
        for choice in kept.choices:
            session = self.state.session_of(choice)
            if session is not None:
                self.state.remove(session, turn)
            if choice not in kept.answers:
                commands.append(End(choice, outcome))
        self.forget(kept)
        return commands

    def forget(self, kept: Kept) -> None:
        """It is not here any more."""
        self.due.set(kept.resumable_id, None)
        del self.state.kept[kept.resumable_id]

    # --- time ---------------------------------------------------------------------------------

    def time_passed(self, now: float) -> list[Command]:
        """Close what nobody came back for, stop counting what the ledger forgot."""
        commands: list[Command] = []
        for resumable_id in self.due.pop_due(now):
            kept = self.state.kept[resumable_id]
            if kept.closing is not None:
                commands.append(CallLedger(kept.closing))
            elif kept.ended:
                self.forget(kept)
            elif not kept.specs:
                commands += self.unsubmitted(kept, now)
            else:
                commands.append(count("abandoned"))
                commands += self.end_all(kept, Reason.CLIENT_DISCONNECTED, now)
        self.windows.pop_due(now)
        return commands


def note(event: str, kept: Kept, **fields: object) -> Note:
    """Note what happens to a resumable request."""
    return Note(event, {"resumable_id": kept.resumable_id, "turn": kept.turn, **fields})


def count(outcome: str) -> Measure:
    """Count what came of one."""
    return Measure("resumes_total", labels={"outcome": outcome})
