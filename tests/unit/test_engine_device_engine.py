"""The engine for devices, run on the host: what it computes is what the reference computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from baton.core.sampling import SamplingParams
from baton.engine.device_attention import NAME
from baton.engine.device_engine import DeviceEngine
from baton.engine.device_plan import Cutting
from baton.engine.info import ModelRefused, layout_of
from baton.engine.torch_engine import TorchEngine
from baton.ports.device import DeviceMissing
from baton.ports.engine import Engine
from support.engine_device import device_engine
from support.engine_models import VOCAB, tiny_info, tiny_model
from support.engine_steps import Arena, Sequel, assert_nan_costs_no_other_row, ids_of

DRAW = np.random.default_rng(6)
PROMPT = DRAW.integers(0, VOCAB, 400).astype(np.int32)
DRAWN = SamplingParams(seed=9, temperature=1.0)


def reference(family: str) -> TorchEngine:
    model = tiny_model(family)
    info = tiny_info(model)
    return TorchEngine.around(model, info, layout_of(info, "float32", 16), threads=1)


def answer(engine: Engine, chunks: list[int]) -> list[int]:
    Arena(engine, 40)
    sequel = Sequel(engine, PROMPT, ids_of(range(1, 38)), params=DRAWN)
    sequel.prefill(chunks)
    sequel.decode(40)
    return sequel.output


FAMILIES = ["llama-mha", "qwen2", "mistral-window", "gemma3", "phi", "gpt2", "granite"]


@pytest.mark.parametrize(
    ("family", "rows"),
    [*(("llama", rows) for rows in (16, 32, 128, 0)), *((family, 0) for family in FAMILIES)],
)
def test_tokens_are_those_of_the_reference_in_float32(family: str, rows: int) -> None:
    """Drawn from the whole distribution, so that logits which differ by more than rounding show."""
    wanted = answer(reference(family), [100, 256])
    assert answer(device_engine(family, rows=rows), [100, 7, 256]) == wanted


@pytest.mark.parametrize("family", ["mixtral", "gemma2"])
def test_what_a_device_would_answer_wrongly_is_refused(family: str) -> None:
    """Experts have no one shape; torch's attention has no soft cap."""
    with pytest.raises(ModelRefused, match="not supported on a device"):
        device_engine(family)


def test_a_row_with_nan_logits_is_named_and_costs_no_other_row() -> None:
    """The broken row is not retryable; the other one, stepped again, has its token."""
    assert_nan_costs_no_other_row(device_engine(), PROMPT[:20])


def test_rows_that_see_each_other_are_refused() -> None:
    """A model whose layers look at their neighbours does not serve as row invariant, and the error
    says what would: nothing is believed that was not asked."""
    model: Any = tiny_model("llama", attention=NAME)
    blend = model.model.layers[1].mlp
    honest = blend.forward
    blend.forward = lambda rows: honest(rows) + 1e-6 * rows.mean(1, keepdim=True)
    info = tiny_info(model)
    layout = layout_of(info, "float32", 16)

    def made(rows: int) -> DeviceEngine:
        return DeviceEngine.around(model, info, layout, cutting=Cutting(rows))

    with pytest.raises(DeviceMissing, match=r"K and V .* differ.*engine.invariance"):
        made(32).use_threads(1)
    made(0).use_threads(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_cuda_the_error_says_what_to_do() -> None:
    """Neither a CPU build of torch nor a missing driver ends in a trace of torch's."""
    with pytest.raises(DeviceMissing, match=r"built without CUDA|finds no CUDA device"):
        device_engine(device="cuda")


def test_the_arena_is_used_in_place() -> None:
    """The engine's view is the caller's memory: same address, no copy."""
    engine = device_engine()
    arena = Arena(engine, 3)
    view = engine._opened()._arenas["arena"].slots
    assert view.data_ptr() == np.frombuffer(arena.memory, dtype=np.uint8).ctypes.data
