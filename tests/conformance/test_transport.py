"""ports.transport: the same conversations over ZeroMQ (asyncio, uvloop, TCP) and simulated."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from baton.core.limits import Limits
from baton.ports.transport import EndpointInUse, PeerLost, PeerUp, Received, TransportEvent
from baton.wire.fields import Message
from baton.wire.messages import ReadReport
from support.transport_worlds import COMPAT, SimWorld, World, ZmqWorld, numbered


@pytest.fixture(params=["sim", "asyncio", "uvloop", "tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "sim":
        yield SimWorld()
        return
    loop = asyncio.new_event_loop() if request.param == "asyncio" else uvloop.new_event_loop()
    # pytest's own directories can be too long for a Unix socket's name.
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        world = ZmqWorld(Path(directory), loop, tcp=request.param == "tcp")
        try:
            yield world
        finally:
            world.end()
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


def test_a_dial_opens_a_link_that_both_sides_see(world: World) -> None:
    """Each side learns what the other said of itself, once."""
    a, b = world.pair()
    assert a.events == [PeerUp(b.member)]
    assert b.events == [PeerUp(a.member)]
    a.transport.dial(b.member)
    b.transport.dial(a.member)
    a.transport.send(b.peer, ReadReport("status", 1))
    world.until(lambda: len(b.received()) == 1)
    assert len(a.events) == 1
    world.check()


def test_messages_arrive_in_order_exactly_once_both_ways(world: World) -> None:
    """Bursts of 2,000 both ways at once: all of them, in order, none twice."""
    a, b = world.pair()
    a.send_all(b.peer, numbered(2_000))
    b.send_all(a.peer, numbered(2_000, 5_000))
    world.until(lambda: len(a.received()) >= 2_000 and len(b.received()) >= 2_000)
    assert b.received(a.peer) == numbered(2_000)
    assert a.received(b.peer) == numbered(2_000, 5_000)
    world.until(lambda: a.transport._board.quiescent and b.transport._board.quiescent)
    world.check()


def test_small_marks_neither_block_nor_lose(world: World) -> None:
    """With room for 10 in a socket and 3,000 messages both ways, sending never stops receiving."""
    limits = Limits(link_hwm=10)
    a, b = world.add("a", limits=limits), world.add("b", limits=limits)
    a.transport.dial(b.member)
    a.send_all(b.peer, numbered(3_000))
    world.until(lambda: bool(b.ups()))
    b.send_all(a.peer, numbered(3_000))
    world.until(lambda: len(a.received()) >= 3_000 and len(b.received()) >= 3_000)
    assert a.received() == b.received() == numbered(3_000)


def test_two_that_dial_each_other_get_one_link(world: World) -> None:
    """Both dial in the same moment: one PeerUp each, no loss, and messages flow."""
    a, b = world.add("a"), world.add("b")
    a.transport.dial(b.member)
    b.transport.dial(a.member)
    a.transport.send(b.peer, ReadReport("status", 1))
    b.transport.send(a.peer, ReadReport("status", 2))
    world.until(lambda: bool(a.received() and b.received()))
    assert a.events == [PeerUp(b.member), Received(b.peer, ReadReport("status", 2))]
    assert b.events == [PeerUp(a.member), Received(a.peer, ReadReport("status", 1))]
    world.check()


def test_who_binds_nothing_can_still_dial(world: World) -> None:
    """A process without an inbox (the CLI) gets its answers over its own dial."""
    server = world.add("decode-0")
    client = world.add("cli", bound=False, compat=None)
    server.react = lambda event: (
        server.transport.send(event.peer, event.message) if isinstance(event, Received) else None
    )
    client.transport.dial(server.member)
    client.transport.send(server.peer, ReadReport("status", 7))
    world.until(lambda: client.received() == [ReadReport("status", 7)])


def test_a_send_to_nobody_reports_the_loss_on_a_later_turn(world: World) -> None:
    """send() does not raise and does not call back from inside."""
    a, b = world.add("a"), world.add("b")
    a.transport.send(b.peer, ReadReport("status", 1))
    assert a.events == []
    world.until(lambda: a.losses() == [b.peer])
    a.transport.send(b.peer, ReadReport("status", 1))
    world.until(lambda: a.losses() == [b.peer, b.peer])


def test_a_reaction_that_sends_is_not_called_from_inside(world: World) -> None:
    """An event is handled to its end before the next one is given out."""
    a, b = world.pair()
    inside: list[TransportEvent] = []

    def react(event: TransportEvent) -> None:
        assert not inside
        inside.append(event)
        if isinstance(event, Received):
            b.transport.send(a.peer, event.message)
            b.transport.send(msgspec.structs.replace(a.peer, incarnation=99), event.message)
        inside.pop()

    b.react = react
    a.send_all(b.peer, numbered(100))
    world.until(lambda: len(a.received()) == 100 and len(b.losses()) == 100)
    assert a.received() == numbered(100)
    assert b.bugs == []


def test_hanging_up_is_heard_by_the_other_side_only(world: World) -> None:
    """The other side loses the peer with what was said before; this side hears nothing more."""
    a, b = world.pair()
    b.send_all(a.peer, numbered(10))
    a.send_all(b.peer, numbered(10))
    a.transport.hang_up(b.peer)
    world.until(lambda: b.losses() == [a.peer])
    assert b.events[-1] == PeerLost(a.peer, "said goodbye", gone=True)
    assert b.received() == numbered(10)
    assert a.events == [PeerUp(b.member)]
    world.check()


def test_who_said_goodbye_is_not_linked_again(world: World) -> None:
    """Neither side dials an incarnation that is gone, and sends report it as such."""
    a, b = world.pair()
    a.transport.hang_up(b.peer)
    world.until(lambda: b.losses() == [a.peer])
    a.transport.dial(b.member)
    b.transport.dial(a.member)
    assert a.counts["dial_over"] == 1
    assert b.counts["dial_over"] == 1
    b.transport.send(a.peer, ReadReport("status", 1))
    world.until(lambda: b.losses() == [a.peer, a.peer])
    assert b.events[-1] == PeerLost(a.peer, "said goodbye", gone=True)
    assert b.ups() == [a.peer]


def test_closing_says_goodbye_after_what_was_sent(world: World) -> None:
    """What was queued is flushed, then every peer hears the goodbye."""
    a, b = world.pair()
    a.send_all(b.peer, numbered(500))
    world.close(a)
    world.until(lambda: b.losses() == [a.peer])
    assert b.received() == numbered(500)


def test_a_pair_that_differs_is_refused_once_with_both_names(world: World) -> None:
    """Both sides are told what differs; there is no link; a fitting third is unharmed."""
    a = world.add("a")
    b = world.add("b", compat=msgspec.structs.replace(COMPAT, model="model-b", block_size=32))
    c = world.add("c")
    a.transport.dial(b.member)
    a.transport.dial(c.member)
    world.until(lambda: bool(a.refusals() and b.refusals() and c.ups()))
    for node, other in ((a, b), (b, a)):
        (refusal,) = node.refusals()
        assert refusal.worker_id == other.peer.worker_id
        for part in (str(a.peer), str(b.peer), "model", "model-a", "model-b", "block_size"):
            assert part in refusal.text
        assert other.peer not in node.ups()
    a.transport.send(b.peer, ReadReport("status", 1))
    world.until(lambda: a.losses() == [b.peer])


def test_who_has_no_digest_is_not_compared(world: World) -> None:
    """The CLI, which touches no KV, may talk to everybody."""
    a, b = world.add("a", compat=None), world.add("b")
    a.transport.dial(b.member)
    world.until(lambda: bool(a.ups() and b.ups()))


def test_a_crashed_peer_is_lost_and_its_successor_is_new(world: World) -> None:
    """The old incarnation is lost first, then the new one is up, whoever dials."""
    a, b = world.pair()
    world.crash(b)
    world.until(lambda: a.losses() == [b.peer])
    successor = world.add("b", 2)
    successor.transport.dial(a.member)
    world.until(lambda: len(a.ups()) == 2)
    a.send_all(successor.peer, numbered(10))
    a.transport.send(b.peer, ReadReport("status", 0))
    world.until(lambda: successor.received() == numbered(10) and len(a.losses()) == 2)
    assert a.events[1] == PeerLost(b.peer, "died", gone=True)
    assert a.events[2] == PeerUp(successor.member)
    assert a.losses() == [b.peer, b.peer]


def test_an_unnoticed_restart_ends_the_old_link_first(world: World) -> None:
    """A hello of a later incarnation is proof enough that the earlier one is gone."""
    limits = Limits(peer_silent_ms=60_000)
    a = world.add("a", limits=limits)
    old = world.add("b", 1, limits=limits)
    old.transport.dial(a.member)
    world.until(lambda: bool(a.ups() and old.ups()))
    new = world.add("b", 2, bound=False)
    new.transport.dial(a.member)
    world.until(lambda: len(a.events) == 3)
    assert a.events[1] == PeerLost(old.peer, f"replaced by {new.peer}", gone=True)
    assert a.events[2] == PeerUp(new.member)
    old.transport.send(a.peer, ReadReport("status", 1))
    world.until(lambda: old.losses() == [a.peer])
    assert a.received() == []
    world.check()


def test_a_dial_to_an_incarnation_that_is_gone_is_lost(world: World) -> None:
    """The process that has the endpoint now says that it is another."""
    a, b = world.add("a"), world.add("b", 5)
    gone = msgspec.structs.replace(
        b.member, peer=msgspec.structs.replace(b.peer, incarnation=4), pid=a.member.pid
    )
    a.transport.dial(gone)
    world.until(lambda: a.losses() == [gone.peer])
    a.transport.dial(b.member)
    world.until(lambda: a.ups() == [b.peer] and b.ups() == [a.peer])
    assert b.counts["frame_stale"] >= 1


def test_a_second_process_cannot_take_a_living_endpoint(world: World) -> None:
    """The second start is refused; the first goes on undisturbed."""
    a, b = world.pair()
    member = msgspec.structs.replace(b.member, peer=msgspec.structs.replace(b.peer, incarnation=2))
    thief = type(b)(member)
    with pytest.raises(EndpointInUse):
        world.start(thief, world.limits)
    a.send_all(b.peer, numbered(10))
    world.until(lambda: b.received() == numbered(10))


def test_a_peer_that_leaves_too_much_unacknowledged_is_lost(world: World) -> None:
    """The queue of a link is bounded, and its overflow is told, not silent."""
    limits = Limits(link_unacked_max=100)
    a, b = world.add("a", limits=limits), world.add("b")
    a.transport.dial(b.member)
    world.until(lambda: bool(a.ups()))
    a.send_all(b.peer, numbered(101))
    assert a.losses() == []
    world.until(lambda: a.losses() == [b.peer] and b.losses() == [a.peer])
    assert a.events[-1] == PeerLost(b.peer, "left 100 messages unacknowledged", gone=False)
    assert not b.events[-1].gone  # type: ignore[union-attr]


@pytest.mark.parametrize("dialler", [0, 1])
def test_two_that_lost_each_other_are_linked_again(world: World, dialler: int) -> None:
    """After a loss the same incarnations get another link, and nothing of the first one."""
    limits = Limits(link_unacked_max=100)
    a, b = pair = world.add("a", limits=limits), world.add("b")
    a.transport.dial(b.member)
    world.until(lambda: bool(a.ups() and b.ups()))
    a.send_all(b.peer, numbered(101))
    world.until(lambda: a.losses() == [b.peer] and b.losses() == [a.peer])
    first = len(b.received())
    pair[dialler].transport.dial(pair[1 - dialler].member)
    world.until(lambda: len(a.ups()) == len(b.ups()) == 2)
    a.send_all(b.peer, numbered(50, 1_000))
    b.send_all(a.peer, numbered(50, 2_000))
    world.until(lambda: len(b.received()) == first + 50 and len(a.received()) == 50)
    assert b.received()[:first] == numbered(first)
    assert b.received()[first:] == numbered(50, 1_000)
    assert a.received() == numbered(50, 2_000)
    kinds = [type(event) for event in b.events if not isinstance(event, Received)]
    assert kinds == [PeerUp, PeerLost, PeerUp]
    world.check()


def test_a_loss_that_only_one_side_knows_is_healed_by_its_dial(world: World) -> None:
    """A hello for the next link ends the first one on the side that still believed in it."""
    a, b = world.pair()
    # As after a silence, but without the words that would tell b.
    line = a.transport._board.line(b.peer)
    assert line is not None
    a.transport._execute(a.transport._board._lose(line, "silent for 2000 ms"))
    a.transport.dial(b.member)
    world.until(lambda: len(a.ups()) == len(b.ups()) == 2)
    a.send_all(b.peer, numbered(10))
    world.until(lambda: b.received() == numbered(10))
    assert [type(event) for event in b.events[:3]] == [PeerUp, PeerLost, PeerUp]
    world.check()


class UnknownMessage(Message, frozen=True):
    """A message of a later version."""


def test_an_unknown_message_is_counted_and_the_link_goes_on(world: World) -> None:
    """It is used up like any other, so that nothing waits for it."""
    a, b = world.pair()
    a.transport.send(b.peer, UnknownMessage())  # type: ignore[arg-type]
    a.send_all(b.peer, numbered(10))
    world.until(lambda: b.received() == numbered(10))
    assert b.counts["message_malformed"] == 1
    world.until(lambda: a.transport._board.quiescent)


def test_a_message_that_cannot_fit_is_a_bug_of_the_sender(world: World) -> None:
    """It raises at once; nobody finds out by waiting."""
    limits = Limits(frame_bytes_max=10_000)
    a, b = world.add("a", limits=limits), world.add("b", limits=limits)
    a.transport.dial(b.member)
    with pytest.raises(ValueError, match="frame_bytes_max"):
        a.transport.send(b.peer, ReadReport("x" * 10_000, 1))


def test_a_bug_in_the_process_reaches_its_crash_barrier(world: World) -> None:
    """What on_event raises is not swallowed, and the message stays unacknowledged."""
    a, b = world.pair()

    def react(event: TransportEvent) -> None:
        if event == Received(a.peer, ReadReport("status", 1)):
            _ = 1 // 0

    b.react = react
    a.send_all(b.peer, numbered(5))
    world.until(lambda: len(b.bugs) == 1)
    assert isinstance(b.bugs[0], ZeroDivisionError)
    assert b.received() == numbered(2)
    line = a.transport._board.line(b.peer)
    assert line is not None
    assert line.link.unacked >= 4
