"""Two worlds in which the same conversations are held: real sockets, and the simulator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from baton.core.ids import Compat, Member, Peer, Role
from baton.core.limits import Limits
from baton.ports.transport import PeerLost, PeerRefused, PeerUp, Received, TransportEvent
from baton.sim.clock import VirtualClock
from baton.sim.network import SimNetwork, SimTransport
from baton.transport import host
from baton.transport.zmq_transport import ZmqTransport
from baton.wire.messages import AnyMessage, ReadReport

COMPAT = Compat("model-a", "tokenizer", "float32", 16, "layout", "torch")


def numbered(count: int, start: int = 0) -> list[AnyMessage]:
    """Return ``count`` small messages that can be told apart."""
    return [ReadReport("status", token) for token in range(start, start + count)]


class Node:
    """One process: its transport, and everything it was told."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.transport: ZmqTransport | SimTransport
        self.events: list[TransportEvent] = []
        self.counts: Counter[str] = Counter()
        self.bugs: list[BaseException] = []
        self.react: Callable[[TransportEvent], None] = lambda event: None

    @property
    def peer(self) -> Peer:
        return self.member.peer

    def count(self, reason: str) -> None:
        self.counts[reason] += 1

    def hear(self, event: TransportEvent) -> None:
        self.events.append(event)
        self.react(event)

    def received(self, peer: Peer | None = None) -> list[AnyMessage]:
        heard = (event for event in self.events if isinstance(event, Received))
        return [event.message for event in heard if peer in (None, event.peer)]

    def ups(self) -> list[Peer]:
        return [event.member.peer for event in self.events if isinstance(event, PeerUp)]

    def losses(self) -> list[Peer]:
        return [event.peer for event in self.events if isinstance(event, PeerLost)]

    def refusals(self) -> list[PeerRefused]:
        return [event for event in self.events if isinstance(event, PeerRefused)]

    def send_all(self, peer: Peer, messages: list[AnyMessage]) -> None:
        for message in messages:
            self.transport.send(peer, message)


class World(ABC):
    """Makes nodes and lets time pass."""

    limits = Limits()

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def member(
        self, worker_id: str, incarnation: int, compat: Compat | None, *, bound: bool
    ) -> Member:
        endpoint = self.endpoint(worker_id) if bound else ""
        pid, boot = self.pid(), self.boot()
        return Member(Peer(worker_id, incarnation), Role.DECODE, endpoint, pid, boot, compat)

    def add(
        self,
        worker_id: str,
        incarnation: int = 1,
        *,
        compat: Compat | None = COMPAT,
        limits: Limits | None = None,
        bound: bool = True,
    ) -> Node:
        """Start a process."""
        node = Node(self.member(worker_id, incarnation, compat, bound=bound))
        self.start(node, limits or self.limits)
        self.nodes.append(node)
        return node

    def pair(self) -> tuple[Node, Node]:
        """Start two processes with a link."""
        a, b = self.add("a"), self.add("b")
        a.transport.dial(b.member)
        self.until(lambda: bool(a.ups() and b.ups()))
        return a, b

    def check(self) -> None:
        for node in self.nodes:
            assert node.bugs == []
            node.transport.check()

    @abstractmethod
    def endpoint(self, worker_id: str) -> str: ...
    @abstractmethod
    def pid(self) -> int: ...
    @abstractmethod
    def boot(self) -> str: ...
    @abstractmethod
    def start(self, node: Node, limits: Limits) -> None: ...
    @abstractmethod
    def crash(self, node: Node) -> None: ...
    @abstractmethod
    def close(self, node: Node) -> None: ...
    @abstractmethod
    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None: ...
    @abstractmethod
    def end(self) -> None: ...


class SimWorld(World):
    """Everything virtual."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.clock = VirtualClock(seed)
        self.network = SimNetwork(self.clock)

    def endpoint(self, worker_id: str) -> str:
        return f"sim://{worker_id}"

    def pid(self) -> int:
        return 1_000 + len(self.nodes)

    def boot(self) -> str:
        return "sim"

    def start(self, node: Node, limits: Limits) -> None:
        node.transport = self.network.transport(node.member, limits, node.count)
        node.transport.start_now(node.hear)

    def crash(self, node: Node) -> None:
        self.network.kill(node.peer)

    def close(self, node: Node) -> None:
        assert isinstance(node.transport, SimTransport)
        node.transport.close_now()

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        try:
            assert self.clock.run_while(lambda: not condition(), seconds), "it never happened"
        except ZeroDivisionError as error:
            # The one bug a test plants.
            self.nodes[-1].bugs.append(error)

    def end(self) -> None:
        pass


class ZmqWorld(World):
    """Real sockets on a real loop; each process's pid is a real one that can be killed."""

    def __init__(self, directory: Path, loop: asyncio.AbstractEventLoop, tcp: bool = False) -> None:
        super().__init__()
        self.loop = loop
        self._directory = directory
        self._tcp = tcp
        self._changed = asyncio.Event()
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def endpoint(self, worker_id: str) -> str:
        return "tcp://127.0.0.1:*" if self._tcp else f"ipc://{self._directory}/{worker_id}.sock"

    def pid(self) -> int:
        # A process that waits for the end of its input: it dies with this one too.
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self._children[child.pid] = child
        return child.pid

    def boot(self) -> str:
        return host.boot_id()

    def start(self, node: Node, limits: Limits) -> None:
        def hear(event: TransportEvent) -> None:
            self._changed.set()
            node.hear(event)

        def count(reason: str) -> None:
            self._changed.set()
            node.count(reason)

        def bug(error: BaseException) -> None:
            self._changed.set()
            node.bugs.append(error)

        transport = ZmqTransport(node.member, limits, count, bug)
        node.transport = transport
        self.loop.run_until_complete(transport.start(hear))
        node.member = transport.member

    def crash(self, node: Node) -> None:
        """Kill its pid, and tear its sockets down without a word."""
        assert isinstance(node.transport, ZmqTransport)
        self._children[node.member.pid].kill()
        node.transport._closed = True
        self.loop.run_until_complete(node.transport._dismantle())

    def close(self, node: Node) -> None:
        assert isinstance(node.transport, ZmqTransport)
        self.loop.run_until_complete(node.transport.close())

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        self.loop.run_until_complete(asyncio.wait_for(self._until(condition), seconds))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            # Not every change is an event (an acknowledgement is none): look again now and then.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 0.02)

    def end(self) -> None:
        for node in self.nodes:
            self.close(node)
        for child in self._children.values():
            child.kill()
            child.wait()
            assert child.stdin is not None
            child.stdin.close()
        if not self._tcp:
            assert os.listdir(self._directory) == [], "left behind"
