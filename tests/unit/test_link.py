"""baton.wire.link: in order, exactly once, bounded, and never silently gone."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.limits import Limits
from baton.wire.frames import Frame, Kind
from baton.wire.link import HELD_MAX, Link
from support.transport_wire import Pair, Weather


def bodies(name: str, count: int) -> list[bytes]:
    return [f"{name}{index}".encode() for index in range(count)]


def overs(pair: Pair) -> tuple[str | None, str | None]:
    return pair.a.link.over, pair.b.link.over


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    from_a=st.integers(0, 400),
    from_b=st.integers(0, 400),
    loss=st.floats(0, 0.3),
    duplicate=st.floats(0, 0.5),
    refuse=st.floats(0, 0.5),
    jitter_s=st.floats(0, 0.3),
)
def test_a_bad_wire_changes_nothing_but_the_time(
    *,
    seed: int,
    from_a: int,
    from_b: int,
    loss: float,
    duplicate: float,
    refuse: float,
    jitter_s: float,
) -> None:
    """Loss, duplication, reordering and refusals: delivered is sent, in order, exactly once."""
    pair = Pair(seed, Limits(peer_silent_ms=600_000))
    pair.weather = Weather(loss, duplicate, refuse, 0.001, jitter_s)
    for side, count in ((pair.a, from_a), (pair.b, from_b)):
        times = sorted(pair.clock.now() + pair.random.uniform(0, 0.5) for _ in range(count))
        for time, body in zip(times, bodies("m", count), strict=True):
            pair.clock.call_at(time, partial(side.send, body))

    def unfinished() -> bool:
        return not (
            pair.a.link.quiescent
            and pair.b.link.quiescent
            and len(pair.b.delivered) == from_a
            and len(pair.a.delivered) == from_b
        )

    pair.clock.run_for(0.5)
    assert pair.clock.run_while(unfinished, 2_000)
    assert pair.b.delivered == bodies("m", from_a)
    assert pair.a.delivered == bodies("m", from_b)
    assert pair.a.link.over is None
    assert pair.b.link.over is None


def test_a_quiet_wire_needs_one_frame_a_message_and_one_acknowledgement_a_burst() -> None:
    """Without faults nothing is sent twice, and acknowledgements are few."""
    pair = Pair()
    for body in bodies("m", 1_000):
        pair.a.send(body)
    pair.clock.run_for(0.4)
    assert pair.count(Kind.DATA) == 1_000
    assert pair.count(Kind.ACK) <= 1_000 // 64 + 1
    assert pair.a.link.quiescent


def test_an_answer_carries_the_acknowledgement() -> None:
    """Traffic both ways needs no frames of its own to acknowledge."""
    pair = Pair()
    for _ in range(50):
        pair.a.send(b"ask")
        pair.clock.run_for(0.002)
        pair.b.send(b"answer")
        pair.clock.run_for(0.002)
    assert pair.count(Kind.ACK) == 0
    pair.clock.run_for(0.15)
    assert pair.count(Kind.ACK) == 1


def test_a_message_is_acknowledged_only_after_it_was_handled() -> None:
    """Between delivery and handled() the acknowledgement does not move."""
    link = Link(1, 2, Limits(), 0.0)
    assert link.on_frame(Frame(Kind.DATA, 2, 1, 1, 1, 0, b"m"), 0.0) == [(1, b"m")]
    link.send(b"reply while handling")
    frame = link.next_frame(0.0)
    assert frame is not None
    assert frame.ack == 0
    assert link.next_frame(0.1) is None
    link.handled(1, 0.1)
    frame = link.next_frame(0.201)
    assert frame is not None
    assert (frame.kind, frame.ack) == (Kind.ACK, 1)


def test_an_idle_link_pings_and_lives() -> None:
    """Idle sides show themselves, so only a dead or cut peer is silent."""
    pair = Pair()
    pair.clock.run_for(60)
    assert pair.a.link.over is None
    assert pair.b.link.over is None
    assert 150 <= pair.count(Kind.PING) <= 300


def test_a_silent_peer_is_lost_within_the_limit() -> None:
    """A cut wire is noticed after peer_silent_ms, on both sides, and not before."""
    pair = Pair()
    pair.clock.run_for(1)
    pair.weather = Weather(loss=1.0)
    pair.clock.run_for(1.4)
    assert overs(pair) == (None, None)
    pair.clock.run_for(0.7)
    assert all(reason and reason.startswith("silent for") for reason in overs(pair))


def test_a_side_that_did_not_run_does_not_blame_the_other() -> None:
    """After a stop of its own a side first listens, then judges."""
    pair = Pair()
    pair.clock.run_for(1)
    pair.b.running = False
    pair.a.running = False
    pair.clock.run_for(30)
    pair.a.running = True
    pair.b.running = True
    pair.clock.run_for(5)
    assert pair.a.link.over is None
    assert pair.b.link.over is None


def test_a_peer_stopped_for_less_than_the_limit_loses_nothing() -> None:
    """One second of freeze: everything arrives, with few repetitions."""
    pair = Pair()
    pair.clock.run_for(1)
    pair.b.running = False
    for body in bodies("m", 2_000):
        pair.a.send(body)
    pair.clock.run_for(1)
    pair.b.running = True
    pair.clock.run_for(2)
    assert pair.b.delivered == bodies("m", 2_000)
    assert pair.a.link.resent <= 3
    assert pair.a.link.quiescent


def test_too_much_unacknowledged_ends_the_link() -> None:
    """The queue is bounded: the message beyond it makes the peer count as lost."""
    pair = Pair(limits=Limits(link_unacked_max=10))
    pair.weather = Weather(loss=1.0)
    for body in bodies("m", 10):
        pair.a.send(body)
    assert overs(pair) == (None, None)
    pair.a.send(b"one more")
    assert overs(pair)[0] == "left 10 messages unacknowledged"
    assert pair.a.link.unacked == 0


def test_a_gap_is_held_up_to_a_bound() -> None:
    """What is far beyond a gap is ignored, and comes again."""
    link = Link(1, 2, Limits(), 0.0)
    for seq in range(2, 1_000):
        assert link.on_frame(Frame(Kind.DATA, 2, 1, 1, seq, 0, b""), 0.0) == []
        link.check()
    assert link.held == HELD_MAX - 1
    delivered = link.on_frame(Frame(Kind.DATA, 2, 1, 1, 1, 0, b""), 0.0)
    assert [seq for seq, _ in delivered] == list(range(1, HELD_MAX + 1))


def test_a_refused_frame_is_offered_again_in_its_place() -> None:
    """What the socket did not take leaves in order as soon as the socket is writable."""
    link = Link(1, 2, Limits(), 0.0)
    for body in (b"1", b"2"):
        link.send(body)
    first = link.next_frame(0.0)
    assert first is not None
    link.refused(first, 0.0)
    assert link.next_frame(0.0) is None
    assert link.deadline() == pytest.approx(0.002)
    link.on_writable()
    assert [frame.seq for _ in range(2) if (frame := link.next_frame(0.0))] == [1, 2]


def test_refusals_are_offered_ever_more_slowly() -> None:
    """A full socket is asked a few times a second, not in a loop."""
    pair = Pair()
    pair.weather = Weather(refuse=1.0)
    pair.a.send(b"m")
    wakes = 0
    end = pair.clock.now() + 1.0
    while (due := pair.clock.next_due()) is not None and due < end:
        pair.clock.step()
        wakes += 1
    assert wakes < 60


def test_a_goodbye_ends_the_other_side() -> None:
    """BYE acknowledges what was handled and ends the link with its own reason."""
    pair = Pair()
    pair.a.send(b"m")
    pair.clock.run_for(0.002)
    pair.a.link.on_frame(pair.b.link.goodbye(), pair.clock.now())
    assert pair.a.link.over == "said goodbye"


def test_an_impossible_acknowledgement_ends_the_link() -> None:
    """A peer that acknowledges what was never sent is not the peer it says it is."""
    link = Link(1, 2, Limits(), 0.0)
    link.on_frame(Frame(Kind.ACK, 2, 1, 1, 0, 7), 0.0)
    assert link.over == "acknowledged message 7, but only 0 were sent"
    link.check()


def test_a_link_that_is_over_stays_over() -> None:
    """Nothing is sent, taken or delivered any more."""
    link = Link(1, 2, Limits(), 0.0)
    link.end("first")
    link.end("second")
    link.send(b"m")
    assert link.over == "first"
    assert link.on_frame(Frame(Kind.DATA, 2, 1, 1, 1, 0, b"m"), 0.0) == []
    assert link.next_frame(10.0) is None
    assert link.deadline() is None
