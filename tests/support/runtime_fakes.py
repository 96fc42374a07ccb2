"""A scripted machine and the smallest ports, for tests of the driver and the process shell."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.core.ids import Member, Peer, Role
from baton.ports.ledger import AnyOp, Reply, Unavailable
from baton.ports.transport import TransportEvent
from baton.runtime.metrics import Metrics
from baton.wire.messages import AnyMessage


@dataclass
class ScriptedMachine:
    """Answers each event by ``script``; remembers what it was told and when."""

    script: Callable[[object], Sequence[object]]
    due: float | None = None
    broken: bool = False
    seen: list[object] = field(default_factory=list)

    def handle(self, event: object, now: float) -> Sequence[object]:
        self.seen.append(event)
        return self.script(event)

    def deadline(self) -> float | None:
        return self.due

    def check(self) -> None:
        assert not self.broken, "invariant does not hold"


@dataclass
class RecordedTransport:
    """Keeps what was to be sent."""

    sent: list[tuple[Peer, AnyMessage]] = field(default_factory=list)

    async def start(self, on_event: Callable[[TransportEvent], None]) -> None:
        raise AssertionError("a driver starts no transport")

    def dial(self, member: Member) -> None:
        raise AssertionError("a driver dials nobody")

    def send(self, peer: Peer, message: AnyMessage) -> None:
        self.sent.append((peer, message))

    def hang_up(self, peer: Peer) -> None:
        raise AssertionError("a driver hangs up on nobody")

    async def close(self) -> None:
        raise AssertionError("a driver closes no transport")


@dataclass
class HeldLedger:
    """Keeps calls until the test answers them."""

    calls: list[tuple[AnyOp, Callable[[Reply | Unavailable], None]]] = field(default_factory=list)

    def call(self, op: AnyOp, done: Callable[[Reply | Unavailable], None]) -> None:
        self.calls.append((op, done))

    async def close(self) -> None:
        raise AssertionError("a driver closes no ledger")


@dataclass
class HandClock:
    """Stands still until it is moved."""

    time: float = 100.0

    def now(self) -> float:
        return self.time


def metrics() -> Metrics:
    """Return fresh metrics."""
    return Metrics(Role.DECODE, "decode-0", "tiny")


def log_lines(stream: io.BytesIO) -> list[bytes]:
    """Return the lines written so far."""
    return stream.getvalue().splitlines()
