"""Requests that outlive their connection: opened, claimed, left, resumed here or elsewhere.

Decides who serves a resumable request: its last claim in the ledger (ADR 0017). What is here and
what its readers are told is ``keeping.py``'s. Which events a client has seen is nobody's business
here: a new reader is told everything from the first id.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.outcomes import Ending, Outcome, Reason
from baton.gateway.attempts import Attempts
from baton.gateway.keeping import SUPERSEDED, Keeping, count, note
from baton.gateway.kept import CLAIMS_MAX, Kept
from baton.gateway.remaking import LEDGER_AGAIN_S, Remaking
from baton.gateway.state import State
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
from baton.ports.driving import CallLedger, LedgerAnswered, Send
from baton.ports.ledger import (
    ClaimResumable,
    CloseResumable,
    Denial,
    Denied,
    OpenResumable,
    Repeated,
    RestoreResumable,
    Resumable,
    Unavailable,
)
from baton.wire.messages import RequestMoved, RequestResumed

#: Requests that are resumed are taken in until there are so many times ``resumables_max``.
HERE_AGAIN = 2
_DRAINING = Outcome(
    Ending.REFUSED, reason=Reason.DRAINING, message="this gateway is shutting down; resume again"
)


@dataclass(slots=True)
class _Asking:
    """An opening or claim that the ledger has not answered."""

    event: ResumableWanted | ResumeWanted
    """Who waits."""
    op: OpenResumable | ClaimResumable
    since: float


class Resuming:
    """The clients of one gateway's resumable requests, and their claims."""

    def __init__(
        self, state: State, attempts: Attempts, keeping: Keeping, remaking: Remaking
    ) -> None:
        self.state = state
        self.attempts = attempts
        self.keeping = keeping
        self.remaking = remaking
        self._draining = False
        self._asking: dict[str, _Asking] = {}
        self._ask_again = Timers()
        """By claim."""

    # --- the machine's part of deadline and time ----------------------------------------------

    def deadline(self) -> float | None:
        """When time matters next."""
        times = (self._ask_again.next_at(), self.keeping.deadline(), self.remaking.deadline())
        return min((time for time in times if time is not None), default=None)

    def time_passed(self, now: float) -> list[Command]:
        """Ask again, and do what is due in the other parts."""
        asked = [CallLedger(self._asking[claim].op) for claim in self._ask_again.pop_due(now)]
        return [*asked, *self.remaking.time_passed(now), *self.keeping.time_passed(now)]

    @property
    def held(self) -> int:
        """How many count towards the bound."""
        return self.keeping.held + len(self._asking)

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
        self.keeping.due.set(kept.resumable_id, None)
        if choice in kept.specs:
            # Another one that it was given to has submitted it meanwhile: this one reads that.
            return [*kept.tell(choice, self.state.session_of(choice)), *self.keeping.attend(kept)]
        kept.specs[choice] = event.spec
        if refusal is not None:
            return self.keeping.turned_away(kept, Outcome(Ending.REFUSED, None, *refusal), now)
        return self.attempts.begin(self.keeping.session(kept, event.spec.request_id, now), now)

    def reader_gone(self, event: ReaderGone, now: float) -> list[Command]:
        """Nobody reads: it goes on for its window, within a bound of tokens."""
        kept = self.state.kept.get(event.resumable_id)
        if kept is None or kept.away_since is not None or kept.closing is not None:
            return []
        if not kept.specs:
            if kept.ended and kept.awaited > 1:
                kept.awaited -= 1  # an answer that another one was given too
                return []
            return self.keeping.unsubmitted(kept, now)
        kept.away_since = now
        if self._draining:
            return self.keeping.leave(kept, _DRAINING)
        commands: list[Command] = [note("reader_gone", kept)]
        for session in self.keeping.sessions(kept):
            upto = len(session.ids) + self.state.limits.resume_tokens_max
            session.bound = min(upto, session.spec.max_tokens)
            commands += self.state.tell_bound(session)
        self.keeping.due.set(kept.resumable_id, now + kept.window_ms / 1000)
        return commands

    def reader_back(self, event: ReaderBack, now: float) -> list[Command]:
        """Somebody reads: tell everything from the first id on, and lift the bound."""
        kept = self.state.kept.get(event.resumable_id)
        if kept is None or not (kept.specs or kept.ended):
            # Nothing is made here, or somebody else is to submit it, who was given it later.
            return [self._left(choice) for choice in event.choices]
        kept.awaited = max(0, kept.awaited - 1)
        return self.keeping.tell(kept, now)

    def _left(self, choice: str) -> End:
        """It was given to a reader and has left before that one read: who has nothing to read must
        not wait for it."""
        return End(choice, _DRAINING if self._draining else SUPERSEDED)

    def cancel(self, event: CancelWanted, now: float) -> list[Command]:
        """Its client wants no more of it."""
        kept = self.state.kept.get(event.resumable_id)
        return [] if kept is None else self.keeping.end_all(kept, Reason.CLIENT_CANCELLED, now)

    # --- the ledger's answers -----------------------------------------------------------------

    def _ask(self, claim: str, asking: _Asking) -> list[Command]:
        self._asking[claim] = asking
        return [CallLedger(asking.op)]

    def answered(self, answer: LedgerAnswered, now: float) -> list[Command]:
        """Take the answer to one of this part's calls."""
        op, reply = answer.op, answer.reply
        if isinstance(op, CloseResumable):
            return self.keeping.closed(op, isinstance(reply, Unavailable), now)
        if isinstance(op, RestoreResumable):
            return []  # who has a higher turn tells his router, and that one this gateway
        assert isinstance(op, OpenResumable | ClaimResumable)
        if isinstance(op, ClaimResumable) and op.again:
            return self.remaking.answered(op, reply, now)
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
        reason, text = Reason.LEDGER_UNAVAILABLE, "the ledger cannot be reached"
        return [NotResumed(claim, Unresumable.REFUSED, reason, text)]

    def _served_here(self, asking: _Asking) -> Kept | None:
        """Return the request itself, where the ledger cannot say who serves it but it is here."""
        op = asking.op
        kept = self.state.kept.get(op.resumable_id)
        if kept is None or not isinstance(op, ClaimResumable):
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
        here = self._served_here(asking) if denial is Denial.UNKNOWN else None
        if here is not None:
            return self._ready(claim, here, "here", now, submit=False)
        return [NotResumed(claim, Unresumable(denial.value)), count(denial.value)]

    def _given(self, claim: str, asking: _Asking, given: Resumable, now: float) -> list[Command]:
        op, here = asking.op, self.state.kept.get(asking.op.resumable_id)
        if given.turn > CLAIMS_MAX:
            return [NotResumed(claim, Unresumable.OVER), count("over")]
        token = (op.new_token or op.token) if isinstance(op, ClaimResumable) else op.token
        last = here is not None and here.turn in (given.former, given.turn)
        # What is complete here and kept there is the same, and whoever was given it may still come.
        same = here is not None and here.ended and here.record() == given.answer
        if here is not None and (same or (last and not given.answer)):
            here.turn, here.token = given.turn, token
            return self._ready(claim, here, "here", now, submit=False)
        commands = [] if here is None else self.keeping.leave(here, SUPERSEDED)
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
            self.keeping.due.set(kept.resumable_id, now + kept.window_ms / 1000)
        else:
            kept.awaited += 1
            if kept.closing is None and (kept.ended or kept.away_since is not None):
                # Told as soon as its reader is there; it is for nobody if that takes too long.
                self.keeping.due.set(kept.resumable_id, now + kept.window_ms / 1000)
        ready = Ready(claim, kept.resumable_id, kept.recipe, kept.window_ms, submit)
        return [ready, note("resumable_ready", kept, way=way), count(way)]

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
            for each in self.keeping.sessions(kept)
            if each.router is not None and each.router in self.state.links
        ]
        return [*moved, *self.keeping.leave(kept, SUPERSEDED, message.turn)]

    def drain(self) -> list[Command]:
        """This gateway goes away: what nobody reads here goes on without it at once."""
        self._draining = True
        return [
            command
            for kept in list(self.state.kept.values())
            if kept.away_since is not None and kept.closing is None
            for command in self.keeping.leave(kept, _DRAINING)
        ]

    def drained(self) -> list[Command]:
        """Time is up: the others are left as well, and their clients may resume elsewhere."""
        return [
            command
            for kept in list(self.state.kept.values())
            if kept.closing is None
            for command in self.keeping.leave(kept, _DRAINING)
        ]
