"""The compute engine on transformers modules: one forward a step over the packed rows.

Decides how a step runs: plan, one forward with the paged attention, the language-model head on the
rows that sample, then the sampler. Knows nothing of requests' life cycles, tickets or messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from baton.core.pages import Pages
from baton.core.step_times import Rehearsed
from baton.engine.attention import ArenaView, AttentionStep, attending
from baton.engine.compiled_attention import CompiledAttention
from baton.engine.info import KERNELS
from baton.engine.load import load_model
from baton.engine.plan import TILE, plan_step
from baton.engine.rehearsal import rehearse
from baton.engine.sampler import sample_rows
from baton.ports.engine import KVLayout, ModelInfo, Row, Sampled, SharedCores, nothing


class _Told:
    """Calls ``stored`` once: as soon as a model has what goes into its head, if that is finite."""

    def __init__(self, stored: Callable[[], None]) -> None:
        self._stored = stored
        self._asked = False
        self.done = False

    @contextmanager
    def before_head_of(self, model: Any) -> Iterator[None]:
        """While ``model`` computes; at the end, if it has no such moment."""
        head = model.get_output_embeddings()
        hook = None if head is None else head.register_forward_pre_hook(self._tell)
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()
        self._tell(None, ())

    def _tell(self, _: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if not self._asked:
            self._asked = True
            self.done = all(bool(torch.isfinite(part).all()) for part in inputs)
            if self.done:
                self._stored()


class TorchEngine:
    """See :class:`baton.ports.engine.Engine` for the contract."""

    weight_pages: Pages | None = None

    def __init__(
        self,
        model_dir: Path,
        info: ModelInfo,
        layout: KVLayout,
        *,
        threads: int = 0,
        attention: CompiledAttention | None = None,
    ) -> None:
        """Load a prepared model.

        Args:
            model_dir: the prepared folder.
            info: what it says of itself.
            layout: of the arenas.
            threads: 0 takes the cores this process may run on.
            attention: compiled, instead of the reference's.
        """
        self._prepare(layout, threads, attention)
        self.info = info
        self._model = load_model(model_dir, layout.dtype)

    @classmethod
    def around(
        cls,
        model: Any,
        info: ModelInfo,
        layout: KVLayout,
        *,
        threads: int,
        attention: CompiledAttention | None = None,
    ) -> TorchEngine:
        """Return an engine around modules that are loaded already (preparation's proof)."""
        engine = cls.__new__(cls)
        engine._prepare(layout, threads, attention)
        engine.info = info
        engine._model = model
        return engine

    def _prepare(self, layout: KVLayout, threads: int, attention: CompiledAttention | None) -> None:
        if TILE % layout.block_size:
            raise ValueError(f"block_size {layout.block_size}: allowed are divisors of {TILE}")
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
        self.layout = layout
        self.kernels = KERNELS["torch"] if attention is None else attention.kernels
        self._attention = attention
        self._arenas: dict[str, ArenaView] = {}
        self.borrows, self.borrowed = True, 0.0
        self.last_calls: dict[int, int] = {}

    def use_threads(self, threads: int, cores: SharedCores | None = None) -> None:
        """See the contract; it cannot borrow."""
        torch.set_num_threads(threads)
        if self._attention is not None:
            self._attention.use_threads(threads)

    def claim(self) -> None:
        """Its cores are not lent."""

    def attach(self, arena: str, blocks: memoryview) -> None:
        """Make ``blocks`` usable as ``arena``, without a copy."""
        if self._attention is not None:
            self._attention.arenas.attach(arena, blocks)
        else:
            self._arenas[arena] = ArenaView(blocks, self.layout)

    def detach(self, arena: str) -> None:
        """Drop every view of ``arena``."""
        if self._attention is not None:
            self._attention.arenas.detach(arena)
        self._arenas.pop(arena, None)

    def step(
        self, rows: Sequence[Row], stored: Callable[[], None] = nothing
    ) -> list[Sampled | None]:
        """Compute one packed batch; see the contract."""
        told = _Told(stored)
        logits = self._compute(rows, told).numpy()
        return sample_rows(rows, logits, stored=told.done)

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute one packed batch without sampling; float32 [rows that sample, vocab]."""
        return self._compute(rows, _Told(nothing))

    @torch.inference_mode()
    def _compute(self, rows: Sequence[Row], told: _Told) -> torch.Tensor:
        """Compute one packed batch without sampling.

        Returns:
            float32 [rows that sample, vocab], in the order of the rows.
        """
        plan = plan_step(rows, self.layout, tiled=self._attention is None)
        compiled = None if self._attention is None else self._attention.step(rows)
        step = AttentionStep(plan, self._arenas, self.layout, compiled)
        inputs = {"input_ids": plan.input_ids, "position_ids": plan.positions, "use_cache": False}
        with attending(step), told.before_head_of(self._model):
            if plan.last:
                keep = torch.tensor(plan.last)
                out: torch.Tensor = self._model(**inputs, logits_to_keep=keep).logits
                found = out[0].float()
            else:
                self._model.base_model(**inputs)
                found = torch.empty(0, self.info.vocab_size)
        self.last_calls = dict(step.calls)
        return found

    def warm_up(self) -> Rehearsed:
        """Run one prompt chunk and one decode step in memory of its own."""
        return rehearse(self)
