"""Estimates: what is expected of a way, and how experience corrects it."""

from __future__ import annotations

import random

import pytest

from baton.core.ids import Peer, Role
from baton.core.slo import Slo
from baton.core.step_times import StepCurve
from baton.router.estimate import Estimator, Line, Need, Speed
from baton.router.workers import WorkerView
from baton.wire.messages import WorkerStatus

CURVE = StepCurve((1, 64, 256), (5_500, 37_000, 133_000))
SPEED = Speed(CURVE, CURVE)
#: With as many cores again: 0.6 of the time.
HELPED = Speed(CURVE, StepCurve(CURVE.tokens, (3_300, 22_200, 79_800)))
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
    found = estimator.remote(decode, prefill, (SPEED, SPEED), need, ahead=4, promised=0)
    expected = 2 * 0.133 + 0.133 + CURVE.seconds(44) + 0.002 + CURVE.seconds(3, 900) / 2
    assert found.raw_s == pytest.approx(expected)
    assert found.ttft_s == pytest.approx(expected + 0.05)
    assert (found.lost, found.delay_s, found.kind) == (0, 0.0, "remote")
    busy = estimator.remote(decode, prefill, (SPEED, SPEED), need, ahead=2, promised=5_000)
    assert busy.late and not busy.ready and "once there is room" in busy.words()


def test_a_local_way_is_its_chunks_beside_the_streams_and_what_that_costs_them() -> None:
    """Chunks are those that decode will choose: 64 tokens in steps of at most 40 ms."""
    estimator = Estimator(Slo(2.0, 0.052))
    decode = view(D, Role.DECODE, running=4, context_tokens=1_200)
    need = Need(tokens=256, cached=0, waited_s=0.0)
    found = estimator.local(decode, SPEED, need, ahead=4)
    calm, step = CURVE.seconds(4), CURVE.seconds(4 + 64)
    assert found.step_s == pytest.approx(step) and step <= 0.04
    assert found.raw_s == pytest.approx(calm / 2 + 4 * step)
    assert found.delay_s == pytest.approx(4 * 4 * (step - calm))
    assert found.lost == 0 and "delays others" in found.words()
    alone = view(D, Role.DECODE)
    assert estimator.local(alone, SPEED, need, ahead=4).raw_s == pytest.approx(
        2 * CURVE.seconds(128)
    )


def test_what_streams_lose_is_counted() -> None:
    """Those that would keep the SLO without the chunk, and do not with it; not those that break it
    anyway."""
    steep = StepCurve((1, 8, 64), (8_000, 9_000, 80_000))
    need = Need(tokens=200, cached=0, waited_s=0.0)
    decode = view(D, Role.DECODE, running=4, context_tokens=800)
    assert Estimator(Slo(5.0, 0.015)).local(decode, Speed(steep, steep), need, ahead=4).stalled == 4
    assert Estimator(Slo(5.0, 0.005)).local(decode, Speed(steep, steep), need, ahead=4).stalled == 0


def test_the_chance_of_a_step_that_is_too_long() -> None:
    """One in a hundred takes `spread` times as long: that is what a step at the planned length
    risks; one that is expected at the bound is too long; far below it there is nothing to fear."""
    slo = Slo(2.0, 0.1)
    for spread in (1.1, 1.5, 4.0):
        planned = slo.step_s(0.01, spread)
        assert slo.risk(planned, spread) == pytest.approx(0.01)
        assert slo.risk(0.085, spread) == slo.risk(0.2, spread) == 1.0
        steps = [planned * part for part in (0.3, 0.6, 1.0, 1.1, 2.0)]
        chances = [slo.risk(step, spread) for step in steps]
        assert chances == sorted(chances) and chances[1] < 0.003
    assert slo.risk(0.0, 1.1) == pytest.approx(0.0, abs=1e-15)


def test_each_step_of_a_prompt_risks_each_stream() -> None:
    """Four chunks of planned length beside four streams: one in a hundred each; it costs as much as
    the time that a lost first token may take. Streams that are lost or that nothing can save risk
    nothing, and so does a prompt that goes elsewhere."""
    estimator = Estimator(Slo(2.0, 0.0505))
    decode = view(D, Role.DECODE, running=4, context_tokens=1_200)
    need = Need(tokens=256, cached=0, waited_s=0.0)
    found = estimator.local(decode, SPEED, need, ahead=4)
    steps = -(-256 // estimator.local_chunk(decode, SPEED, 128))
    chance = estimator.slo.risk(found.step_s, 1.1)
    assert 0.0001 < chance <= 0.01
    assert found.risked == pytest.approx(4 * (1 - (1 - chance) ** steps))
    plain = found.ttft_s + 0.25 * found.delay_s
    assert found.cost_s == pytest.approx(plain + 2.0 * found.risked)
    assert (", risks " in found.words()) is (found.risked >= 0.05)
    steep = StepCurve((1, 8, 64), (8_000, 9_000, 80_000))
    for itl_s in (0.015, 0.005):
        lost = Estimator(Slo(5.0, itl_s)).local(decode, Speed(steep, steep), need, ahead=4)
        assert lost.risked == 0.0
    prefill = view(P, Role.PREFILL)
    remote = estimator.remote(decode, prefill, (SPEED, SPEED), need, ahead=4, promised=0)
    assert remote.risked == 0.0
    assert remote.cost_s == pytest.approx(remote.ttft_s + 0.25 * remote.delay_s)


def test_who_is_on_its_way_will_meet_the_steps_too() -> None:
    """Chunks are those that decode will choose beside it; where even one block is too long it is
    lost as well. A prompt that decode computes itself joins nobody."""
    estimator = Estimator(Slo(2.0, 0.05))
    need = Need(tokens=256, cached=0, waited_s=0.0)

    def joins(joining: int, **status: int) -> WorkerView:
        return view(D, Role.DECODE, waiting=joining, joining=joining, **status)

    calm = estimator.local(view(D, Role.DECODE, running=2), SPEED, need, ahead=4)
    joined = estimator.local(joins(running=2, joining=1), SPEED, need, ahead=4)
    assert joined.step_s == calm.step_s <= 0.04 and joined.lost == 0
    nobody = estimator.local(view(D, Role.DECODE), SPEED, need, ahead=4)
    alone = estimator.local(joins(joining=1), SPEED, need, ahead=4)
    assert alone.step_s <= 0.04 < nobody.step_s
    given = view(D, Role.DECODE)
    given.placed, given.placed_joining = 1, 1
    assert estimator.local(given, SPEED, need, ahead=4).step_s == alone.step_s
    given.refresh(given.status)
    assert estimator.local(given, SPEED, need, ahead=4).step_s == nobody.step_s
    steep = StepCurve((1, 8, 64), (8_000, 9_000, 80_000))
    decode = joins(running=4, joining=2, context_tokens=800)
    assert Estimator(Slo(5.0, 0.03)).local(decode, Speed(steep, steep), need, ahead=4).stalled == 0
    assert Estimator(Slo(5.0, 0.015)).local(decode, Speed(steep, steep), need, ahead=4).stalled == 6


def test_a_plan_at_the_very_bound_is_no_plan() -> None:
    """It is the longest gap that counts: steps that are planned for more than nine tenths of the
    bound lose the streams. Only who is well beyond it has nothing to lose."""
    flat = StepCurve((1, 4, 20, 64), (8_000, 8_000, 9_500, 80_000))
    need = Need(tokens=200, cached=0, waited_s=0.0)
    decode = view(D, Role.DECODE, running=4, context_tokens=800)

    def stalled(itl_s: float) -> int:
        return Estimator(Slo(5.0, itl_s)).local(decode, Speed(flat, flat), need, ahead=4).stalled

    assert [stalled(itl_s) for itl_s in (0.011, 0.010, 0.0078, 0.0070)] == [0, 4, 4, 0]


def test_little_waits_at_a_worker_what_waits_here_may_go_another_way() -> None:
    """The second prompt is given to a worker always: it never runs dry."""
    estimator, need = Estimator(Slo(5.0, 0.1)), Need(tokens=200, cached=0, waited_s=0.0)
    decode = view(D, Role.DECODE)

    def ready(jobs: int, tokens: int) -> bool:
        prefill = view(P, Role.PREFILL, waiting=jobs, queued_tokens=tokens)
        ways = SPEED, SPEED
        return estimator.remote(decode, prefill, ways, need, ahead=4, promised=0).ready

    assert [ready(1, 2_000), ready(2, 1_000), ready(2, 200), ready(4, 200)] == [
        *(True, False, True, False)
    ]
    local = [
        estimator.local(view(D, Role.DECODE, queued_tokens=tokens), SPEED, need, ahead=4).ready
        for tokens in (0, 128, 500)
    ]
    assert local == [True, True, False]


def test_a_way_without_outcomes_is_corrected_by_those_of_the_others() -> None:
    """What slows one slows all: a machine that has less time than its workers think. With enough of
    its own it goes by these."""
    estimator = Estimator(Slo(2.0, 0.04))
    for expected in (0.05, 0.2, 0.6) * 3:
        estimator.learn("remote", expected, 1.6 * expected)
    assert estimator.lines["local"].corrected(0.4) == pytest.approx(1.6 * 0.4, rel=0.1)
    for expected in (0.05, 0.2, 0.6) * 8:
        estimator.learn("local", expected, expected)
    assert estimator.lines["local"].corrected(0.4) == pytest.approx(0.4, rel=0.05)
    for expected in (0.05, 0.2, 0.6) * 8:
        estimator.learn("remote", expected, 3 * expected)
    assert estimator.lines["local"].corrected(0.4) == pytest.approx(0.4, rel=0.05)


def test_an_absurd_expectation_is_learned_from_without_harm() -> None:
    """Nothing is divided by what it leaves; the next requests are soon expected right again."""
    for absurd in (0.0, 1e-300, 1e30, 1e300):
        line = Line()
        line.learn(absurd, 1.0)
        line.learn(1.0, absurd)
        for _ in range(2 * Line.MEMORY):
            line.learn(0.5, 0.5)
        assert line.corrected(0.5) == pytest.approx(0.5, rel=0.1)


def test_borrowed_cores_count_while_there_are_any_and_not_for_what_a_step_may_risk() -> None:
    """Steps are shorter with them; a chunk is one that nearly keeps the SLO without them too, since
    they may be wanted back at any time."""
    estimator, need = Estimator(Slo(2.0, 0.04)), Need(tokens=256, cached=0, waited_s=0.0)
    decode = view(D, Role.DECODE, running=4, context_tokens=1_200)
    alone, helped = (estimator.local(decode, each, need, ahead=4) for each in (SPEED, HELPED))
    assert helped.raw_s < 0.7 * alone.raw_s and helped.lost == alone.lost == 0
    chunk = estimator.local_chunk(decode, HELPED, 0)
    assert estimator.local_chunk(decode, SPEED, 0) <= chunk
    assert CURVE.seconds(4 + chunk) <= 0.04 < CURVE.seconds(4 + chunk + 16)
    tight = Estimator(Slo(2.0, 0.012))
    assert HELPED.now.seconds(20) < 0.9 * 0.012 < 1.1 * 0.012 < CURVE.seconds(20)
    assert tight.local(decode, HELPED, need, ahead=4).stalled == 4


def test_a_prompt_that_prefill_computes_takes_the_borrowed_cores_from_the_streams() -> None:
    """They stay within the SLO, and are later by what they lose."""
    estimator, need = Estimator(Slo(2.0, 0.1)), Need(tokens=256, cached=0, waited_s=0.0)
    decode, prefill = view(D, Role.DECODE, running=4), view(P, Role.PREFILL)
    alone, helped = (
        estimator.remote(decode, prefill, (each, SPEED), need, ahead=4, promised=0)
        for each in (SPEED, HELPED)
    )
    assert alone.delay_s == 0.0 and helped.delay_s == pytest.approx(4 * 0.4 * 0.133)
    assert helped.raw_s == alone.raw_s and helped.step_s == alone.step_s
    idle = view(D, Role.DECODE)
    found = estimator.remote(idle, prefill, (HELPED, HELPED), need, ahead=4, promised=0)
    assert found.raw_s == pytest.approx(0.0798) and found.delay_s == 0.0
