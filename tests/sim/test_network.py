"""The simulated network: bad ways and dying processes, seed by seed, under the real switchboard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random

import pytest

from baton.core.ids import Peer
from baton.core.limits import Limits
from baton.ports.transport import PeerLost, PeerUp, Received, TransportEvent
from baton.sim.network import Faults
from baton.wire.messages import AnyMessage, ReadReport
from support.transport_worlds import Node, SimWorld, numbered

NAMES = ("decode-0", "gateway-0", "prefill-0", "router-0")


def story_of(events: Sequence[TransportEvent], worker_id: str) -> list[TransportEvent]:
    """Return what was said of one worker."""
    story: list[TransportEvent] = []
    for event in events:
        match event:
            case PeerUp(member=member) if member.peer.worker_id == worker_id:
                story.append(event)
            case PeerLost(peer=peer) | Received(peer=peer) if peer.worker_id == worker_id:
                story.append(event)
    return story


class Said:
    """What one incarnation sent to another: all of it, and where each link began."""

    def __init__(self) -> None:
        self.messages: list[AnyMessage] = []
        self.starts: set[int] = set()

    def check(self, heard: Sequence[AnyMessage], after: int) -> int:
        """Assert that one link brought a beginning of what one link was given; return its end."""
        if not heard:
            return after
        start = self.messages.index(heard[0])
        assert start in self.starts, "the first message of a link is missing"
        assert start >= after, "a message of an earlier link"
        assert list(heard) == self.messages[start : start + len(heard)]
        return start + len(heard)


def check_story(node: Node, said: dict[tuple[Peer, Peer], Said]) -> None:
    """Of each incarnation, again and again: up, then messages without a gap, then lost."""
    for name in NAMES:
        up: Peer | None = None
        gone: set[Peer] = set()
        ends: dict[Peer, int] = {}
        heard: list[AnyMessage] = []
        for event in [*story_of(node.events, name), None]:
            if up and (event is None or (isinstance(event, PeerLost) and event.peer == up)):
                ends[up] = said[up, node.peer].check(heard, ends.get(up, 0))
                up, heard = None, []
            match event:
                case PeerUp(member=member):
                    assert up is None, f"{member.peer} is up before {up} was lost"
                    assert member.peer not in gone, f"{member.peer} came back"
                    up = member.peer
                case PeerLost(peer=peer, gone=True):
                    gone.add(peer)
                case Received(peer=peer, message=message):
                    assert peer == up, f"a message of {peer}, which is not up"
                    heard.append(message)


class Swarm:
    """Four workers that talk, on ways of changing quality, and die and come back."""

    def __init__(self, seed: int) -> None:
        self.world = SimWorld(seed)
        self.random: Random = self.world.clock.random
        self.limits = Limits()
        self.nodes: dict[str, Node] = {}
        self.said: defaultdict[tuple[Peer, Peer], Said] = defaultdict(Said)
        self.past: list[Node] = []
        self.token = 0
        for name in NAMES:
            self.start(name, 1)

    def start(self, name: str, incarnation: int) -> None:
        node = self.nodes[name] = self.world.add(name, incarnation, limits=self.limits)

        def react(event: TransportEvent) -> None:
            if isinstance(event, PeerUp):
                said = self.said[node.peer, event.member.peer]
                said.starts.add(len(said.messages))

        node.react = react

    def dial_all(self) -> None:
        """What the ledger's list of members makes every process do."""
        for node in self.nodes.values():
            for other in self.nodes.values():
                if node is not other and not node.transport.frozen:  # type: ignore[union-attr]
                    node.transport.dial(other.member)

    def talk(self) -> None:
        for node in self.nodes.values():
            if node.transport.frozen:  # type: ignore[union-attr]
                continue
            for member in node.transport.peers:
                for _ in range(self.random.randint(0, 3)):
                    self.token += 1
                    message = ReadReport("status", self.token)
                    self.said[node.peer, member.peer].messages.append(message)
                    node.transport.send(member.peer, message)

    def disturb(self) -> None:
        network, random = self.world.network, self.random
        name, other = random.sample(NAMES, 2)
        match random.randint(0, 9):
            case 0:
                network.cut(name, other, both_ways=random.random() < 0.5)
            case 1 | 2:
                network.heal(name, other)
            case 3 | 4:
                faults = Faults(
                    delay_s=(0.0, random.choice([0.001, 0.05, 0.5])),
                    loss=random.choice([0, 0.1, 0.5]),
                    duplicate=random.choice([0, 0.3]),
                    reorder=random.choice([0, 0.5]),
                    truncate=random.choice([0, 0.2]),
                )
                network.set_faults(name, other, faults)
            case 5:
                network.freeze(self.nodes[name].peer)
            case 6 | 7:
                network.thaw(self.nodes[name].peer)
            case 8:
                self.restart(name)

    def restart(self, name: str) -> None:
        old = self.nodes[name]
        self.past.append(old)
        self.world.network.kill(old.peer, seen=self.random.random() < 0.7)
        self.start(name, old.peer.incarnation + 1)

    def calm_down(self) -> None:
        """Good ways for everybody, and for half of the runs new incarnations."""
        for name in NAMES:
            for other in NAMES:
                if name != other:
                    self.world.network.heal(name, other)
            self.world.network.thaw(self.nodes[name].peer)
            if self.world.clock.seed % 2:
                self.restart(name)


@pytest.mark.parametrize("seed", range(40))
def test_no_weather_breaks_the_promises(seed: int) -> None:
    """Safety in ten seconds of faults, then liveness: everybody linked, everything delivered."""
    swarm = Swarm(seed)
    clock = swarm.world.clock
    for step in range(200):
        if step % 10 == 0:
            swarm.dial_all()
        swarm.talk()
        if step % 4 == 0:
            swarm.disturb()
        clock.run_for(0.05)
        swarm.world.check()
    swarm.calm_down()
    for _ in range(20):
        swarm.dial_all()
        clock.run_for(0.5)
    for node in swarm.nodes.values():
        linked = {member.peer for member in node.transport.peers}
        assert linked == {other.peer for other in swarm.nodes.values()} - {node.peer}
    before = {pair: len(said.messages) for pair, said in swarm.said.items()}
    swarm.talk()
    clock.run_for(1)
    for node in swarm.nodes.values():
        for other in swarm.nodes.values():
            if node is not other:
                pair = (other.peer, node.peer)
                late = swarm.said[pair].messages[before.get(pair, 0) :]
                assert node.received(other.peer)[-len(late) :] == late or not late
        assert node.transport._board.quiescent
    for node in [*swarm.past, *swarm.nodes.values()]:
        check_story(node, swarm.said)


def test_the_same_seed_is_the_same_run() -> None:
    """A failing seed can be run again."""

    def run() -> list[list[TransportEvent]]:
        swarm = Swarm(7)
        for _ in range(50):
            swarm.dial_all()
            swarm.talk()
            swarm.disturb()
            swarm.world.clock.run_for(0.05)
        return [node.events for node in swarm.nodes.values()]

    assert run() == run()


def test_a_half_open_pair_is_lost_on_both_sides() -> None:
    """If only one direction is cut, both sides still come to the same end."""
    world = SimWorld()
    a, b = world.pair()
    world.network.cut("a", "b", both_ways=False)
    a.send_all(b.peer, numbered(10))
    world.clock.run_for(5)
    assert a.losses() == [b.peer]
    assert b.losses() == [a.peer]
    assert b.received() == []


def test_a_death_that_nobody_sees_is_told_by_the_silence() -> None:
    """Without a pid to watch a killed peer is lost after peer_silent_ms, not earlier."""
    world = SimWorld()
    a, b = world.pair()
    world.network.kill(b.peer, seen=False)
    world.clock.run_for(1.4)
    assert a.losses() == []
    world.clock.run_for(0.8)
    assert a.losses() == [b.peer]


def test_a_hello_that_nobody_answers_is_a_loss_and_is_repeated() -> None:
    """A process frozen at the handshake is reported lost, and linked when it wakes up."""
    world = SimWorld()
    a, b = world.add("a"), world.add("b")
    world.network.freeze(b.peer)
    a.transport.dial(b.member)
    a.transport.send(b.peer, ReadReport("status", 1))
    world.clock.run_for(6)
    assert a.losses() == [b.peer]
    world.network.thaw(b.peer)
    world.clock.run_for(6)
    assert a.ups() == [b.peer]
    assert b.ups() == [a.peer]
    a.transport.send(b.peer, ReadReport("status", 2))
    world.clock.run_for(1)
    assert b.received() == [ReadReport("status", 2)]


def test_a_dial_that_leads_nowhere_is_forgotten() -> None:
    """Nobody is dialled for ever, and a later dial starts anew."""
    world = SimWorld()
    a = world.add("a")
    nobody = world.member("b", 1, None, bound=True)
    a.transport.dial(nobody)
    world.clock.run_for(120)
    assert a.counts["dial_forgotten"] == 1
    assert a.losses() == [nobody.peer]
    assert world.clock.next_due() is None
    b = world.add("b")
    a.transport.dial(b.member)
    world.clock.run_for(1)
    assert a.ups() == [b.peer]
