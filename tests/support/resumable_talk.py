"""A gateway's machine with requests that outlive their connections, to talk to."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from baton.core.events import LeaseChanged
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.gateway.machine import GatewayMachine
from baton.gateway.vocabulary import (
    End,
    Ready,
    ResumableWanted,
    ResumeWanted,
    Submitted,
)
from baton.ports.driving import CallLedger, LedgerAnswered
from baton.ports.ledger import (
    AnyOp,
    ClaimResumable,
    CloseResumable,
    OpenResumable,
    Resumable,
)
from baton.ports.transport import Received
from baton.wire.messages import (
    RequestPlaced,
    RequestSpec,
    SubmitRequest,
    TokenChunk,
    TokenRun,
)
from support.machine_playbook import Like, Playbook, request, sent

ME, OTHER = Peer("gateway-0", 1), Peer("gateway-1", 9)
R, D = Peer("router-0", 2), Peer("decode-0", 5)
WINDOW_MS = 20_000
CLAIM = ResumeWanted("n1", "c", "t", "k")
GONE = Outcome(Ending.CANCELLED, reason=Reason.GATEWAY_LOST)


def wanted(**fields: Any) -> ResumableWanted:
    values = {"token": "t", "owner": "k", "choices": ("c",), "recipe": b"recipe", **fields}
    return ResumableWanted("c", window_ms=WINDOW_MS, **values)  # type: ignore[arg-type]


def given(turn: int, again: int = 0, answer: bytes = b"", **fields: Any) -> Resumable:
    values: dict[str, Any] = {"repeat": "", "requests": ("c",), "recipe": b"recipe", **fields}
    former = max(0, turn - 1)
    return Resumable(turn, former, again, WINDOW_MS, closed=bool(answer), answer=answer, **values)


def spec(name: str = "c") -> RequestSpec:
    return replace(request(name, gateway=ME, max_tokens=9), resume_ms=WINDOW_MS)


class Gateway(Playbook):
    """A gateway with one router and one decode worker."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(GatewayMachine(ME, Limits(**limits)))
        self.feed(LeaseChanged(LeaseState.HELD))
        self.up(R, Role.ROUTER)
        self.up(D, Role.DECODE)

    def answered(self, reply: Any, *expected: object, kind: type = object) -> None:
        """The ledger answers the last call (of that kind)."""
        self.feed(LedgerAnswered(self.op(kind), reply), *expected)

    def op(self, kind: type) -> AnyOp:
        calls = [command.op for command in self.all if isinstance(command, CallLedger)]
        found: AnyOp = [op for op in calls if isinstance(op, kind)][-1]
        return found

    def opened(self) -> None:
        """A resumable request that runs, and has a reader."""
        self.feed(wanted(), call(OpenResumable, window_ms=WINDOW_MS))
        self.answered(given(0), Like(Ready, resumable_id="c", submit=True))
        self.feed(Submitted(spec(), "c"), sent(R, SubmitRequest, turn=1))
        self.hear(R, RequestPlaced("c", 1, D))

    def claimed(self, turn: int = 3) -> None:
        """One that ran at another gateway."""
        self.feed(CLAIM, call(ClaimResumable, token="t", owner="k"))
        self.answered(given(turn), Like(Ready, submit=True))
        self.feed(Submitted(spec(), "c"), sent(R, SubmitRequest, turn=(turn << 16) + 1, held=0))

    def tokens(self, index: int, *ids: int, finish: FinishReason | None = None, **f: Any) -> None:
        run = TokenRun(f.pop("name", "c"), f.pop("epoch", 1), index, ids, finish=finish)
        self.do_hear(TokenChunk((run,)))

    def do_hear(self, message: Any) -> None:
        self.do(Received(D, message))

    def ends(self) -> list[End]:
        return [command for command in self.all if isinstance(command, End)]


def call(kind: type, **values: object) -> Like:
    return Like(CallLedger, op=Like(kind, **values))


def closing(play: Gateway) -> CloseResumable:
    op = play.op(CloseResumable)
    assert isinstance(op, CloseResumable)
    return op


def kept_answer() -> bytes:
    """Return the record of an answer that is complete."""
    play = Gateway()
    play.opened()
    play.tokens(0, 50, 51, finish=FinishReason.STOP)
    return closing(play).answer


def replace_claim(name: str) -> ResumeWanted:
    return ResumeWanted(name, "c", "t", "k")
