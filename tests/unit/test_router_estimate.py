"""Estimates: what is expected of a way, and how experience corrects it."""

from __future__ import annotations

import random

import pytest

from baton.core.ids import Peer, Role
from baton.core.slo import Slo
from baton.core.step_times import StepCurve
from baton.router.estimate import Estimator, Line, Need
from baton.router.workers import WorkerView
from baton.wire.messages import WorkerStatus

CURVE = StepCurve((1, 64, 256), (5_500, 37_000, 133_000))
P, D = Peer("prefill-0", 1), Peer("decode-0", 2)


def view(peer: Peer, role: Role, **status: int) -> WorkerView:
    fields = {"block_size": 16, "chunk_tokens": 128 if role is Role.DECODE else 256, **status}
    return WorkerView(peer, role, WorkerStatus(accepting=True, **fields), 0.0, "host")


@pytest.mark.parametrize("offset", [0.0, 0.008, 0.3])
@pytest.mark.parametrize("slope", [0.7, 1.0, 1.6])
def test_experience_corrects_what_no_worker_sees(offset: float, slope: float) -> None:
    """Within a tenth after some tens of requests, whatever their length."""
    chance, line = random.Random(3), Line()
    for _ in range(60):
        expected = chance.uniform(0.05, 1.5)
        line.learn(expected, (offset + slope * expected) * chance.uniform(0.95, 1.05))
    for expected in (0.05, 0.3, 1.4):
        assert line.corrected(expected) == pytest.approx(offset + slope * expected, rel=0.1)


def test_without_experience_the_figures_stand_as_they_are() -> None:
    """And requests of one length say nothing about the slope."""
    line = Line()
    assert line.corrected(0.4) == 0.4
    for _ in range(20):
        line.learn(0.1, 0.15)
    assert line.corrected(0.1) == pytest.approx(0.15)
    assert line.corrected(1.1) == pytest.approx(1.15)


def test_one_wild_time_does_not_spoil_the_others() -> None:
    """A machine that stood still for a minute is not the way's fault."""
    line = Line()
    for _ in range(30):
        line.learn(0.1, 0.1)
    line.learn(0.1, 60.0)
    assert line.corrected(0.1) < 0.12


def test_a_machine_that_has_become_faster_is_believed_soon() -> None:
    """Twenty requests after a slow time its forecasts are right again."""
    chance, line = random.Random(5), Line()
    for factor in (3.0, 1.0):
        for _ in range(20):
            expected = chance.uniform(0.05, 1.5)
            line.learn(expected, factor * expected)
    assert line.corrected(0.5) < 0.75
    for _ in range(20):
        line.learn(0.5, 0.5)
    assert line.corrected(0.5) == pytest.approx(0.5, rel=0.1)


def test_a_remote_way_is_its_queue_its_chunks_and_the_hand_over() -> None:
    """Two prompts of 256 tokens wait there, 300 of 400 tokens are to be computed."""
    estimator = Estimator(Slo(2.0, 0.1))
    decode = view(D, Role.DECODE, running=3, context_tokens=900, handover_us=2_000)
    prefill = view(P, Role.PREFILL, waiting=2, queued_tokens=512)
    need = Need(tokens=400, cached=100, waited_s=0.05)
    found = estimator.remote(decode, prefill, (CURVE, CURVE), need, ahead=4, promised=0)
    expected = 2 * 0.133 + 0.133 + CURVE.seconds(44) + 0.002
    assert found.raw_s == pytest.approx(expected)
    assert found.ttft_s == pytest.approx(expected + 0.05)
    assert (found.lost, found.delay_s, found.ready, found.kind) == (0, 0.0, True, "remote")
    busy = estimator.remote(decode, prefill, (CURVE, CURVE), need, ahead=2, promised=5_000)
    assert busy.late and not busy.ready and "once there is room" in busy.words()


def test_a_local_way_is_its_chunks_beside_the_streams_and_what_that_costs_them() -> None:
    """Chunks are those that decode will choose: 64 tokens in steps of at most 40 ms."""
    estimator = Estimator(Slo(2.0, 0.05))
    decode = view(D, Role.DECODE, running=4, context_tokens=1_200)
    need = Need(tokens=256, cached=0, waited_s=0.0)
    found = estimator.local(decode, CURVE, need, ahead=4)
    calm, step = CURVE.seconds(4), CURVE.seconds(4 + 64)
    assert found.step_s == pytest.approx(step) and step <= 0.04
    assert found.raw_s == pytest.approx(calm / 2 + 4 * step)
    assert found.delay_s == pytest.approx(4 * 4 * (step - calm))
    assert found.lost == 0 and "delays others" in found.words()
    alone = view(D, Role.DECODE)
    assert estimator.local(alone, CURVE, need, ahead=4).raw_s == pytest.approx(
        2 * CURVE.seconds(128)
    )


def test_what_streams_lose_is_counted() -> None:
    """Those that would keep the SLO without the chunk, and do not with it; not those that break it
    anyway."""
    steep = StepCurve((1, 8, 64), (8_000, 9_000, 80_000))
    need = Need(tokens=200, cached=0, waited_s=0.0)
    decode = view(D, Role.DECODE, running=4, context_tokens=800)
    assert Estimator(Slo(5.0, 0.015)).local(decode, steep, need, ahead=4).stalled == 4
    assert Estimator(Slo(5.0, 0.005)).local(decode, steep, need, ahead=4).stalled == 0


def test_who_is_on_its_way_meets_two_steps() -> None:
    """Chunks are half as long for them, as decode will choose; where even one block is too long
    they are lost as well. A prompt that decode computes itself joins nobody."""
    estimator = Estimator(Slo(2.0, 0.1))
    need = Need(tokens=256, cached=0, waited_s=0.0)

    def joins(joining: int, **status: int) -> WorkerView:
        return view(D, Role.DECODE, waiting=joining, joining=joining, **status)

    calm = estimator.local(view(D, Role.DECODE, running=2), CURVE, need, ahead=4)
    joined = estimator.local(joins(running=2, joining=1), CURVE, need, ahead=4)
    assert calm.step_s > 0.06 and joined.step_s <= 0.04 and joined.lost == 0
    alone = estimator.local(joins(joining=1), CURVE, need, ahead=4)
    assert alone.step_s <= 0.04
    prompt = view(D, Role.DECODE, running=2, waiting=1, queued_tokens=100)
    assert estimator.local(prompt, CURVE, need, ahead=4).step_s == calm.step_s
    given = view(D, Role.DECODE, running=2)
    given.placed, given.placed_joining = 1, 1
    assert estimator.local(given, CURVE, need, ahead=4).step_s == joined.step_s
    given.refresh(given.status)
    assert estimator.local(given, CURVE, need, ahead=4).step_s == calm.step_s
    steep = StepCurve((1, 8, 64), (8_000, 9_000, 80_000))
    decode = joins(running=4, joining=2, context_tokens=800)
    assert Estimator(Slo(5.0, 0.03)).local(decode, steep, need, ahead=4).stalled == 2
    assert Estimator(Slo(5.0, 0.015)).local(decode, steep, need, ahead=4).stalled == 6


def test_an_absurd_expectation_is_learned_from_without_harm() -> None:
    """Nothing is divided by what it leaves; the next requests are soon expected right again."""
    for absurd in (0.0, 1e-300, 1e30, 1e300):
        line = Line()
        line.learn(absurd, 1.0)
        line.learn(1.0, absurd)
        for _ in range(2 * Line.MEMORY):
            line.learn(0.5, 0.5)
        assert line.corrected(0.5) == pytest.approx(0.5, rel=0.1)
