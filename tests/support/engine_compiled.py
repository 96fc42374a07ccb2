"""Compiled kernels for tests: the library of a level, and engines around tiny models."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from baton.engine.compiled_attention import CompiledAttention
from baton.engine.info import cpu_flags, layout_of
from baton.engine.llama_engine import LlamaEngine
from baton.engine.native import binding
from baton.engine.native.abi import Library
from baton.engine.pack import describe, tensors_of
from baton.engine.packed import write_packed
from baton.engine.torch_engine import TorchEngine
from support.engine_models import tiny_info, tiny_model

BLOCK = 16
CONTEXT = 1024
#: Levels that this CPU runs and the operating system's kernel lets run, best first.
LEVELS = [level for level in binding.levels_of(cpu_flags()) if binding.kernel_grants(level)]


@cache
def library_of(level: binding.Level = LEVELS[0]) -> Library:
    """Return the compiled library; the cache that a user's would be in keeps it."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    where = Path(os.environ.get("BATON_MODEL_CACHE_DIR") or home / "baton")
    try:
        return Library(binding.build_library(where, level))
    except binding.BuildFailed as error:
        pytest.fail(f"the kernels are not compiled: {error}")


def step_engine(
    family: str, dtype: str, *, threads: int = 1, level: binding.Level = LEVELS[0]
) -> LlamaEngine:
    """Return the compiled step of a tiny model."""
    model: Any = tiny_model(family).to(_dtype(dtype))
    # Positions are looked up in a table here; the tests' prompts are longer than the context.
    info = replace(tiny_info(model), context_max=CONTEXT)
    spec = describe(model, info, dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "packed.bin"
        write_packed(path, spec, dict(tensors_of(model, spec)))
        layout = layout_of(info, dtype, BLOCK, "lanes")
        return LlamaEngine(library_of(level), path, info, layout, kernels="test", threads=threads)


def attention_engine(
    family: str, dtype: str, *, threads: int = 1, level: binding.Level = LEVELS[0]
) -> TorchEngine:
    """Return a tiny model's modules with the compiled attention."""
    model: Any = tiny_model(family).to(_dtype(dtype))
    info = tiny_info(model)
    layout = layout_of(info, dtype, BLOCK, "lanes")
    attention = CompiledAttention(library_of(level), layout, kernels="test", threads=threads)
    return TorchEngine.around(model, info, layout, threads=threads, attention=attention)


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)
