"""How much of a prompt decode computes beside its streams, in conversations with its machine."""

from __future__ import annotations

import pytest

from baton.core.slo import Slo
from baton.decode.io import RunStep, StepFinished
from baton.ports.engine import Sampled
from baton.wire.messages import RequestSpec, ReserveDecode
from support.decode_parts import Decode, P, R, spec


def _take_in(play: Decode, request: RequestSpec) -> None:
    play.do_hear(R, ReserveDecode(request, 1, None))


def _sizes(play: Decode, steps: int, *, borrowed: bool = False) -> list[int]:
    """Let steps of 10 ms and 2 ms a token run, with ``borrowed`` cores of half of that; return how
    much of a prompt each one has."""
    found = []
    for _ in range(steps):
        step = play.last(RunStep)
        tokens = [len(row.token_ids) for row in step.rows]
        found.append(sum(count for count in tokens if count > 1))
        play.now += (0.01 + 0.002 * sum(tokens)) / (1 + borrowed)
        results = tuple(None if row.sample is None else Sampled(50) for row in step.rows)
        sums = tuple((7,) * len(checks) for checks in step.seals)
        play.do(StepFinished(step.step, results, sums, 0.01, float(borrowed)))
    return found


def _busy(itl_s: float | None) -> Decode:
    """Two streams run; a prompt of 400 tokens comes."""
    play = Decode(
        blocks=400,
        slo=None if itl_s is None else Slo(1.0, itl_s),
        local_prefill_chunk_tokens=64,
        prefill_chunk_tokens=64,
    )
    for name in ("a", "b"):
        _take_in(play, spec(name, tokens=2, max_tokens=300))
    _sizes(play, 4)
    _take_in(play, spec("r", tokens=400, first=100, max_tokens=5))
    _sizes(play, 1)  # it ran without the prompt
    return play


def test_beside_streams_a_chunk_is_as_long_as_their_slo_allows() -> None:
    """Steps of 142 ms would be too long: at 2 ms a token chunks settle near 18 of 64 tokens."""
    sizes = _sizes(_busy(itl_s=0.0625), 12)
    assert max(sizes) <= 20 and sizes[-1] >= 12, sizes


def test_with_borrowed_cores_a_chunk_is_one_that_can_be_borne_without_them() -> None:
    """They may be wanted back in the middle of it: at 2 ms a token 24 fit into the SLO itself, at
    half of that more would fit into what is planned."""
    play = _busy(itl_s=0.0625)
    alone = _sizes(play, 6)
    helped = _sizes(play, 14, borrowed=True)
    assert max(alone) <= 20 and set(helped[6:]) == {24}, (alone, helped)


def test_streams_that_borrowed_cores_hold_up_do_without_them_for_a_while() -> None:
    """One step in ten has them taken away, and then takes longer than the SLO. It is tried again
    after a minute. Prompts alone borrow all the time, and so does who has promised nothing."""

    def share(*, for_s: float, rough: bool) -> float:
        """Return how many of the steps might borrow."""
        until, asked = play.now + for_s, []
        while play.now < until:
            step = play.last(RunStep)
            asked.append(step.borrows)
            lost = rough and step.borrows and step.step % 10 == 0
            play.now += 0.6 if lost else 0.1 if step.borrows else 0.2
            results = tuple(None if row.sample is None else Sampled(50) for row in step.rows)
            sums = tuple((7,) * len(checks) for checks in step.seals)
            borrowed = 0.5 if lost else float(step.borrows)
            play.do(StepFinished(step.step, results, sums, 0.01, borrowed))
        return sum(asked) / len(asked)

    for itl_s in (0.5, 0.9, None):
        slo = None if itl_s is None else Slo(1.0, itl_s)
        play = Decode(blocks=3_000, slo=slo)
        _take_in(play, spec("a", tokens=2, max_tokens=9_000))
        first = share(for_s=20.0, rough=True)
        later = share(for_s=40.0, rough=True)
        if itl_s != 0.5:
            assert first == later == 1.0
            continue
        assert 0.05 < first < 0.9 and later == 0.0
        again = share(for_s=25.0, rough=False)
        assert again > 0.2 and share(for_s=10.0, rough=False) == 1.0
    play = Decode(blocks=400, slo=Slo(1.0, 0.001), local_prefill_chunk_tokens=64)
    _take_in(play, spec("r", tokens=390, max_tokens=5))
    assert play.last(RunStep).borrows


def test_who_is_handed_over_meets_the_steps_of_everybody() -> None:
    """Its first token comes with those of a step: no step need be shorter for its sake."""
    play = _busy(itl_s=0.0625)
    play.do_hear(R, ReserveDecode(spec("x", tokens=40, first=700, max_tokens=5), 1, P))
    sizes = _sizes(play, 12)
    assert max(sizes) <= 20 and sizes[-1] >= 12, sizes


def test_a_prompt_alone_makes_way_for_who_is_handed_over() -> None:
    """Nobody runs yet, and somebody will: the step that it meets is short already."""
    play = Decode(
        blocks=400, slo=Slo(1.0, 0.0625), local_prefill_chunk_tokens=64, prefill_chunk_tokens=64
    )
    _take_in(play, spec("r", tokens=390, first=100, max_tokens=5))
    assert _sizes(play, 2) == [64, 64]
    play.do_hear(R, ReserveDecode(spec("x", tokens=40, first=700, max_tokens=5), 1, P))
    sizes = _sizes(play, 6)
    assert max(sizes[1:]) <= 24, sizes


def test_without_an_slo_chunks_have_the_size_of_the_limit() -> None:
    """In the other modes the limit alone says how long a chunk is."""
    assert _sizes(_busy(itl_s=None), 5) == [64] * 5


def test_alone_a_prompt_is_computed_in_chunks_as_long_as_those_of_prefill() -> None:
    """Nobody waits for the next token: the step may take longer. Without an SLO, nobody would
    shorten it when somebody comes."""
    for slo, size in ((Slo(1.0, 0.001), 96), (None, 64)):
        play = Decode(blocks=400, slo=slo, local_prefill_chunk_tokens=64, prefill_chunk_tokens=96)
        _take_in(play, spec("r", tokens=400, first=100, max_tokens=5))
        assert _sizes(play, 4) == [size] * 4


def test_a_prompt_waits_for_streams_that_even_one_block_would_disturb() -> None:
    """Their steps take 14 ms, 22 with a block, 17 are asked for. For half of the time that its
    first token has it waits; then it goes on, one block at a time, and waits no more. Before a
    step has shown how long it takes it does not wait."""
    play = _busy(itl_s=0.017)
    began, sizes = play.now, []
    while play.now < began + 0.8:
        sizes += _sizes(play, 1)
    known = sizes.index(0)
    paused = sizes.index(4, known)
    assert known <= 2 and (paused - known) * 0.014 == pytest.approx(0.5, rel=0.1)
    assert set(sizes[paused:]) == {4}


def test_prompts_wait_together() -> None:
    """The second one's time is over with the first one's."""
    play = _busy(itl_s=0.017)
    _take_in(play, spec("s", tokens=8, first=900, max_tokens=5))
    began = play.now
    while play.machine.state.sequences["s"].computed < 8:
        _sizes(play, 1)
    assert play.now - began < 0.5 + 0.023 * 102 + 0.1


def test_what_is_computed_again_of_a_stream_waits_for_nobody() -> None:
    """It is in the middle of its answer as the others are."""
    play = _busy(itl_s=0.017)
    assert set(_sizes(play, 6)[2:]) == {0}
    play.machine.state.sequences["r"].output.append(5)
    assert set(_sizes(play, 4)[1:]) == {4}


def test_streams_that_cannot_keep_the_slo_anyway_share_their_steps() -> None:
    """Theirs take 14 ms by themselves, 5 are asked for: twice as long is as bad, and soon over."""
    sizes = _sizes(_busy(itl_s=0.005), 8)
    assert set(sizes[3:]) <= {4, 8}, sizes
