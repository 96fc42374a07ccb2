"""Step times are learned from steps: by tokens, by context, and told in a few numbers."""

from __future__ import annotations

import random

import msgspec
import pytest

from baton.core.slo import Slo
from baton.core.step_times import (
    CELLS,
    ONE_OF,
    RATIOS,
    SPREAD_LEAST,
    SPREAD_MOST,
    SPREAD_UNKNOWN,
    SharedStepTimes,
    Step,
    StepCurve,
    StepTimes,
    chunk_beside,
    pairs_of,
)


def _learned(
    fixed: float, token: float, context: float, pair: float, *, noise: float = 0.0, rows: int = 99
) -> StepCurve:
    """Steps of an engine that takes so many seconds: ``fixed``, and for each token, each token of
    its rows' context and each pair of a prompt. Every third one has a prompt, of at most ``rows``
    rows' steps."""
    chance = random.Random(7)
    times = StepTimes()
    for _ in range(600):
        step = Step(0, 0.0, 0.0)
        if count := min(rows, chance.choice((0, 1, 2, 4, 7, 16))):
            step = Step(count, count * chance.randrange(0, 4_000), 0.0)
        if not count or chance.random() < 0.3:
            tokens = chance.choice((16, 40, 64, 100, 128, 256))
            pairs = pairs_of(chance.randrange(0, 4_000), tokens)
            step = Step(count + tokens, step.context, pairs)
        seconds = fixed + token * step.tokens + context * step.context + pair * step.pairs
        times.learn(step, seconds * chance.uniform(1 - noise, 1 + noise))
    return times.curve()


@pytest.mark.parametrize("rows", [99, 0])
@pytest.mark.parametrize(
    ("fixed", "token", "context", "pair"),
    [(0.005, 0.0004, 1e-6, 2e-8), (0.02, 0.0001, 0.0, 0.0), (0.0, 0.002, 1e-6, 1e-7)],
)
def test_what_an_engine_costs_is_found(
    fixed: float, token: float, context: float, pair: float, rows: int
) -> None:
    """Within ten percent, of any step between those that were seen, despite noise: whether streams
    run beside prompts or not."""
    curve = _learned(fixed, token, context, pair, noise=0.1, rows=rows)
    for beside, tokens, start in ((0, 30, 1_000), (5, 64, 0), (9, 200, 2_500), (3, 256, 500)):
        step = Step.of([*[(2_000, 1)] * min(beside, rows), (start, tokens)])
        expected = fixed + token * step.tokens + context * step.context + pair * step.pairs
        found = curve.seconds(step.tokens, step.context, step.pairs)
        assert found == pytest.approx(expected, rel=0.1)
    if rows:
        found, expected = curve.seconds(6, 18_000), fixed + 6 * token + 18_000 * context
        assert found == pytest.approx(expected, rel=0.1)


def test_chance_is_not_taken_for_attention() -> None:
    """Short contexts that differ little say nothing of long ones, however their steps vary."""
    chance = random.Random(3)
    slopes = []
    for _ in range(50):
        times = StepTimes()
        for _ in range(40):
            times.learn(Step(2, chance.uniform(300, 320), 0.0), 0.02 * chance.uniform(0.9, 1.1))
        slopes.append(times.curve().context_picos * 1e-12)
    # Least squares alone have 10 % of a step's time within these 20 tokens often, 1.5 times at
    # a context of 3,000.
    assert sorted(slopes)[25] == 0.0


def test_a_row_reads_its_context_alone() -> None:
    """Where chunks share what they read, streams' contexts say nothing of prompts."""
    curve = _learned(0.01, 0.0003, 2e-6, 2e-8)
    assert curve.context_picos == pytest.approx(2_000_000, rel=0.05)
    assert curve.pair_picos == pytest.approx(20_000, rel=0.05)


def test_a_prompt_in_chunks_is_the_sum_of_its_steps() -> None:
    """Followed in one formula, beside streams that decode, and from what is cached on."""
    curve = StepCurve((1, 64, 128), (5_000, 30_000, 55_000), 20_000, 900_000)
    for begin, end, chunk, rows, context in ((0, 1_000, 64, 0, 0), (160, 1_000, 48, 6, 3_000)):
        total, at = 0.0, begin
        while at < end:
            tokens = min(chunk, end - at)
            total += curve.seconds(rows + tokens, context, pairs_of(at, tokens))
            at += tokens
        found = curve.prompt_seconds(begin, end, chunk, rows, context)
        assert found == pytest.approx(total, rel=1e-6)
    assert curve.prompt_seconds(100, 100, 64) == 0.0


def test_a_chunk_keeps_within_a_limit() -> None:
    """The longest one does; beside more streams, and after a longer prefix, it is shorter."""
    curve = StepCurve((1, 64, 256), (5_000, 30_000, 110_000), 20_000)
    sizes = []
    for rows, begin in ((0, 0), (16, 0), (16, 2_000)):
        size = curve.chunk_within(0.05, begin, most=256, unit=16, rows=rows)
        assert curve.seconds(rows + size, 0, pairs_of(begin, size)) <= 0.05
        longer = size + 16
        assert curve.seconds(rows + longer, 0, pairs_of(begin, longer)) > 0.05
        sizes.append(size)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    assert curve.chunk_within(0.001, 0, most=256, unit=16) == 16
    assert curve.chunk_within(9.0, 0, most=256, unit=16) == 256


def test_more_tokens_never_take_less_time() -> None:
    """One slow step of one token does not make longer ones look cheap, nor the other way round."""
    times = StepTimes()
    times.learn(Step(1, 0, 0), 0.5)
    for _ in range(40):
        times.learn(Step(64, 0, 0), 0.03)
    curve = times.curve()
    assert list(curve.micros) == sorted(curve.micros)
    assert curve.seconds(64) < 0.06


def test_a_step_that_something_else_held_up_counts_for_little() -> None:
    """A pause of the machine says nothing about the engine."""
    times = StepTimes()
    for _ in range(40):
        times.learn(Step(8, 0, 0), 0.01)
    times.learn(Step(8, 0, 0), 5.0)
    assert times.curve().seconds(8) < 0.012


def test_what_has_changed_is_learned_again() -> None:
    """After some tens of steps at another speed the old one is forgotten."""
    times = StepTimes()
    for seconds in (0.01, 0.03):
        for _ in range(120):
            times.learn(Step(8, 0, 0), seconds)
    assert times.curve().seconds(8) == pytest.approx(0.03, rel=0.05)


def test_few_samples_are_extended_with_care() -> None:
    """Beyond what was seen time grows with the tokens; nothing seen is nothing known."""
    assert StepCurve().seconds(100) == 0.0
    one = StepCurve((32,), (20_000,))
    assert one.seconds(320) == pytest.approx(0.2)
    assert one.seconds(1) == pytest.approx(0.02)
    flat = StepCurve((1, 2), (20_000, 20_000))
    assert flat.seconds(200) > 1.0  # steps of two tokens say nothing about two hundred
    long = StepCurve((64, 128), (30_000, 50_000))
    assert long.seconds(256) == pytest.approx(0.09)


def test_the_model_has_a_bound_and_travels() -> None:
    """However different steps are, it is a few numbers, and the same after a message."""
    times = StepTimes()
    for tokens in range(1, 70_000, 7):
        times.learn(Step(tokens, 0, 0), tokens / 1_000)
    times.learn(Step(0, 0, 0), 1.0)
    times.learn(Step(1, 0, 0), 0.0)
    assert len(times.cells) <= CELLS
    curve = times.curve()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(curve), type=StepCurve) == curve


def test_what_was_learned_of_a_machine_that_stood_still_can_be_told() -> None:
    """However long a step took: the figures end where those that may travel end."""
    times = StepTimes()
    for tokens, pairs, seconds in ((1, 0.5, 1e-9), (1, 1.5, 1e9), (300, 9.0, 1e12)):
        times.learn(Step(tokens, 0, pairs), seconds)
    curve = times.curve()
    curve.verify()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(curve), type=StepCurve) == curve


def _shared(gain: float = 2.0) -> SharedStepTimes:
    """Steps of 10 ms and 1 ms a token; ``gain`` times as fast with borrowed cores."""
    times = SharedStepTimes()
    for tokens in (1, 4, 16):
        for _ in range(4):
            times.learn(Step(tokens, 0, 0), 0.01 + tokens / 1_000, 0.0)
            times.learn(Step(tokens, 0, 0), (0.01 + tokens / 1_000) / gain, 1.0)
    return times


def test_steps_with_borrowed_cores_are_learned_apart() -> None:
    """Those that had them for a part only say nothing of either."""
    times = _shared()
    before = (times.curve(), times.curve_borrowed())
    for borrowed in (0.11, 0.5, 0.89):
        times.learn(Step(4, 0, 0), 5.0, borrowed)
    assert (times.curve(), times.curve_borrowed()) == before
    times.learn(Step(4, 0, 0), 0.02, 0.1)
    times.learn(Step(4, 0, 0), 0.02, 0.9)
    assert times.curve() != before[0] and times.curve_borrowed() != before[1]
    assert before[0].seconds(4) == pytest.approx(0.014)
    assert before[1].seconds(4) == pytest.approx(0.007)


def test_what_only_one_kind_of_step_has_shown_is_known_of_the_other() -> None:
    """By how much borrowed cores helped where both kinds were seen."""
    helped, alone = _shared(gain=1.6), _shared(gain=1.6)
    helped.learn(Step(256, 0, 0), 0.1, 1.0)
    alone.learn(Step(64, 0, 0), 0.08, 0.0)
    assert helped.curve().seconds(256) == pytest.approx(0.16)
    assert alone.curve_borrowed().seconds(64) == pytest.approx(0.05)
    helped.curve().verify()
    alone.curve_borrowed().verify()


def test_until_both_kinds_were_seen_the_worst_is_assumed() -> None:
    """Alone it takes twice as long as with as many more cores; and these may not help at all."""
    times = SharedStepTimes()
    times.learn(Step(8, 0, 0), 0.01, 1.0)
    assert times.curve().seconds(8) == pytest.approx(0.02)
    times.learn(Step(64, 0, 0), 0.08, 0.0)
    assert times.curve_borrowed().seconds(64) == pytest.approx(0.08)


def test_who_never_borrows_tells_one_curve() -> None:
    """The other one is empty."""
    times = SharedStepTimes()
    times.learn(Step(8, 0, 0), 0.01)
    assert times.curve() == StepCurve((8,), (10_000,))
    assert times.curve_borrowed() == StepCurve()


def test_completed_curves_are_never_too_long_to_tell() -> None:
    """Each has seen steps of all sizes, at other counts within the cells."""
    times = SharedStepTimes()
    for cell in range(CELLS):
        octave = 1 << cell // 2
        tokens = octave + (cell % 2) * ((octave + 1) // 2)
        times.learn(Step(tokens, 0, 0), tokens / 1_000, 0.0)
        if tokens > 4:
            times.learn(Step(tokens + tokens // 8, 0, 0), tokens / 2_000, 1.0)
    for curve in (times.curve(), times.curve_borrowed()):
        curve.verify()
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(curve), type=StepCurve) == curve


def test_how_much_longer_some_steps_take_is_told() -> None:
    """One in a hundred of the last steps of a kind, whatever kind; unknown until there are some."""
    chance, times = random.Random(5), SharedStepTimes()
    assert times.curve().spread == SPREAD_UNKNOWN
    for number in range(400):
        step = Step(chance.choice((1, 2, 40)), 0, 0)
        usual = 0.01 + step.tokens / 1_000
        times.learn(step, usual * (2.5 if number % 50 == 0 else chance.uniform(0.98, 1.02)))
    assert times.curve().spread == pytest.approx(2.5, rel=0.1)
    for _ in range(RATIOS):
        times.learn(Step(2, 0, 0), 0.012)
    assert times.curve().spread == SPREAD_LEAST
    times.learn(Step(2, 0, 0), 60.0)
    assert times.curve().spread == SPREAD_LEAST
    for _ in range(RATIOS // ONE_OF):
        times.learn(Step(2, 0, 0), 60.0)
    assert times.curve().spread == SPREAD_MOST


def test_cores_are_borrowed_where_the_longest_steps_bear_it() -> None:
    """Steps with them take half the time, and one in twenty loses them in the middle and takes
    three times as long as usual. Short promises are better kept without, long ones with them."""
    times = SharedStepTimes()
    assert times.borrowing_pays(4, 0, 0.05), "nothing is known: it is tried"
    for number in range(200):
        times.learn(Step(4, 0, 0), 0.02, 0.0)
        lost = number % 20 == 19
        times.learn(Step(4, 0, 0), 0.03 if lost else 0.01, 0.5 if lost else 1.0)
    assert times.curve_borrowed().seconds(4) == pytest.approx(0.01)
    assert not times.borrowing_pays(4, 0, 0.025)
    assert times.borrowing_pays(4, 0, 0.04)
    times.forget_borrowed()
    assert times.borrowing_pays(4, 0, 0.025)


def test_chunks_are_shorter_where_some_steps_take_much_longer() -> None:
    """What is planned leaves room for them."""
    even = StepCurve((1, 64, 256), (5_000, 30_000, 110_000), spread_percent=110)
    rough = msgspec.structs.replace(even, spread_percent=250)
    slo, values = Slo(2.0, 0.06), {"most": 256, "unit": 16, "rows": 4, "context": 0}
    sizes = [chunk_beside(slo, curve, curve, 0, **values) for curve in (even, rough)]
    assert even.seconds(4 + sizes[0]) <= 0.85 * 0.06 / 1.1 < even.seconds(4 + sizes[0] + 16)
    assert rough.seconds(4 + sizes[1]) <= 0.85 * 0.06 / 2.5 < rough.seconds(4 + sizes[1] + 16)
    assert slo.keeps(0.045, even.spread) and not slo.keeps(0.045, rough.spread)


REHEARSED = ((Step(64, 0, 3_000), 0.026), (Step(256, 0, 50_000), 0.070), (Step(1, 300, 0), 0.022))


def test_a_rehearsal_is_believed_in_its_shape_and_not_in_its_length() -> None:
    """Real steps wait for their core: until there are some, longer by what was usual; then by what
    they show, also of those that there was none of."""
    times = SharedStepTimes()
    times.rehearsed(REHEARSED)
    for step, seconds in REHEARSED:
        assert times.curve().seconds(step.tokens) == pytest.approx(1.3 * seconds, rel=0.01)
    for _ in range(12):
        times.learn(Step(64, 0, 3_000), 2 * 0.026)
    curve = times.curve()
    assert curve.seconds(64) == pytest.approx(2 * 0.026, rel=0.05)
    assert curve.seconds(256) == pytest.approx(2 * 0.070, rel=0.1)
    assert curve.seconds(1) == pytest.approx(2 * 0.022, rel=0.1)


def test_one_real_step_alone_does_not_decide() -> None:
    """It may be one that was disturbed; and that nothing was rehearsed changes nothing."""
    times, plain = SharedStepTimes(), SharedStepTimes()
    times.rehearsed(REHEARSED)
    plain.rehearsed(())
    for each in (times, plain):
        each.learn(Step(64, 0, 3_000), 1.0)
    assert times.curve().seconds(256) < 2 * 0.070
    assert plain.curve().seconds(64) == pytest.approx(1.0)
