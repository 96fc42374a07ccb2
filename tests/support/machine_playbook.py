"""A conversation with a machine: feed an event, name the commands that must come back, in order.

    play = Playbook(machine)
    play.feed(Received(router, reserve), Send(prefill, ticket), Send(router, reserved))

The machine's ``check`` runs after every event. Where commands differ from those named, the failure
shows both, line by line. What every event may bring along (notes, measures, status and news of
blocks, block marks, the record of steps) is left out of the comparison and kept in ``play.all``.
"""

from __future__ import annotations

import difflib
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from baton.core.events import TimePassed
from baton.core.ids import Member, Peer, Role
from baton.core.sampling import SamplingParams
from baton.ports.driving import CallLedger, Measure, Note, RecordStep, Send
from baton.ports.ledger import FindOrphans, FindOwned
from baton.ports.transport import PeerLost, PeerUp, Received
from baton.runtime.catalogue import CATALOGUE
from baton.wire.messages import (
    BlocksChanged,
    BlocksWanted,
    PoolStatus,
    RequestSpec,
    WorkerStatus,
)
from support.held import holdings

T = TypeVar("T")


class Like:
    """Stands for any command (or message in it) of a type whose named fields are equal."""

    def __init__(self, kind: type, /, **values: object) -> None:
        self.kind = kind
        self.values = values

    def matches(self, command: object) -> bool:
        return isinstance(command, self.kind) and all(
            _equal(expected, getattr(command, name)) for name, expected in self.values.items()
        )

    def __repr__(self) -> str:
        inner = "".join(f", {name}={value!r}" for name, value in self.values.items())
        return f"Like({self.kind.__name__}{inner})"


def sent(peer: Peer, kind: type, /, **values: object) -> Like:
    """A :class:`Send` to ``peer`` of a message of ``kind`` with these fields."""
    return Like(Send, peer=peer, message=Like(kind, **values))


def _equal(expected: object, found: object) -> bool:
    if isinstance(expected, Like):
        return expected.matches(found)
    if type(expected) is type(found) and is_dataclass(expected):
        names = [field.name for field in fields(expected)]
        return all(_equal(getattr(expected, n), getattr(found, n)) for n in names)
    return bool(expected == found)


class Playbook:
    """One machine under a clock that the test moves."""

    def __init__(self, machine: Any, now: float = 100.0) -> None:
        self.machine = machine
        self.now = now
        self.all: list[Any] = []
        """Every command so far."""

    def feed(self, event: object, *expected: object) -> None:
        """Feed ``event``; exactly ``expected`` must come back, in this order."""
        found = [command for command in self.do(event) if not _aside(command)]
        same = len(found) == len(expected) and all(map(_equal, expected, found))
        assert same, "\n".join(
            [
                f"after {_line(event)}",
                *difflib.ndiff(_aligned(expected, found), [_line(each) for each in found]),
            ]
        )

    def do(self, event: object) -> list[Any]:
        """Feed ``event`` and return everything that came back."""
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        holdings(self.machine)
        for command in commands:
            if isinstance(command, Measure):
                assert CATALOGUE[command.name].labels.keys() == command.labels.keys()
        self.all += commands
        return list(commands)

    def do_hear(self, peer: Peer, message: object) -> None:
        """Feed ``message`` from ``peer``, whatever comes back."""
        self.do(Received(peer, message))  # type: ignore[arg-type]

    def do_lose(self, peer: Peer) -> None:
        """End the link to ``peer``, which is dead, whatever comes back."""
        self.do(PeerLost(peer, "died", gone=True))

    def hear(self, peer: Peer, message: object, *expected: object) -> None:
        """Feed ``message`` from ``peer``; see :meth:`feed`."""
        self.feed(Received(peer, message), *expected)  # type: ignore[arg-type]

    def up(self, peer: Peer, role: Role, *expected: object, host: str = "b") -> None:
        """Open a link to ``peer``; see :meth:`feed`."""
        member = Member(peer=peer, role=role, endpoint="", pid=1, boot_id=host)
        self.feed(PeerUp(member), *expected)

    def lose(self, peer: Peer, *expected: object, gone: bool = False, lives: bool = False) -> None:
        """End the link to ``peer``; see :meth:`feed`."""
        self.feed(PeerLost(peer, "silent", gone, lives), *expected)

    def wait(self, seconds: float) -> list[Any]:
        """Let time pass; wake the machine exactly when it asked for it. Return what it said,
        without what is left out of comparisons."""
        until = self.now + seconds
        said: list[Any] = []
        for _ in range(100_000):
            due = self.machine.deadline()
            if due is None or due > until:
                self.now = until
                return said
            self.now = max(self.now, due)
            said += [command for command in self.do(TimePassed()) if not _aside(command)]
        raise AssertionError("the machine asks to be woken for ever")

    def last(self, kind: type[T]) -> T:
        """Return the last command of ``kind``; a regular look through the ledger aside."""
        found = (command for command in reversed(self.all) if isinstance(command, kind))
        return next(command for command in found if not is_look(command))

    def measured(self, name: str, **labels: str) -> float:
        """Return what was counted under ``name`` so far (with these labels)."""
        counted = (one for one in self.all if isinstance(one, Measure) and one.name == name)
        return sum(one.value for one in counted if labels.items() <= one.labels.items())

    def messages(self, kind: type[T], peer: Peer | None = None) -> list[T]:
        """Return every message of ``kind`` sent so far (to ``peer``)."""
        return [
            command.message
            for command in self.all
            if isinstance(command, Send)
            and isinstance(command.message, kind)
            and peer in (None, command.peer)
        ]


def is_look(command: object) -> bool:
    """Whether it is a regular look through the ledger."""
    return isinstance(command, CallLedger) and isinstance(command.op, FindOrphans | FindOwned)


def _aside(command: object) -> bool:
    if is_look(command):
        return True
    if isinstance(command, Send):
        return isinstance(command.message, WorkerStatus | PoolStatus | BlocksChanged | BlocksWanted)
    return (
        isinstance(command, Note | Measure | RecordStep) or type(command).__name__ == "MarkBlocks"
    )


def _line(each: object) -> str:
    return repr(each)


def _aligned(expected: tuple[object, ...], found: list[Any]) -> list[str]:
    """Lines of ``expected``; one that matches its counterpart looks like it, to keep the diff
    to what differs."""
    lines = []
    for number, each in enumerate(expected):
        other = found[number] if number < len(found) else None
        lines.append(_line(other) if other is not None and _equal(each, other) else _line(each))
    return lines


def request(
    request_id: str = "r",
    prompt: tuple[int, ...] = (1, 2, 3, 4, 5),
    *,
    gateway: Peer,
    max_tokens: int = 10,
    deadline_ms: int = 600_000,
    open_ended: bool = False,
    **sampling: Any,
) -> RequestSpec:
    """Return a small greedy request."""
    return RequestSpec(
        request_id=request_id,
        gateway=gateway,
        prompt=ids(*prompt),
        sampling=SamplingParams(seed=1, temperature=0.0, **sampling),
        max_tokens=max_tokens,
        deadline_ms=deadline_ms,
        open_ended=open_ended,
    )


def ids(*values: int) -> bytes:
    """Return ids as they travel: uint32 LE."""
    return b"".join(value.to_bytes(4, "little") for value in values)
