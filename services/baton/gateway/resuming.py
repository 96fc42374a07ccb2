"""Requests that outlive their connection: opened, left, resumed here or elsewhere, kept, given up.

Decides who serves a resumable request (its last claim in the ledger), how long it goes on with
nobody reading, and what a client that comes back is told (ADR 0017). Which events a client has seen
is not its business: a new reader is told everything from the first id.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from baton.core.outcomes import Ending, Outcome, Reason
from baton.gateway.attempts import Attempts
from baton.gateway.kept import ANOTHER_FAILED, CLAIMS_MAX, Answer, Kept, answer_of
from baton.gateway.session import Session
from baton.gateway.state import State, measure_end
from baton.gateway.timers import Timers
from baton.gateway.vocabulary import (
    CancelWanted,
    Command,
    End,
    NotResumed,
    ReaderBack,
    ReaderGone,
    Ready,
    ResumableWanted,
    ResumeWanted,
    Submitted,
    Unresumable,
)
from baton.ports.driving import CallLedger, LedgerAnswered, Measure, Note, Send
from baton.ports.ledger import (
    ClaimResumable,
    CloseResumable,
    Denial,
    Denied,
    EndRequest,
    OpenResumable,
    Repeated,
    RestoreResumable,
    Resumable,
    Unavailable,
)
from baton.wire.messages import RequestMoved, RequestResumed

LEDGER_AGAIN_S = 0.2
CLOSE_AGAIN_FIRST_S = 0.25
CLOSE_AGAIN_MAX_S = 5.0

_SUPERSEDED = Outcome(
    Ending.CANCELLED,
    reason=Reason.SUPERSEDED,
    message="this answer was resumed or cancelled on another connection",
)
_OVER = Outcome(
    Ending.CANCELLED, reason=Reason.GATEWAY_LOST, message="nobody came back within its window"
)
_NO_LEDGER = Outcome(
    Ending.REFUSED, reason=Reason.LEDGER_UNAVAILABLE, message="the ledger cannot be reached"
)
#: Requests that are resumed are taken in until there are so many times ``resumables_max``.
HERE_AGAIN = 2
_DRAINING = Outcome(
    Ending.REFUSED, reason=Reason.DRAINING, message="this gateway is shutting down; resume again"
)


@dataclass(slots=True)
class _Asking:
    """An opening or claim that the ledger has not answered."""

    event: ResumableWanted | ResumeWanted | None
    """Who waits; ``None``: a reader that is there already."""
    op: OpenResumable | ClaimResumable
    since: float


class Resuming:
    """All resumable requests of one gateway."""

    def __init__(self, state: State, attempts: Attempts) -> None:
        self.state = state
        self.attempts = attempts
        self._draining = False
        self._asking: dict[str, _Asking] = {}
        self._ask_again = Timers()
        """By claim."""
        self._due = Timers()
        """When a kept one is looked at: its window is over, or the ledger is told again. By id."""
        self._windows = Timers()
        """Those that the ledger keeps for their clients: they count as long as it does. By id."""

    # --- the machine's part of deadline and check ---------------------------------------------

    def deadline(self) -> float | None:
        """When time matters next."""
        times = (self._ask_again.next_at(), self._due.next_at(), self._windows.next_at())
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
        return len(self.state.kept) + len(self._asking) + len(self._windows)

    @property
    def closing(self) -> int:
        """Ends that the ledger has not confirmed yet."""
        return sum(kept.closing is not None for kept in self.state.kept.values())

    # --- what clients ask for -----------------------------------------------------------------

    def open(
        self, event: ResumableWanted, refusal: tuple[Reason, str] | None, now: float
    ) -> list[Command]:
        """A new request is to be resumable, or an idempotency key may name one that is there."""
        if refusal is None and self.held >= self.state.limits.resumables_max:
            refusal = Reason.OVERLOADED, "this gateway keeps as many resumable requests as it may"
        if refusal is not None:
            return [NotResumed(event.resumable_id, Unresumable.REFUSED, *refusal)]
        return self._ask(event.resumable_id, _Asking(event, self._opening(event), now))

    def _opening(self, event: ResumableWanted, *, anew: bool = False) -> OpenResumable:
        return OpenResumable(
            resumable_id=event.resumable_id,
            gateway=self.state.me,
            token=event.token,
            owner=event.owner,
            requests=event.choices,
            recipe=event.recipe,
            window_ms=event.window_ms,
            life_ms=self._life_ms(event.window_ms),
            repeat=event.repeat,
            body=event.body,
            anew=anew,
        )

    def _life_ms(self, window_ms: int) -> int:
        """Return how long the ledger keeps a record that nobody closes."""
        limits = self.state.limits
        return limits.request_deadline_ms + window_ms + limits.terminal_ttl_ms

    def announce(self) -> list[Command]:
        """The lease was lost and is held again: the ledger may have been emptied, and then it knows
        no token any more. What is served here, it learns again; so too the answers that it has not
        confirmed."""
        commands: list[Command] = []
        for kept in self.state.kept.values():
            kept_answer = kept.closing is not None and kept.closing.closed.keeps
            if not kept.ended or kept_answer:
                restored = kept.restored(self.state.me, self._life_ms(kept.window_ms))
                commands.append(CallLedger(restored))
            if kept_answer and kept.closing is not None:
                commands.append(CallLedger(kept.closing))
        return commands

    def resume(self, event: ResumeWanted, now: float) -> list[Command]:
        """A client comes back. Those of a gateway that died may all come here: there is more room
        for them than for new ones, within a bound."""
        room = HERE_AGAIN * self.state.limits.resumables_max
        if event.resumable_id not in self.state.kept and self.held >= room:
            text = "this gateway serves as many resumable requests as it may; resume again"
            return [NotResumed(event.claim, Unresumable.REFUSED, Reason.OVERLOADED, text)]
        op = ClaimResumable(
            event.resumable_id, self.state.me, event.claim, event.owner, token=event.token
        )
        return self._ask(event.claim, _Asking(event, op, now))

    def submitted(
        self, event: Submitted, refusal: tuple[Reason, str] | None, now: float
    ) -> list[Command]:
        """One choice of a kept request, as its recipe makes it."""
        kept, choice = self.state.kept.get(event.resumable_id), event.spec.request_id
        if kept is None:
            return [self._left(choice)]
        if choice in kept.answers:
            return kept.tell(choice, None)  # turned away, cancelled, or complete elsewhere
        self._due.set(kept.resumable_id, None)
        if choice in kept.specs:
            # Another one that it was given to has submitted it meanwhile: this one reads that.
            return [*kept.tell(choice, self.state.session_of(choice)), *self._attend(kept)]
        kept.specs[choice] = event.spec
        if refusal is not None:
            return self._turned_away(kept, Outcome(Ending.REFUSED, None, *refusal), now)
        return self.attempts.begin(self._session(kept, event.spec.request_id, now), now)

    def refused(self, session: Session, outcome: Outcome, now: float) -> list[Command] | None:
        """Return what follows if it is refused that runs elsewhere: it is not over for that.

        What is too long never ran, and never will: that is its end."""
        kept = self.state.kept.get(session.kept)
        if kept is None or not kept.turn or outcome.ending is not Ending.REFUSED:
            return None
        if outcome.reason is Reason.TOO_LONG:
            return None
        return self._turned_away(kept, outcome, now)

    def _turned_away(self, kept: Kept, outcome: Outcome, now: float) -> list[Command]:
        """Not now, or not here. What was claimed may be claimed again; what is new is over."""
        if kept.turn:
            return [*self._leave(kept, outcome), *measure_end(outcome)]
        commands = self._end_sessions(kept, outcome, now)
        for choice in kept.choices:
            if choice not in kept.answers:
                kept.answers[choice] = Answer(b"", (), None, 0, outcome)
                commands.append(End(choice, outcome))
        return commands if kept.closing is not None else [*commands, *self._close(kept, now)]

    def _session(self, kept: Kept, choice: str, now: float) -> Session:
        request_id = kept.request_id(choice)
        spec = replace(kept.specs[choice], request_id=request_id)
        self.state.endings.forget(request_id)  # it may have been here before
        self.state.endings.silence(choice)
        if request_id != choice:
            self.state.names[choice] = request_id
        turn, claimed = kept.first_turn(), kept.turn != kept.again
        return Session(spec, now, choice=choice, kept=kept.resumable_id, turn=turn, claimed=claimed)

    def reader_gone(self, event: ReaderGone, now: float) -> list[Command]:
        """Nobody reads: it goes on for its window, within a bound of tokens."""
        kept = self.state.kept.get(event.resumable_id)
        if kept is None or kept.away_since is not None or kept.closing is not None:
            return []
        if not kept.specs:
            if kept.ended and kept.awaited > 1:
                kept.awaited -= 1  # an answer that another one was given too
                return []
            return self._unsubmitted(kept, now)
        kept.away_since = now
        if self._draining:
            return self._leave(kept, _DRAINING)
        commands: list[Command] = [_note("reader_gone", kept)]
        for session in self._sessions(kept):
            upto = len(session.ids) + self.state.limits.resume_tokens_max
            session.bound = min(upto, session.spec.max_tokens)
            commands += self.state.tell_bound(session)
        self._due.set(kept.resumable_id, now + kept.window_ms / 1000)
        return commands

    def _unsubmitted(self, kept: Kept, now: float) -> list[Command]:
        """Its client left before. What was claimed may be claimed again."""
        if kept.turn:
            return self._leave(kept, _SUPERSEDED)
        return self._end_all(kept, Reason.CLIENT_DISCONNECTED, now)

    def reader_back(self, event: ReaderBack, now: float) -> list[Command]:
        """Somebody reads: tell everything from the first id on, and lift the bound."""
        kept = self.state.kept.get(event.resumable_id)
        if kept is None or not (kept.specs or kept.ended):
            # Nothing is made here, or somebody else is to submit it, who was given it later.
            return [self._left(choice) for choice in event.choices]
        kept.awaited = max(0, kept.awaited - 1)
        return self._tell(kept, now)

    def _attend(self, kept: Kept) -> list[Command]:
        kept.away_since = None
        commands: list[Command] = []
        for session in self._sessions(kept):
            if session.bound is not None:
                session.bound = session.spec.max_tokens
                commands += self.state.tell_bound(session)
                session.bound = None
        return commands

    def _tell(self, kept: Kept, now: float) -> list[Command]:
        told = [
            command
            for choice in kept.choices
            for command in kept.tell(choice, self.state.session_of(choice))
        ]
        # All that there is comes before an end.
        told.sort(key=lambda command: isinstance(command, End))
        commands = [*told, *self._attend(kept)]
        if kept.closing is None:
            if kept.ended and kept.awaited:
                self._due.set(kept.resumable_id, now + kept.window_ms / 1000)
            elif kept.ended:
                self._forget(kept)  # the ledger's answer: it is told now
            else:
                self._due.set(kept.resumable_id, None)
        return commands

    def _left(self, choice: str) -> End:
        """It was given to a reader and has left before that one read: who has nothing to read must
        not wait for it."""
        return End(choice, _DRAINING if self._draining else _SUPERSEDED)

    def cancel(self, event: CancelWanted, now: float) -> list[Command]:
        """Its client wants no more of it."""
        kept = self.state.kept.get(event.resumable_id)
        return [] if kept is None else self._end_all(kept, Reason.CLIENT_CANCELLED, now)

    # --- the ledger's answers -----------------------------------------------------------------

    def _ask(self, claim: str, asking: _Asking) -> list[Command]:
        self._asking[claim] = asking
        return [CallLedger(asking.op)]

    def answered(self, answer: LedgerAnswered, now: float) -> list[Command]:
        """Take the answer to one of this part's calls."""
        op, reply = answer.op, answer.reply
        if isinstance(op, CloseResumable):
            return self._closed(op, isinstance(reply, Unavailable), now)
        if isinstance(op, RestoreResumable):
            return []  # who has a higher turn tells his router, and that one this gateway
        assert isinstance(op, OpenResumable | ClaimResumable)
        claim = op.claim if isinstance(op, ClaimResumable) else op.resumable_id
        asking = self._asking.get(claim)
        if asking is None or asking.op != op:
            return []
        self._ask_again.set(claim, None)
        match reply:
            case Unavailable():
                return self._unanswered(claim, asking, now)
            case Resumable():
                del self._asking[claim]
                return self._given(claim, asking, reply, now)
            case Repeated():
                return self._repeated(claim, asking, reply)
            case Denied():
                return self._denied(claim, asking, reply.denial, now)
            case _:
                raise AssertionError(f"{type(reply).__name__} does not answer {type(op).__name__}")

    def _unanswered(self, claim: str, asking: _Asking, now: float) -> list[Command]:
        here = self._served_here(asking)
        if here is not None:
            del self._asking[claim]
            return self._ready(claim, here, "here", now, submit=False)
        if (now - asking.since) * 1000 < self.state.limits.ledger_wait_ms:
            self._ask_again.set(claim, now + LEDGER_AGAIN_S)
            return []
        del self._asking[claim]
        if asking.event is None:
            return self._not_again(claim, asking, _NO_LEDGER)
        reason, text = Reason.LEDGER_UNAVAILABLE, "the ledger cannot be reached"
        return [NotResumed(claim, Unresumable.REFUSED, reason, text)]

    def _served_here(self, asking: _Asking) -> Kept | None:
        """Return the request itself, where the ledger cannot say who serves it but it is here."""
        op = asking.op
        kept = self.state.kept.get(op.resumable_id)
        if kept is None or asking.event is None or not isinstance(op, ClaimResumable):
            return None
        return kept if (kept.token, kept.owner) == (op.token, op.owner) else None

    def _repeated(self, claim: str, asking: _Asking, reply: Repeated) -> list[Command]:
        event = asking.event
        assert isinstance(event, ResumableWanted)
        if not reply.same:
            del self._asking[claim]
            return [NotResumed(claim, Unresumable.DIFFERS)]
        op = ClaimResumable(
            resumable_id=reply.resumable_id,
            gateway=self.state.me,
            claim=claim,
            owner=event.owner,
            repeat=event.repeat,
            new_token=event.token,
        )
        return self._ask(claim, _Asking(event, op, asking.since))

    def _denied(self, claim: str, asking: _Asking, denial: Denial, now: float) -> list[Command]:
        event = asking.event
        if isinstance(event, ResumableWanted):
            # What the idempotency key named is gone meanwhile: this one takes its place.
            return self._ask(claim, _Asking(event, self._opening(event, anew=True), asking.since))
        del self._asking[claim]
        if event is None:
            outcome = _OVER if denial is Denial.OVER else _SUPERSEDED
            return self._not_again(claim, asking, outcome)
        here = self._served_here(asking) if denial is Denial.UNKNOWN else None
        if here is not None:
            return self._ready(claim, here, "here", now, submit=False)
        return [NotResumed(claim, Unresumable(denial.value)), _count(denial.value)]

    def _given(self, claim: str, asking: _Asking, given: Resumable, now: float) -> list[Command]:
        op, here = asking.op, self.state.kept.get(asking.op.resumable_id)
        if given.turn > CLAIMS_MAX:
            return [NotResumed(claim, Unresumable.OVER), _count("over")]
        token = (op.new_token or op.token) if isinstance(op, ClaimResumable) else op.token
        if asking.event is None:
            if here is None or claim != here.again_claim:
                return []  # it was left meanwhile
            if here.closing is not None:
                # It is over meanwhile, and the ledger has a new turn of it.
                here.closing = replace(here.closing, turn=given.turn)
                return [CallLedger(here.closing)]
            if here.ended:
                return []  # the ledger knows that, and a reader is about to hear it
            return self._go_on(here, given, now)
        last = here is not None and here.turn in (given.former, given.turn)
        # What is complete here and kept there is the same, and whoever was given it may still come.
        same = here is not None and here.ended and here.record() == given.answer
        if here is not None and (same or (last and not given.answer)):
            here.turn, here.token = given.turn, token
            return self._ready(claim, here, "here", now, submit=False)
        commands = [] if here is None else self._leave(here, _SUPERSEDED)
        kept = Kept(
            resumable_id=op.resumable_id,
            owner=op.owner,
            token=token,
            repeat=given.repeat,
            window_ms=given.window_ms,
            recipe=given.recipe,
            choices=given.requests,
            body=given.body,
            turn=given.turn,
            again=given.again,
        )
        self.state.kept[kept.resumable_id] = kept
        if given.answer:
            kept.load(given.answer)
            return [*commands, *self._ready(claim, kept, "kept", now, submit=False)]
        way = "opened" if isinstance(op, OpenResumable) else "again" if given.again else "moved"
        return [*commands, *self._ready(claim, kept, way, now, submit=True)]

    def _ready(
        self, claim: str, kept: Kept, way: str, now: float, *, submit: bool
    ) -> list[Command]:
        if submit:
            # Who leaves instead is not always heard of: somebody may still read what was before.
            self._due.set(kept.resumable_id, now + kept.window_ms / 1000)
        else:
            kept.awaited += 1
            if kept.closing is None and (kept.ended or kept.away_since is not None):
                # Told as soon as its reader is there; it is for nobody if that takes too long.
                self._due.set(kept.resumable_id, now + kept.window_ms / 1000)
        ready = Ready(claim, kept.resumable_id, kept.recipe, kept.window_ms, submit)
        return [ready, _note("resumable_ready", kept, way=way), _count(way)]

    # --- ends ---------------------------------------------------------------------------------

    def ended(self, session: Session, outcome: Outcome, now: float) -> list[Command]:
        """A choice has its outcome; with the last one, so has the request."""
        kept = self.state.kept.get(session.kept)
        if kept is None:
            return []
        kept.answers[session.name] = answer_of(session, outcome)
        commands: list[Command] = []
        if outcome.ending not in (Ending.COMPLETED, Ending.CANCELLED):
            commands += self._end_sessions(kept, ANOTHER_FAILED, now)
        if kept.ended and kept.closing is None:
            commands += self._close(kept, now)
        return commands

    def _close(self, kept: Kept, now: float) -> list[Command]:
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
        self._due.set(kept.resumable_id, None)
        if closed.keeps:
            self._windows.set(kept.resumable_id, kept.closing_until)
        return [CallLedger(kept.closing)]

    def _closed(self, op: CloseResumable, unanswered: bool, now: float) -> list[Command]:
        kept = self.state.kept.get(op.resumable_id)
        if kept is None or kept.closing != op:
            return []
        if unanswered and now < kept.closing_until:
            self._due.set(kept.resumable_id, now + kept.wait_s)
            kept.wait_s = min(2 * kept.wait_s, CLOSE_AGAIN_MAX_S)
        elif kept.awaited:
            # Its reader was told that it is here, and comes for it any moment.
            kept.closing = None
            self._due.set(kept.resumable_id, now + kept.window_ms / 1000)
        else:
            self._forget(kept)
        return []

    def _end_all(self, kept: Kept, reason: Reason, now: float) -> list[Command]:
        outcome = Outcome(Ending.CANCELLED, reason=reason)
        commands = self._end_sessions(kept, outcome, now)
        if kept.closing is None:
            # Some were never submitted: it was opened, and its client left.
            commands += [End(each, outcome) for each in kept.choices if each not in kept.answers]
            nothing = Answer(b"", (), None, 0, outcome)
            kept.answers = {each: kept.answers.get(each, nothing) for each in kept.choices}
            commands += self._close(kept, now)
        return commands

    def _end_sessions(self, kept: Kept, outcome: Outcome, now: float) -> list[Command]:
        commands: list[Command] = []
        for session in self._sessions(kept):
            if session.request_id in self.state.sessions:
                commands += self.state.end(session, outcome, now)
        return commands

    def _forget(self, kept: Kept) -> None:
        self._due.set(kept.resumable_id, None)
        del self.state.kept[kept.resumable_id]

    def _leave(self, kept: Kept, outcome: Outcome, turn: int = 0) -> list[Command]:
        """It goes on without this gateway: only a reader that is here is told."""
        commands: list[Command] = [_note("resumable_left", kept, reason=outcome.reason)]
        for choice in kept.choices:
            session = self.state.session_of(choice)
            if session is not None:
                self.state.remove(session, turn)
            if choice not in kept.answers:
                commands.append(End(choice, outcome))
        self._forget(kept)
        return commands

    # --- elsewhere ----------------------------------------------------------------------------

    def resumed_elsewhere(self, message: RequestResumed) -> list[Command]:
        """Another gateway serves its client from now on."""
        session = self.state.sessions.get(message.request_id)
        if session is None or not session.kept or session.turn >= message.turn:
            return []
        kept = self.state.kept[session.kept]
        # Its router may be another one by now: the one that was is to forget it.
        moved = [
            Send(each.router, RequestMoved(each.request_id, message.turn))
            for each in self._sessions(kept)
            if each.router is not None and each.router in self.state.links
        ]
        return [*moved, *self._leave(kept, _SUPERSEDED, message.turn)]

    def drain(self) -> list[Command]:
        """This gateway goes away: what nobody reads here goes on without it at once."""
        self._draining = True
        return [
            command
            for kept in list(self.state.kept.values())
            if kept.away_since is not None and kept.closing is None
            for command in self._leave(kept, _DRAINING)
        ]

    def drained(self) -> list[Command]:
        """Time is up: the others are left as well, and their clients may resume elsewhere."""
        return [
            command
            for kept in list(self.state.kept.values())
            if kept.closing is None
            for command in self._leave(kept, _DRAINING)
        ]

    # --- what was lost ------------------------------------------------------------------------

    def lost(self, session: Session, now: float) -> list[Command]:
        """A request that was claimed is complete, and its ids are nowhere: make them again."""
        kept = self.state.kept[session.kept]
        told = any(each.ids for each in self._sessions(kept))
        told = told or any(answer.ids for answer in kept.answers.values())
        commands: list[Command] = [_note("resumable_lost", kept, told=told)]
        for each in self._sessions(kept):
            self.state.remove(each)
            if each is not session:
                outcome = Outcome(Ending.CANCELLED, reason=Reason.SUPERSEDED)
                end = EndRequest(each.request_id, each.epoch, outcome, self.state.me, each.turn)
                commands.append(CallLedger(end))
        kept.answers.clear()
        if told:
            # Its reader has a part of the others: it comes back, and all begins anew.
            op = CloseResumable(kept.resumable_id, kept.turn, kept.window_ms, repeat=kept.repeat)
            return [*commands, CallLedger(op), *self._leave(kept, _SUPERSEDED)]
        claim = kept.again_claim = f"{self.state.me}:{kept.resumable_id}:{kept.turn}"
        again = ClaimResumable(
            kept.resumable_id, self.state.me, claim, kept.owner, token=kept.token, again=True
        )
        return [*commands, *self._ask(claim, _Asking(None, again, now))]

    def _not_again(self, claim: str, asking: _Asking, outcome: Outcome) -> list[Command]:
        kept = self.state.kept.get(asking.op.resumable_id)
        if kept is None or kept.closing is not None or claim != kept.again_claim:
            return []  # it was left meanwhile, or is over
        return self._leave(kept, outcome)

    def _go_on(self, kept: Kept, given: Resumable, now: float) -> list[Command]:
        """Tell the answer that the ledger has after all, or make it again."""
        kept.turn, kept.again = given.turn, given.again
        if given.answer:
            kept.load(given.answer)
            if kept.away_since is not None:
                self._forget(kept)
                return []
            return [_count("kept"), *self._tell(kept, now)]
        commands: list[Command] = [_count("again")]
        for choice in kept.choices:
            commands += self.attempts.begin(self._session(kept, choice, now), now)
        return commands

    # --- time ---------------------------------------------------------------------------------

    def time_passed(self, now: float) -> list[Command]:
        """Ask again, close what nobody came back for, stop counting what the ledger forgot."""
        commands: list[Command] = []
        for claim in self._ask_again.pop_due(now):
            commands.append(CallLedger(self._asking[claim].op))
        for resumable_id in self._due.pop_due(now):
            kept = self.state.kept[resumable_id]
            if kept.closing is not None:
                commands.append(CallLedger(kept.closing))
            elif kept.ended:
                self._forget(kept)
            elif not kept.specs:
                commands += self._unsubmitted(kept, now)
            else:
                commands.append(_count("abandoned"))
                commands += self._end_all(kept, Reason.CLIENT_DISCONNECTED, now)
        self._windows.pop_due(now)
        return commands

    def _sessions(self, kept: Kept) -> list[Session]:
        sessions = (self.state.session_of(choice) for choice in kept.choices)
        return [session for session in sessions if session is not None]


def _note(event: str, kept: Kept, **fields: object) -> Note:
    return Note(event, {"resumable_id": kept.resumable_id, "turn": kept.turn, **fields})


def _count(outcome: str) -> Measure:
    return Measure("resumes_total", labels={"outcome": outcome})
