"""A real process with nothing but a transport: answers, counts, and ends when it is told to.

``python -m support.transport_process MEMBER LIMITS`` (both JSON; the member without pid and boot
id). A ``ReadReport`` of kind ``echo`` is answered at once; ``facts`` is answered with what this
process has seen. It ends on SIGTERM, in good order, and with its parent (end of stdin), at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import uvloop

from baton.core.ids import Member, Peer, Role
from baton.core.limits import Limits
from baton.ports.transport import PeerLost, Received, TransportEvent
from baton.transport import host
from baton.transport.zmq_transport import ZmqTransport
from baton.wire.messages import ReadReport, Report

EXIT_BUG = 70


class Facts(msgspec.Struct):
    """What a process has seen."""

    counts: dict[str, int]
    tokens: list[int]
    """Of all ``echo`` and ``sink`` messages, in the order in which they came."""
    losses: list[str]
    cpu_s: float


class Answering:
    """The process's only behaviour."""

    def __init__(self, member: Member, limits: Limits) -> None:
        self.counts: Counter[str] = Counter()
        self.tokens: list[int] = []
        self.losses: list[str] = []
        self.transport = ZmqTransport(member, limits, self.count, self.bug)

    def count(self, reason: str) -> None:
        self.counts[reason] += 1

    def bug(self, error: BaseException) -> None:
        sys.stderr.write(f"{error!r}\n")
        os._exit(EXIT_BUG)

    def hear(self, event: TransportEvent) -> None:
        if isinstance(event, PeerLost):
            self.losses.append(f"{event.peer}: {event.reason}")
        if isinstance(event, Received) and isinstance(event.message, ReadReport):
            self.answer(event.peer, event.message)

    def answer(self, peer: Peer, asked: ReadReport) -> None:
        if asked.kind == "facts":
            cpu = sum(os.times()[:2])
            facts = Facts(dict(self.counts), self.tokens, self.losses, cpu)
            self.transport.send(peer, Report("facts", asked.token, msgspec.json.encode(facts)))
            return
        self.tokens.append(asked.token)
        if asked.kind == "bug":
            raise ValueError("planted")
        if asked.kind == "echo":
            self.transport.send(peer, Report("echo", asked.token, b""))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, done.set)
        loop.add_reader(0, os._exit, 1)
        await self.transport.start(self.hear)
        await done.wait()
        await self.transport.close()


class Child:
    """The process as a test sees it."""

    def __init__(self, peer: Peer, endpoint: str, limits: Limits) -> None:
        member = Member(peer, Role.DECODE, endpoint, 0, "")
        arguments = [msgspec.json.encode(value).decode() for value in (member, limits)]
        command = [sys.executable, "-m", "support.transport_process", *arguments]
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONPATH": paths},
        )
        self.peer = peer
        boot, pid = host.boot_id(), self.process.pid
        self.member = msgspec.structs.replace(member, pid=pid, boot_id=boot)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


def main() -> None:
    member = msgspec.json.decode(sys.argv[1], type=Member)
    member = msgspec.structs.replace(member, pid=os.getpid(), boot_id=host.boot_id())
    limits = msgspec.json.decode(sys.argv[2], type=Limits)
    uvloop.run(Answering(member, limits).run())


if __name__ == "__main__":
    main()
