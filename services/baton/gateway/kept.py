"""What the gateway's machine knows of one resumable request of a client.

Decides how its choices are named towards routers, and what of it is kept when all have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton.core.ids import Peer
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.gateway.session import TURN_BITS, Session
from baton.gateway.vocabulary import Command, Deliver, End
from baton.ports.ledger import CloseResumable, Closing, RestoreResumable
from baton.wire.fields import TokenLogprob
from baton.wire.messages import RequestSpec

CLAIMS_MAX = 2**31

#: How a choice ends because another one did not succeed: there is no way to say that of one alone.
ANOTHER_FAILED = Outcome(
    Ending.CANCELLED, reason=Reason.INTERNAL, message="another choice of the request failed"
)
_BROKEN = frozenset({Ending.FAILED, Ending.EXPIRED})


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One choice, complete: enough to tell it again from the first id to its outcome."""

    ids: bytes
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    """What decode said with the last id."""
    cached_tokens: int
    outcome: Outcome


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(tuple[Answer, ...])


@dataclass(slots=True)
class Kept:
    """A resumable request that this gateway serves."""

    resumable_id: str
    owner: str
    token: str
    repeat: str
    window_ms: int
    recipe: bytes
    choices: tuple[str, ...]
    """Ids of the choices as their reader knows them."""
    body: str = ""
    """What was asked for with ``repeat``, as a digest."""
    turn: int = 0
    again: int = 0
    specs: dict[str, RequestSpec] = field(default_factory=dict)
    """By choice, named as the client's; submitted ones only."""
    answers: dict[str, Answer] = field(default_factory=dict)
    """Choices that have ended."""
    away_since: float | None = None
    """Since when nobody reads."""
    closing: CloseResumable | None = None
    """All have ended: what the ledger is told, again and again until it answers."""
    closing_until: float = 0.0
    wait_s: float = 0.0
    """Before the ledger is told once more."""
    again_claim: str = ""
    """Its ids are nowhere: what the ledger was asked with, to have it made again."""
    awaited: int = 0
    """Readers that were given this and have not begun to read."""

    def request_id(self, choice: str) -> str:
        """Return the id under which routers and workers know ``choice`` now."""
        return f"{choice}~{self.again}" if self.again else choice

    def first_turn(self) -> int:
        """Return the turn below which every other gateway's claim on the requests is."""
        return 0 if self.again == self.turn else self.turn << TURN_BITS

    def tell(self, choice: str, session: Session | None) -> list[Command]:
        """Return what a new reader has to be told of a choice, from its first id."""
        answer = self.answers.get(choice)
        if answer is None:
            if session is None or not session.ids:
                return []
            ids, logprobs = tuple(session.ids), tuple(session.logprobs)
            return [Deliver(choice, 0, ids, logprobs, None, session.cached_tokens)]
        commands: list[Command] = []
        if answer.ids:
            ids = tuple(memoryview(answer.ids).cast("I"))
            rest = answer.logprobs, answer.finish, answer.cached_tokens
            commands.append(Deliver(choice, 0, ids, *rest))
        return [*commands, End(choice, self._told(answer.outcome))]

    def _told(self, outcome: Outcome) -> Outcome:
        """Return what a reader hears of ``outcome``: if another choice was to blame, why that one
        failed, whichever of them the reader asks for first."""
        if outcome != ANOTHER_FAILED:
            return outcome
        causes = (each.outcome for each in self.answers.values() if each.outcome != outcome)
        return next((each for each in causes if each.ending is not Ending.COMPLETED), outcome)

    def restored(self, me: Peer, life_ms: int) -> RestoreResumable:
        """Return what makes its record in a ledger that has lost it."""
        return RestoreResumable(
            resumable_id=self.resumable_id,
            gateway=me,
            turn=self.turn,
            again=self.again,
            token=self.token,
            owner=self.owner,
            requests=self.choices,
            recipe=self.recipe,
            window_ms=self.window_ms,
            life_ms=life_ms,
            repeat=self.repeat,
            body=self.body,
        )

    @property
    def ended(self) -> bool:
        """Whether every choice has its outcome."""
        return len(self.answers) == len(self.choices)

    @property
    def failed(self) -> bool:
        """Whether a choice ended without success although somebody wanted it: then all do."""
        return any(answer.outcome.ending in _BROKEN for answer in self.answers.values())

    @property
    def closed(self) -> Closing:
        """How the ledger is told of it when all have ended. A client that is away has not heard of
        a refusal: it is tried again for whoever comes back."""
        endings = {answer.outcome.ending for answer in self.answers.values()}
        if self.failed:
            return Closing.FAILED
        if not endings & {Ending.REFUSED, Ending.CANCELLED}:
            return Closing.KEPT
        return Closing.REFUSED if Ending.REFUSED in endings else Closing.OVER

    def record(self) -> bytes:
        """Return the answers as the ledger keeps them."""
        return _encode(tuple(self.answers[choice] for choice in self.choices))

    def load(self, record: bytes) -> None:
        """Take the answers that the ledger kept.

        Raises:
            msgspec.MsgspecError: it is no record of ours.
        """
        self.answers = dict(zip(self.choices, _decoder.decode(record), strict=True))


def answer_of(session: Session, outcome: Outcome) -> Answer:
    """Return what is kept of a session that ends."""
    ids = session.ids.tobytes()
    return Answer(ids, tuple(session.logprobs), session.finish, session.cached_tokens, outcome)
