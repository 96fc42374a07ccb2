"""What the services rely on in an engine: the torch engine and the fake are held to the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton.core.sampling import SamplingParams
from baton.engine.fake import FakeEngine
from baton.engine.fake_model import fake_info
from baton.engine.info import layout_of
from baton.engine.native.binding import Level
from baton.engine.torch_engine import TorchEngine
from baton.ports.engine import Engine, StepFailed
from support.engine_compiled import LEVELS, attention_engine, step_engine
from support.engine_device import device_engine, needs_gpu
from support.engine_models import VOCAB, tiny_info, tiny_model
from support.engine_steps import GREEDY, Arena, Sequel, by_token, ids_of
from support.sampling import EVERY_RULE

BLOCK = 16
#: Longer than two attention tiles, not a multiple of anything.
LONG = 571
SAMPLED = SamplingParams(seed=5, temperature=0.8, top_p=0.9, repetition_penalty=1.3, logprobs=3)

Make = Callable[..., Engine]


def make_torch(family: str = "llama", dtype: str = "float32") -> Engine:
    model = tiny_model(family).to(getattr(torch, dtype))
    info = tiny_info(model)
    return TorchEngine.around(model, info, layout_of(info, dtype, BLOCK), threads=1)


def make_fake() -> Engine:
    info = fake_info()
    return FakeEngine(info, layout_of(info, "float32", BLOCK))


ENGINES: dict[str, Make] = {
    "fake": make_fake,
    "float32": make_torch,
    "bfloat16": lambda: make_torch(dtype="bfloat16"),
    "window": lambda: make_torch("gemma3"),
    "softcap": lambda: make_torch("gemma2", "bfloat16"),
    "experts": lambda: make_torch("mixtral"),
    "step": lambda: step_engine("llama", "float32"),
    "step bfloat16": lambda: step_engine("qwen3", "bfloat16"),
    "step window": lambda: step_engine("mistral-window", "float32", threads=2),
    "step avx2": lambda: step_engine("llama", "float32", level=other_level()),
    "attention": lambda: attention_engine("gemma3", "float32", threads=2),
    "attention softcap": lambda: attention_engine("gemma2", "bfloat16"),
    "device": device_engine,
    "device bfloat16": lambda: device_engine("qwen3", "bfloat16"),
    "device window": lambda: device_engine("gemma3", rows=64),
    "cuda": lambda: device_engine(device="cuda", rows=128),
    "cuda bfloat16": lambda: device_engine("qwen3", "bfloat16", device="cuda", rows=128),
    "cuda window": lambda: device_engine("gemma3", device="cuda", rows=128),
}
ON_GPU = [needs_gpu, pytest.mark.gpu]


def other_level() -> Level:
    """A level below the best, as another machine may have it."""
    return LEVELS[min(len(LEVELS) - 1, [*(at.name for at in LEVELS), "avx2"].index("avx2"))]


@pytest.fixture(
    params=[
        pytest.param(name, marks=ON_GPU) if name.startswith("cuda") else name for name in ENGINES
    ]
)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]()


@pytest.fixture
def prompt(engine: Engine) -> Any:
    return np.random.default_rng(3).integers(0, min(VOCAB, 256), LONG).astype(np.int32)


def table(count: int, seed: int = 2) -> Any:
    """Return block numbers 1 .. ``count`` out of order: blocks 0 and ``count + 1`` are guards."""
    return (np.random.default_rng(seed).permutation(count) + 1).astype(np.int32)


def kv_of(engine: Engine, arena: Arena, sequel: Sequel, positions: int) -> Any:
    """Return the bytes of a sequence's first positions, as uint8 [positions, ...]."""
    lines = by_token(arena.memory, engine.layout)[sequel.blocks]
    return lines.reshape(-1, lines.shape[-1])[:positions]


def alone(
    engine: Engine, prompt: Any, steps: int = 6, params: SamplingParams = SAMPLED
) -> tuple[Sequel, Arena]:
    """Run one request undisturbed, its prompt in one chunk."""
    count = -(-(len(prompt) + steps) // BLOCK)
    arena = Arena(engine, count + 2, name="alone")
    sequel = Sequel(engine, prompt, table(count), arena="alone", params=params)
    sequel.prefill()
    sequel.decode(steps)
    return sequel, arena


def test_a_step_writes_into_its_rows_blocks_and_positions_only(engine: Engine, prompt: Any) -> None:
    """Every byte outside the positions that were fed is as it was, guard blocks included."""
    count = -(-LONG // BLOCK)
    arena = Arena(engine, count + 2, fill=0xA5)
    sequel = Sequel(engine, prompt, table(count))
    sequel.prefill([100, 7, 256])
    guard = b"\xa5" * engine.layout.block_bytes
    assert arena.block(0) == guard
    assert arena.block(count + 1) == guard
    beyond = kv_of(engine, arena, sequel, count * BLOCK)[LONG:]
    assert beyond.size
    assert (beyond == 0xA5).all()


def test_what_lies_in_unwritten_places_never_matters(engine: Engine, prompt: Any) -> None:
    """NaN left in recycled blocks by somebody else does not leak into a result."""
    wanted, _ = alone(engine, prompt)
    count = -(-(LONG + 6) // BLOCK)
    Arena(engine, count + 2, fill=0xFF)  # NaN in both dtypes
    sequel = Sequel(engine, prompt, table(count), params=SAMPLED)
    sequel.prefill()
    sequel.decode(6)
    assert sequel.output == wanted.output


@pytest.mark.parametrize("chunks", [[7] * 82, [16] * 36, [100] * 6, [256, 256], [570]])
def test_chunking_does_not_change_a_bit(engine: Engine, prompt: Any, chunks: list[int]) -> None:
    """K, V and tokens are the same for any cut of the prompt."""
    wanted, first = alone(engine, prompt)
    arena = Arena(engine, 60)
    sequel = Sequel(engine, prompt, table(40, seed=9), params=SAMPLED)
    sequel.prefill(chunks)
    sequel.decode(6)
    fed = LONG + 5
    found = kv_of(engine, arena, sequel, fed)
    assert np.array_equal(found, kv_of(engine, first, wanted, fed))
    assert sequel.output == wanted.output


def test_neighbours_do_not_change_a_bit(engine: Engine, prompt: Any) -> None:
    """Packed with other prompts and decoding rows, a row's K, V and logprobs stay the same."""
    wanted, first = alone(engine, prompt)
    arena = Arena(engine, 400)
    sequel = Sequel(engine, prompt, table(40), params=SAMPLED)
    others = [
        Sequel(engine, prompt[i * 9 : i * 70 + 20], ids_of(range(50 + 40 * i, 90 + 40 * i)))
        for i in range(6)
    ]
    for other in others[:5]:
        other.prefill()
    late = others[5]
    for start in range(0, LONG, 200):
        end = min(start + 200, LONG)
        rows = [other.decode_row() for other in others[:5]]
        rows.insert(2, sequel.prompt_row(start, end))
        rows.append(late.prompt_row(start // 10, start // 10 + 20))
        results = engine.step(rows)
        for other, result in zip(others[:5], results[:2] + results[3:6], strict=True):
            other.take(result)
    sequel.take(results[2])
    while len(sequel.output) < 6:
        rows = [*(other.decode_row() for other in others[:5]), sequel.decode_row()]
        results = engine.step(rows)
        for one, result in zip([*others[:5], sequel], results, strict=True):
            one.take(result)
    fed = LONG + 5
    assert sequel.output == wanted.output
    found = kv_of(engine, arena, sequel, fed)
    assert np.array_equal(found, kv_of(engine, first, wanted, fed))


def test_a_cached_prefix_is_read_in_place(engine: Engine, prompt: Any) -> None:
    """A second request that begins after 320 shared tokens gets the same K, V and tokens."""
    wanted, arena = alone(engine, prompt)
    shared = 320 // BLOCK
    count = len(wanted.blocks)
    bigger = Arena(engine, 2 * count + 2, name="both")
    bigger.memory[: len(arena.memory)] = arena.memory
    own = ids_of(range(count + 2, 2 * count + 2 - shared))
    blocks = np.concatenate((wanted.blocks[:shared], own))
    sequel = Sequel(engine, prompt, blocks, arena="both", params=SAMPLED)
    before = [bigger.block(int(number)) for number in blocks[:shared]]
    sequel.prefill([90], start=320)
    sequel.decode(6)
    assert sequel.output == wanted.output
    assert [bigger.block(int(number)) for number in blocks[:shared]] == before


def test_forced_ids_continue_a_request_exactly(engine: Engine, prompt: Any) -> None:
    """Prompt plus the first three ids, computed anew, are followed by the very same others."""
    wanted, _ = alone(engine, prompt)
    Arena(engine, 60)
    again = Sequel(engine, prompt, table(40), params=SAMPLED, output=wanted.output[:3])
    fed = np.concatenate((prompt, ids_of(wanted.output[:3])))
    row = replace(again.decode_row(), token_ids=fed, start=0)
    again.take(engine.step([row])[0])
    again.decode(6)
    assert again.output == wanted.output


@pytest.mark.parametrize("held", [1, 4, 9])
def test_every_rule_of_the_client_goes_on_with_its_request(
    engine: Engine, prompt: Any, held: int
) -> None:
    """(36) Penalties, bias, masks, the least length and the draw depend on the ids before alone:
    a request that goes on below or beyond its least length goes on as if nothing had been."""
    prompt = prompt[:70]
    wanted, _ = alone(engine, prompt, 12, EVERY_RULE)
    Arena(engine, 12)
    again = Sequel(engine, prompt, table(6), params=EVERY_RULE, output=wanted.output[:held])
    fed = np.concatenate((prompt, ids_of(wanted.output[:held])))
    again.take(engine.step([replace(again.decode_row(), token_ids=fed, start=0)])[0])
    again.decode(12)
    assert again.output == wanted.output


@pytest.mark.parametrize(
    "name", [each for each in SamplingParams.__struct_fields__ if each != "logprobs"]
)
def test_every_rule_matters_in_that_answer(name: str) -> None:
    """What goes on unchanged without a rule would prove nothing about it."""
    engine = make_fake()
    prompt = np.random.default_rng(3).integers(0, 256, 70).astype(np.int32)
    plain = SamplingParams(seed=0)
    without = msgspec.structs.replace(EVERY_RULE, **{name: getattr(plain, name)})
    wanted, _ = alone(engine, prompt, 40, EVERY_RULE)
    assert alone(engine, prompt, 40, without)[0].output != wanted.output


def test_a_step_repeated_in_place_has_the_same_result(engine: Engine, prompt: Any) -> None:
    """Redoing the step in flight after a crash neither changes memory nor the token."""
    wanted, arena = alone(engine, prompt)
    before = bytes(arena.memory)
    again = replace(wanted, output=wanted.output[:-1])
    again.take(engine.step([again.decode_row()])[0])
    assert again.output == wanted.output
    assert bytes(arena.memory) == before


def test_rows_of_several_arenas_share_a_step(engine: Engine, prompt: Any) -> None:
    """Tickets of two decode workers are filled in one packed step."""
    wanted, _ = alone(engine, prompt[:40])
    pair = []
    for name in ("left", "right"):
        Arena(engine, 10, name=name)
        pair.append(Sequel(engine, prompt[:40], table(4), arena=name, params=SAMPLED))
    for sequel, result in zip(pair, engine.step([s.prompt_row(0, 40) for s in pair]), strict=True):
        sequel.take(result)
    while len(pair[0].output) < 6:
        for sequel, result in zip(pair, engine.step([s.decode_row() for s in pair]), strict=True):
            sequel.take(result)
    assert [sequel.output for sequel in pair] == [wanted.output] * 2


def test_wrong_kv_never_yields_the_right_token_unnoticed(engine: Engine, prompt: Any) -> None:
    """One block of somebody else's K and V makes the step fail, or its logits differ."""
    wanted, arena = alone(engine, prompt)
    again = replace(wanted, output=wanted.output[:-1])
    right = engine.step([again.decode_row()])[0]
    size = engine.layout.block_bytes
    victim, thief = int(wanted.blocks[34]), int(wanted.blocks[9])
    arena.memory[victim * size : (victim + 1) * size] = arena.block(thief)
    if isinstance(engine, FakeEngine):
        with pytest.raises(StepFailed, match="wrong KV at position 544") as caught:
            engine.step([again.decode_row()])
        assert caught.value.request_ids == ("request",)
        assert caught.value.retryable
    else:
        assert engine.step([again.decode_row()])[0] != right


def test_all_is_stored_before_the_first_token_is_chosen(engine: Engine, prompt: Any) -> None:
    """Whoever is told then sees the bytes that the step leaves, and is told once."""
    arena = Arena(engine, 12)
    one = Sequel(engine, prompt[:50], ids_of([3, 1, 4, 2]))
    two = Sequel(engine, prompt[50:], ids_of([9, 5, 7, 6]))
    seen: list[bytes] = []
    rows = [one.prompt_row(0, 50), two.prompt_row(0, 40)]
    results = engine.step(rows, lambda: seen.append(bytes(arena.memory)))
    assert seen == [bytes(arena.memory)]
    assert results[0] is not None and results[1] is None
    engine.step([two.prompt_row(40, 60)], lambda: seen.append(bytes(arena.memory)))
    assert seen[1:] == [bytes(arena.memory)] != seen[:1]


def test_a_token_that_cannot_be_chosen_leaves_the_others_theirs(
    engine: Engine, prompt: Any
) -> None:
    """All is stored and told by then, so the others are not stepped again: they have results."""
    Arena(engine, 12)
    none = msgspec.structs.replace(GREEDY, allowed_token_ids=(5,), bad_words_ids=((5,),))
    stuck = Sequel(engine, prompt[:20], ids_of([1, 2]), params=none, request_id="stuck")
    good = Sequel(engine, prompt[:20], ids_of([3, 4]), request_id="good")
    told: list[bool] = []
    rows = [stuck.prompt_row(0, 20), good.prompt_row(0, 20)]
    with pytest.raises(StepFailed, match="masks leave no token") as caught:
        engine.step(rows, lambda: told.append(True))
    assert told == [True] and caught.value.request_ids == ("stuck",)
    assert caught.value.results == [None, engine.step([good.prompt_row(0, 20)])[0]]


def test_detach_lets_the_memory_go(engine: Engine, prompt: Any) -> None:
    """After detach no view is left, so the owner may unmap (a bytearray may be resized)."""
    arena = Arena(engine, 4)
    Sequel(engine, prompt[:20], table(2)).prefill()
    engine.detach("arena")
    arena.memory.extend(b"x")


def test_warm_up_leaves_nothing_behind(engine: Engine) -> None:
    """Warming up needs no arena and attaches none."""
    engine.warm_up()
    assert engine.info.vocab_size > 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_may_be_chosen_after_the_first_steps(
    engine: Engine, prompt: Any, threads: int
) -> None:
    """A guard makes and warms the engine up; its worker then computes with its own threads."""
    engine.warm_up()
    wanted, _ = alone(engine, prompt[:70])
    engine.use_threads(threads)
    found, _ = alone(engine, prompt[:70])
    assert found.output == wanted.output


def test_a_wide_batch_gives_every_row_the_same_answer(engine: Engine, prompt: Any) -> None:
    """Twelve rows of three tiles each, attended to in several groups, agree with a single one."""
    wanted, _ = alone(engine, prompt)
    again = replace(wanted, output=wanted.output[:-1])
    single = engine.step([again.decode_row()])
    assert engine.step([again.decode_row()] * 12) == single * 12
