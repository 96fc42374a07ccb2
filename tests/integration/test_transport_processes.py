"""Links between real processes: death, freeze, restart, full sockets, shutdown."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from baton.core.ids import Peer
from baton.core.limits import Limits
from baton.ports.transport import EndpointInUse, PeerLost, Received, TransportEvent
from baton.wire.messages import AnyMessage, ReadReport, Report
from support.transport_process import EXIT_BUG, Child, Facts
from support.transport_worlds import Node, ZmqWorld, numbered

PATIENT = Limits(peer_silent_ms=30_000)


class Processes:
    """This process's nodes, and children."""

    def __init__(self, directory: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.world = ZmqWorld(directory, loop)
        self.loop = loop
        self.directory = directory
        self.children: list[Child] = []

    def child(self, incarnation: int = 1, limits: Limits | None = None) -> Child:
        endpoint = self.world.endpoint("child")
        child = Child(Peer("child", incarnation), endpoint, limits or Limits())
        self.children.append(child)
        return child

    def linked(self, limits: Limits | None = None) -> tuple[Node, Child]:
        child = self.child(1, limits)
        node = self.world.add("parent", compat=None, limits=limits)
        self.dial(node, child)
        return node, child

    def dial(self, node: Node, child: Child) -> None:
        node.transport.dial(child.member)
        self.until(lambda: child.peer in node.ups())

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        self.world.until(condition, seconds)

    def later(self, seconds: float, fn: Callable[[], None]) -> None:
        self.loop.call_later(seconds, fn)

    def facts(self, node: Node, child: Child) -> Facts:
        token = 10**6 + len(node.events)
        node.transport.send(child.peer, ReadReport("facts", token))
        found: list[Report] = []

        def answered() -> bool:
            found.extend(
                message
                for message in node.received(child.peer)
                if isinstance(message, Report) and message.token == token
            )
            return bool(found)

        self.until(answered)
        return msgspec.json.decode(found[0].body, type=Facts)

    def until_lost(self, node: Node, child: Child) -> list[str]:
        """Return what ``child`` lost, as soon as it lost something."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if losses := self.facts(node, child).losses:
                return losses
        pytest.fail("it lost nobody")


def end(processes: Processes) -> None:
    for child in processes.children:
        child.end()
    # What killed children left; their successors would have replaced it.
    for name in ("child.sock", "child.sock.lock"):
        (processes.directory / name).unlink(missing_ok=True)
    processes.world.end()


@pytest.fixture(params=["uvloop"])
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    loop = uvloop.new_event_loop() if request.param == "uvloop" else asyncio.new_event_loop()
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        processes = Processes(Path(directory), loop)
        try:
            yield processes
        finally:
            end(processes)
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


def sinks(count: int) -> list[AnyMessage]:
    return [ReadReport("sink", token) for token in range(count)]


def test_a_killed_peer_is_noticed_at_once(processes: Processes) -> None:
    """kill -9 is seen through the pidfd, long before the silence would tell."""
    node, child = processes.linked()
    killed = time.monotonic()
    child.kill()
    processes.until(lambda: node.losses() == [child.peer])
    assert time.monotonic() - killed < 0.5
    assert node.events[-1] == PeerLost(child.peer, "died", gone=True)


def test_sends_to_a_killed_peer_are_reported_and_end_nothing(processes: Processes) -> None:
    """100 sends to a dead process: 100 losses counted, the loop and other links live."""
    node, child = processes.linked()
    other = processes.world.add("other", compat=None)
    node.transport.dial(other.member)
    child.kill()
    processes.until(lambda: node.losses() == [child.peer])
    node.send_all(child.peer, numbered(100))
    node.send_all(other.peer, numbered(100))
    processes.until(lambda: len(node.losses()) == 101 and len(other.received()) == 100)
    assert node.counts["send_no_link"] == 100
    processes.world.check()


def test_a_short_freeze_loses_nothing(processes: Processes) -> None:
    """A peer stopped for one second less than the silence limit gets everything, in order."""
    node, child = processes.linked()
    child.freeze()
    processes.later(1.0, child.thaw)
    node.send_all(child.peer, sinks(2_000))
    assert processes.facts(node, child).tokens == list(range(2_000))
    assert node.losses() == []


def test_a_long_freeze_is_a_loss_for_both(processes: Processes) -> None:
    """The silent peer is lost; when it wakes it is told, and both may be linked again."""
    node, child = processes.linked()
    child.freeze()
    processes.until(lambda: node.losses() == [child.peer])
    assert isinstance(node.events[-1], PeerLost)
    assert node.events[-1].reason.startswith("silent for")
    child.thaw()
    witness = processes.world.add("witness", compat=None)
    processes.dial(witness, child)
    (loss,) = processes.until_lost(witness, child)
    assert loss.startswith("parent/1: ")
    node.transport.dial(child.member)
    processes.until(lambda: node.ups() == [child.peer, child.peer])
    node.send_all(child.peer, sinks(10))
    assert processes.facts(node, child).tokens == list(range(10))


def test_bursts_both_ways_between_processes(processes: Processes) -> None:
    """Bursts of 2,000, each answered, 6,000 in all: nothing lost, doubled or out of order."""
    node, child = processes.linked()
    for burst in range(3):
        start = 2_000 * burst
        node.send_all(child.peer, [ReadReport("echo", start + i) for i in range(2_000)])
        processes.until(lambda: len(node.received()) == start + 2_000)  # noqa: B023
    assert [message.token for message in node.received()] == list(range(6_000))  # type: ignore[union-attr]


@pytest.mark.parametrize("processes", ["uvloop", "asyncio"], indirect=True)
def test_no_message_waits_for_the_next_one(processes: Processes) -> None:
    """Bursts of 1 to 50, sent from several turns of the loop: no answer waits for a later one."""
    node, child = processes.linked()
    chance = random.Random(1)
    sent_at: dict[int, float] = {}
    delays: list[float] = []

    def react(event: TransportEvent) -> None:
        if isinstance(event, Received) and isinstance(event.message, Report):
            delays.append(time.monotonic() - sent_at[event.message.token])

    node.react = react

    def burst(count: int) -> None:
        for _ in range(count):
            token = len(sent_at)
            sent_at[token] = time.monotonic()
            node.transport.send(child.peer, ReadReport("echo", token))

    for _ in range(200):
        for _ in range(chance.randint(1, 3)):
            processes.loop.call_soon(burst, chance.randint(1, 17))
        processes.later(chance.uniform(0, 0.002), lambda: burst(1))
        expected = len(sent_at) + 2
        processes.until(lambda: len(sent_at) >= expected and len(delays) == len(sent_at))  # noqa: B023
    # The watchdog and the timers would hide a descriptor that was missed.
    assert node.counts["watchdog_rescued"] == 0
    assert processes.facts(node, child).counts.get("watchdog_rescued", 0) == 0
    assert sorted(delays)[int(0.99 * len(delays))] < 0.05
    assert max(delays) < 0.5


def test_a_restarted_peer_replaces_what_the_dead_one_left(processes: Processes) -> None:
    """The socket and lock file of a killed process are in nobody's way."""
    node, child = processes.linked()
    child.kill()
    processes.until(lambda: node.losses() == [child.peer])
    assert {"child.sock", "child.sock.lock"} <= set(os.listdir(processes.directory))
    successor = processes.child(incarnation=2)
    processes.dial(node, successor)
    node.send_all(successor.peer, sinks(10))
    assert processes.facts(node, successor).tokens == list(range(10))


def test_a_living_endpoint_is_not_stolen(processes: Processes) -> None:
    """A second bind names the pid of the holder, and the holder goes on."""
    node, child = processes.linked()
    thief = Node(msgspec.structs.replace(child.member, peer=Peer("child", 2)))
    with pytest.raises(EndpointInUse, match=rf"pid {child.process.pid}\b"):
        processes.world.start(thief, Limits())
    node.send_all(child.peer, sinks(10))
    assert processes.facts(node, child).tokens == list(range(10))


def test_the_socket_is_for_its_owner_only(processes: Processes) -> None:
    """Socket and lock file have mode 0600."""
    processes.linked()
    for name in os.listdir(processes.directory):
        assert (processes.directory / name).stat().st_mode & 0o777 == 0o600


def test_a_full_socket_neither_blocks_nor_grows(processes: Processes) -> None:
    """4,000 messages to a frozen peer, more than its socket takes: loop free, all arrive."""
    node, child = processes.linked(PATIENT)
    turns: list[float] = []
    queued = sinks(4_000)

    def turn() -> None:
        turns.append(time.monotonic())
        node.send_all(child.peer, queued[:40])
        del queued[:40]
        processes.later(0.005, turn)

    child.freeze()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    turn()
    processes.until(lambda: not queued and turns[-1] - turns[0] > 1.5)
    assert node.counts["send_refused"] > 0
    lags = [later - earlier for earlier, later in itertools.pairwise(turns)]
    assert sorted(lags)[int(0.99 * len(lags))] < 0.05
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024
    child.thaw()
    assert processes.facts(node, child).tokens == list(range(4_000))
    assert node.losses() == []


def test_closing_with_a_frozen_peer_takes_no_time(processes: Processes) -> None:
    """Messages queued for a frozen peer hold nobody up for more than the flush and the linger."""
    node, child = processes.linked(PATIENT)
    child.freeze()
    node.send_all(child.peer, sinks(3_000))
    began = time.monotonic()
    processes.world.close(node)
    assert time.monotonic() - began < 1.0


def test_a_process_with_a_frozen_peer_ends_when_told(processes: Processes) -> None:
    """SIGTERM to a process whose peer is stopped and owed messages: it exits 0 in < 2 s."""
    node, child = processes.linked(PATIENT)
    frozen = Child(Peer("frozen", 1), processes.world.endpoint("frozen"), PATIENT)
    processes.children.append(frozen)
    processes.dial(node, frozen)
    frozen.freeze()
    node.send_all(child.peer, sinks(100))
    assert len(processes.facts(node, child).tokens) == 100
    began = time.monotonic()
    child.process.send_signal(signal.SIGTERM)
    assert child.process.wait(5) == 0
    assert time.monotonic() - began < 2.0
    processes.until(lambda: child.peer in node.losses())
    for name in ("frozen.sock", "frozen.sock.lock"):
        (processes.directory / name).unlink()


def test_a_bug_ends_the_process(processes: Processes) -> None:
    """An exception in on_event reaches the barrier of a real process: it exits non-zero."""
    node, child = processes.linked()
    node.transport.send(child.peer, ReadReport("bug", 0))
    assert child.process.wait(5) == EXIT_BUG
    processes.until(lambda: node.losses() == [child.peer])
