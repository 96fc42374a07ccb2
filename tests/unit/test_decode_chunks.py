"""How much of a prompt decode computes beside its streams, in conversations with its machine."""

from __future__ import annotations

from baton.core.slo import Slo
from baton.decode.io import RunStep, StepFinished
from baton.ports.engine import Sampled
from baton.wire.messages import RequestSpec, ReserveDecode
from support.decode_parts import Decode, P, R, spec


def _take_in(play: Decode, request: RequestSpec) -> None:
    play.do_hear(R, ReserveDecode(request, 1, None))


def _sizes(play: Decode, steps: int) -> list[int]:
    """Let steps of 10 ms and 2 ms a token run; return how much of a prompt each one has."""
    found = []
    for _ in range(steps):
        step = play.last(RunStep)
        tokens = [len(row.token_ids) for row in step.rows]
        found.append(sum(count for count in tokens if count > 1))
        play.now += 0.01 + 0.002 * sum(tokens)
        results = tuple(None if row.sample is None else Sampled(50) for row in step.rows)
        sums = tuple((7,) * len(checks) for checks in step.seals)
        play.do(StepFinished(step.step, results, sums, 0.01))
    return found


def _busy(itl_s: float | None) -> Decode:
    """Two streams run; a prompt of 400 tokens comes."""
    play = Decode(
        blocks=400, slo=None if itl_s is None else Slo(1.0, itl_s), local_prefill_chunk_tokens=64
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


def test_while_somebody_is_handed_over_steps_take_half_of_it() -> None:
    """It has its first token at once, and meets the rest of a step and one of its own: at 25 ms a
    step there is room for one block of 4 beside two streams."""
    play = _busy(itl_s=0.0625)
    play.do_hear(R, ReserveDecode(spec("x", tokens=40, first=700, max_tokens=5), 1, P))
    sizes = _sizes(play, 12)
    assert sizes[-1] == 4 and max(sizes[4:]) <= 8, sizes


def test_a_prompt_alone_makes_way_for_who_is_handed_over() -> None:
    """Nobody runs yet, and somebody will: the step that it meets is short already."""
    play = Decode(blocks=400, slo=Slo(1.0, 0.0625), local_prefill_chunk_tokens=64)
    _take_in(play, spec("r", tokens=390, first=100, max_tokens=5))
    assert _sizes(play, 2) == [64, 64]
    play.do_hear(R, ReserveDecode(spec("x", tokens=40, first=700, max_tokens=5), 1, P))
    sizes = _sizes(play, 6)
    assert max(sizes[1:]) <= 16, sizes


def test_without_an_slo_chunks_have_the_size_of_the_limit() -> None:
    """In the other modes the limit alone says how long a chunk is."""
    assert _sizes(_busy(itl_s=None), 5) == [64] * 5


def test_alone_a_prompt_is_computed_in_chunks_of_the_limit() -> None:
    """Nobody waits for the next token: the step may take longer."""
    play = Decode(blocks=400, slo=Slo(1.0, 0.001), local_prefill_chunk_tokens=64)
    _take_in(play, spec("r", tokens=400, first=100, max_tokens=5))
    assert _sizes(play, 4) == [64] * 4


def test_a_prompt_goes_on_however_tight_the_slo_is() -> None:
    """One block at a time, where even that takes too long."""
    assert _sizes(_busy(itl_s=0.0145), 5) == [4] * 5


def test_streams_that_cannot_keep_the_slo_anyway_share_their_steps() -> None:
    """Theirs take 14 ms by themselves, 5 are asked for: twice as long is as bad, and soon over."""
    sizes = _sizes(_busy(itl_s=0.005), 8)
    assert set(sizes[3:]) <= {4, 8}, sizes
