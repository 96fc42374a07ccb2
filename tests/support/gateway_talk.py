"""A gateway's machine to talk to, under a virtual clock, and what is found in its answers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

from baton.core.events import LeaseChanged, TimePassed
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.core.outcomes import FinishReason
from baton.core.sampling import SamplingParams
from baton.gateway.machine import GatewayMachine
from baton.gateway.vocabulary import Command, Deliver, End, Event, Submitted
from baton.ports.driving import CallLedger, LedgerAnswered, Measure, Send
from baton.ports.ledger import Done
from baton.ports.transport import PeerUp, Received
from baton.runtime.catalogue import CATALOGUE
from baton.wire.messages import RequestPlaced, RequestSpec, TokenChunk, TokenRun
from support.held import holdings
from support.machine_playbook import is_look

ME = Peer("gateway-0", 1)
R0, R1 = Peer("router-0", 2), Peer("router-1", 3)
P0 = Peer("prefill-0", 4)
D0, D1 = Peer("decode-0", 5), Peer("decode-1", 6)
ROLES = {R0: Role.ROUTER, R1: Role.ROUTER, P0: Role.PREFILL, D0: Role.DECODE, D1: Role.DECODE}

T = TypeVar("T")


def up(peer: Peer, role: Role | None = None) -> PeerUp:
    role = role or ROLES[peer]
    return PeerUp(Member(peer=peer, role=role, endpoint="", pid=1, boot_id="b"))


class Talk:
    """Feeds a machine, keeps what it said, and checks it after each event."""

    def __init__(
        self,
        peers: Sequence[Peer] = (R0, P0, D0, D1),
        limits: Limits | None = None,
        **place: bool,
    ) -> None:
        self.limits = limits or Limits()
        self.machine = GatewayMachine(ME, self.limits, **place)
        self.now = 100.0
        self.all: list[Command] = []
        self.feed(LeaseChanged(LeaseState.HELD))
        for peer in peers:
            self.feed(up(peer))

    def feed(self, event: Event) -> list[Command]:
        commands = self.machine.handle(event, self.now)
        commands = [each for each in commands if not is_look(each)]
        self.machine.check()
        holdings(self.machine)
        for command in commands:
            if isinstance(command, Measure):
                assert CATALOGUE[command.name].labels.keys() == command.labels.keys()
        self.all += commands
        return commands

    def hear(self, peer: Peer, message: Any) -> list[Command]:
        return self.feed(Received(peer, message))

    def submit(self, request_id: str = "r", max_tokens: int = 100, **values: Any) -> list[Command]:
        return self.feed(Submitted(spec(request_id, max_tokens, **values)))

    def place(
        self, epoch: int = 1, decode: Peer = D0, prefill: Peer | None = P0, request_id: str = "r"
    ) -> list[Command]:
        placed = RequestPlaced(request_id=request_id, epoch=epoch, decode=decode, prefill=prefill)
        return self.hear(R0, placed)

    def tokens(
        self,
        peer: Peer,
        index: int,
        ids: Sequence[int],
        epoch: int = 1,
        finish: FinishReason | None = None,
    ) -> list[Command]:
        run = TokenRun(request_id="r", epoch=epoch, index=index, ids=tuple(ids), finish=finish)
        return self.hear(peer, TokenChunk(runs=(run,)))

    def pass_time(self, seconds: float) -> list[Command]:
        """Let time pass; the machine is woken exactly when it asked to be."""
        until = self.now + seconds
        out: list[Command] = []
        for _ in range(1000):
            due = self.machine.deadline()
            if due is None or due > until:
                break
            self.now = max(self.now, due)
            out += self.feed(TimePassed())
        else:
            raise AssertionError("the machine asks to be woken for ever")
        self.now = until
        return out

    def answer(self, reply: Any) -> list[Command]:
        """Answer the last ledger call."""
        call = only(self.all[::-1], CallLedger, first=True)
        return self.feed(LedgerAnswered(call.op, reply))

    @property
    def delivered(self) -> list[int]:
        return [i for c in self.all if isinstance(c, Deliver) for i in c.ids]

    @property
    def ends(self) -> list[End]:
        return [c for c in self.all if isinstance(c, End)]


def spec(request_id: str = "r", max_tokens: int = 100, deadline_ms: int = 600_000) -> RequestSpec:
    return RequestSpec(
        request_id=request_id,
        gateway=ME,
        prompt=array("I", [1, 2, 3]).tobytes(),
        sampling=SamplingParams(seed=1),
        max_tokens=max_tokens,
        deadline_ms=deadline_ms,
    )


def only(commands: Sequence[Command], kind: type[T], *, first: bool = False) -> T:
    found = [command for command in commands if isinstance(command, kind)]
    assert found, f"no {kind.__name__} in {commands}"
    assert first or len(found) == 1, found
    return found[0]


def sent(commands: Sequence[Command], kind: type[T]) -> list[tuple[Peer, T]]:
    return [
        (c.peer, c.message) for c in commands if isinstance(c, Send) and isinstance(c.message, kind)
    ]


DONE = Done(epoch=1, state=RequestState.COMPLETED)
