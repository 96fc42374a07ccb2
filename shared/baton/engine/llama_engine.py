"""The compute engine whose whole step is one compiled call, for Llama-like models; without torch.

Decides how rows become the arrays that ``native/llama.h`` reads. Knows nothing of requests' life
cycles, tickets or messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from ctypes import c_int32
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.core.pages import Pages
from baton.core.step_times import Rehearsed
from baton.engine.native import abi
from baton.engine.native.arenas import Arenas
from baton.engine.packed import PackedWeights
from baton.engine.rehearsal import rehearse
from baton.engine.sampler import sample_rows
from baton.ports.engine import (
    CORE_LINE_BYTES,
    KVLayout,
    ModelInfo,
    Row,
    Sampled,
    SharedCores,
    nothing,
)

#: Fields of the packed file's header that the kernels' shape has under the same name.
_SHAPE = (
    *("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context", "rotary"),
    *("norm_eps", "scale"),
)


class LlamaEngine:
    """See :class:`baton.ports.engine.Engine` for the contract."""

    def __init__(
        self,
        library: abi.Library,
        packed: Path,
        info: ModelInfo,
        layout: KVLayout,
        *,
        kernels: str,
        threads: int = 0,
    ) -> None:
        """Map the packed weights; ``threads`` 0 takes the cores this process may run on."""
        self.info = info
        self.layout = layout
        self.kernels = kernels
        self._library = library
        self._weights = PackedWeights(packed)
        self.weight_pages: Pages | None = self._weights.pages()
        self._cores: SharedCores | None = None
        self.borrows, self.borrowed = True, 0.0
        self._handle = self._make(threads or len(os.sched_getaffinity(0)))
        self._arenas = Arenas(layout)
        self._logits: NDArray[np.float32] = np.empty((0, info.vocab_size), np.float32)

    def __del__(self) -> None:
        """Stop the threads."""
        self._library.llama_free(self._handle)

    def use_threads(self, threads: int, cores: SharedCores | None = None) -> None:
        """See the contract."""
        self._library.llama_free(self._handle)
        # The threads look at its lines as long as they live.
        self._cores = cores
        self._handle = self._make(threads)

    def _make(self, threads: int) -> int:
        spec = _llama(self._weights, self.layout, threads)
        if self._cores is not None:
            spec.cores = _cores(self._cores)
        return self._library.llama_new(spec)

    def claim(self) -> None:
        """See the contract."""
        if self._cores is not None:
            self._library.llama_claim(self._handle)

    def attach(self, arena: str, blocks: memoryview) -> None:
        """Make ``blocks`` usable as ``arena``, without a copy."""
        self._arenas.attach(arena, blocks)

    def detach(self, arena: str) -> None:
        """Drop every view of ``arena``."""
        self._arenas.detach(arena)

    def step(
        self, rows: Sequence[Row], stored: Callable[[], None] = nothing
    ) -> list[Sampled | None]:
        """Compute one packed batch; see the contract."""
        self._library.llama_begin(self._handle, borrows=self.borrows)
        try:
            logits, told = self._compute(rows, stored)
            return sample_rows(rows, logits, stored=told)
        finally:
            self.borrowed = self._library.llama_end(self._handle)

    def logits(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Compute one packed batch without sampling; float32 [rows that sample, vocab]."""
        return self._compute(rows, nothing)[0].copy()

    def _compute(
        self, rows: Sequence[Row], stored: Callable[[], None]
    ) -> tuple[NDArray[np.float32], bool]:
        """Return the logits, in memory that the next step overwrites, and whether ``stored`` was
        called: not if what the step computed cannot be right."""
        step = self._arenas.lines(rows)
        ids = np.concatenate([row.token_ids for row in rows], dtype=np.int32)
        if len(self._logits) < len(step.last):
            self._logits = np.empty((len(step.last), self.info.vocab_size), np.float32)
        found = self._logits[: len(step.last)]
        keep = np.array(step.last, np.int32)
        sound = self._library.llama_step(self._handle, step.rows, ids, keep)
        if sound:
            stored()
        if len(found):
            self._library.llama_head(self._handle, found)
        return found, sound

    def warm_up(self) -> Rehearsed:
        """Run one prompt chunk and one decode step in memory of its own."""
        return rehearse(self)


def _cores(cores: SharedCores) -> abi.Cores:
    """Return the struct that describes ``cores``."""
    lines = np.frombuffer(cores.lines, np.uint8)
    assert (max((*cores.own, *cores.borrows), default=-1) + 1) * CORE_LINE_BYTES <= len(lines)
    own, loans = ((c_int32 * len(each))(*each) for each in (cores.own, cores.borrows))
    return abi.Cores(abi.address(lines), own, loans, len(own), len(loans))


def _llama(weights: PackedWeights, layout: KVLayout, threads: int) -> abi.Llama:
    """Return the struct that describes the model; its pointers lead into ``weights``."""
    spec = weights.spec
    shape = abi.LlamaShape(
        layers=len(spec.layers),
        block_size=layout.block_size,
        **{name: getattr(spec, name) for name in _SHAPE},
    )
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    sizes = {
        "qkv": (q + 2 * kv, spec.hidden),
        "out": (spec.hidden, q),
        "gate_up": (2 * spec.intermediate, spec.hidden),
        "down": (spec.hidden, spec.intermediate),
        "head": (spec.vocab, spec.hidden),
    }

    def matrix(name: str) -> abi.Weights:
        n, k = sizes[name.rpartition(".")[2]]
        kind = abi.WEIGHT_KINDS[spec.head if name == "head" else spec.weights]
        bias = f"{name}_bias"
        found = weights.place(bias) if weights.has(bias) else None
        return abi.Weights(weights.place(name), found, n, k, kind)

    def maybe(name: str) -> Any:
        return weights.place(name) if weights.has(name) else None

    layers = (abi.LlamaLayer * len(spec.layers))()
    for number, given in enumerate(spec.layers):
        layer = layers[number]
        for name in ("qkv", "out", "gate_up", "down"):
            setattr(layer, name, matrix(f"{number}.{name}"))
        for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm"):
            setattr(layer, name, maybe(f"{number}.{name}"))
        layer.window, layer.rotate = given.window, given.rotate
    return abi.Llama(
        shape=shape,
        dtype=abi.DTYPES[spec.dtype],
        threads=threads,
        embedding=weights.place("embedding"),
        rotary=weights.place("rotary"),
        final_norm=weights.place("final_norm"),
        head=matrix("head"),
        layers=layers,
    )
