"""The torch engine beyond the contract: what it says of broken rows, threads, the real model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.build import build_engine
from baton.engine.info import ModelRefused, layout_of
from baton.engine.torch_engine import TorchEngine
from support.engine_models import VOCAB, tiny_info, tiny_model
from support.engine_steps import Arena, Sequel, assert_nan_costs_no_other_row, ids_of

pytest_plugins = ["support.engine_fixtures"]

DRAW = np.random.default_rng(4)


def made(**changes: Any) -> TorchEngine:
    model = tiny_model("llama")
    info = tiny_info(model)
    layout = replace_layout(layout_of(info, "float32", 16), **changes)
    return TorchEngine.around(model, info, layout, threads=1)


def replace_layout(layout: Any, **changes: Any) -> Any:
    from msgspec.structs import replace as changed

    return changed(layout, **changes)


def test_a_row_with_nan_logits_is_named_and_costs_no_other_row() -> None:
    """The broken row is not retryable; the other one, stepped again, has its token."""
    prompt = DRAW.integers(0, VOCAB, 20).astype(np.int32)
    assert_nan_costs_no_other_row(made(), prompt)


def test_the_arena_is_used_in_place() -> None:
    """The engine's view is the caller's memory: same address, no copy."""
    engine = made()
    arena = Arena(engine, 3)
    view = engine._arenas["arena"].slots
    assert view.data_ptr() == np.frombuffer(arena.memory, dtype=np.uint8).ctypes.data


def test_a_layout_that_is_not_the_models_is_refused() -> None:
    """Another number of heads stops the first step; a block size must divide a tile."""
    engine = made(heads=4)
    Arena(engine, 3)
    with pytest.raises(ModelRefused, match="not of the one layout"):
        Sequel(engine, ids_of(range(5)), ids_of([0])).prefill()
    with pytest.raises(ValueError, match="block_size 24: allowed are divisors of 256"):
        made(block_size=24)


def test_the_head_runs_for_sampling_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk in the middle of a prompt computes no logits at all."""
    engine = made()
    Arena(engine, 6)
    lines: list[int] = []
    head = engine._model.lm_head
    head.register_forward_hook(lambda module, given, out: lines.append(out.shape[1]))
    sequel = Sequel(engine, ids_of(range(60)), ids_of([0, 1, 2, 3, 4]))
    sequel.prefill([20, 20])
    assert lines == [1]
    engine.step([sequel.decode_row()] * 9)
    assert lines == [1, 9]


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_model_is_row_invariant(model_dir: Path, dtype: str) -> None:
    """Chunks, neighbours and the number of threads change no bit of K, V or logits."""
    engine: Any = build_engine(model_dir, dtype=dtype, threads=1)
    length = 300 if dtype == "float32" else 80  # slow without bf16 instructions
    prompt = DRAW.integers(0, engine.info.vocab_size, length).astype(np.int32)
    arena = Arena(engine, 3 * 20 + 4)
    runs = []
    for run, (chunks, threads) in enumerate([((), 1), ((7, 16, 100), 1), ((64,), 2)]):
        torch.set_num_threads(threads)
        blocks = ids_of(range(run * 20, run * 20 + 20))
        sequel = Sequel(engine, prompt, blocks)
        sequel.prefill(chunks)
        rows = [sequel.decode_row()]
        if run:
            rows.insert(0, replace(rows[0], token_ids=prompt[:3], start=0, blocks=ids_of([62])))
            rows.append(replace(rows[1], blocks=blocks))
        line = engine.logits(rows)[1 if run else 0].clone()
        kv = b"".join(arena.block(int(number)) for number in blocks[: length // 16])
        runs.append((sequel.output, line, kv))
    torch.set_num_threads(1)
    for other in runs[1:]:
        assert other[0] == runs[0][0]
        assert torch.equal(other[1], runs[0][1])
        assert other[2] == runs[0][2]
