"""The compute engine on transformers modules: one forward a step over the packed rows.

Decides how a step runs: plan, one forward with the paged attention, the language-model head on the
rows that sample, then the sampler. Knows nothing of requests' life cycles, tickets or messages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.core.sampling import SamplingParams
from baton.engine.attention import ArenaView, AttentionStep, attending
from baton.engine.info import KERNELS
from baton.engine.load import load_model
from baton.engine.plan import TILE, padded, plan_step
from baton.engine.sampler import SamplingFailed, sample
from baton.ports.engine import KVLayout, ModelInfo, Row, Sampled, SampleSpec, StepFailed


class TorchEngine:
    """See :class:`baton.ports.engine.Engine` for the contract."""

    kernels = KERNELS["torch"]

    def __init__(
        self, model_dir: Path, info: ModelInfo, layout: KVLayout, *, threads: int = 0
    ) -> None:
        """Load a prepared model; ``threads`` 0 takes the cores this process may run on."""
        self._prepare(layout, threads)
        self.info = info
        self._model = load_model(model_dir, layout.dtype)

    @classmethod
    def around(cls, model: Any, info: ModelInfo, layout: KVLayout, *, threads: int) -> TorchEngine:
        """Return an engine around modules that are loaded already (preparation's proof)."""
        engine = cls.__new__(cls)
        engine._prepare(layout, threads)
        engine.info = info
        engine._model = model
        return engine

    def _prepare(self, layout: KVLayout, threads: int) -> None:
        if TILE % layout.block_size:
            raise ValueError(f"block_size {layout.block_size}: allowed are divisors of {TILE}")
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
        self.layout = layout
        self._arenas: dict[str, ArenaView] = {}
        self.last_calls: dict[int, int] = {}

    def attach(self, arena: str, blocks: memoryview) -> None:
        """Make ``blocks`` usable as ``arena``, without a copy."""
        self._arenas[arena] = ArenaView(blocks, self.layout)

    def detach(self, arena: str) -> None:
        """Drop every view of ``arena``."""
        self._arenas.pop(arena, None)

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """Compute one packed batch; see the contract."""
        logits = self.logits(rows)
        results: list[Sampled | None] = []
        failed: dict[str, str] = {}
        sampling = iter(logits)
        for row in rows:
            if row.sample is None:
                results.append(None)
                continue
            try:
                results.append(sample(next(sampling).numpy(), row.sample))
            except SamplingFailed as error:
                failed[row.request_id] = str(error)
        if failed:
            text = "; ".join(f"request {name}: {why}" for name, why in failed.items())
            raise StepFailed(text, tuple(failed), retryable=False)
        return results

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute one packed batch without sampling.

        Returns:
            float32 [rows that sample, vocab], in the order of the rows.
        """
        plan = plan_step(rows, self.layout)
        step = AttentionStep(plan, self._arenas, self.layout)
        inputs = {"input_ids": plan.input_ids, "position_ids": plan.positions, "use_cache": False}
        with attending(step):
            if plan.last:
                keep = plan.last + plan.last[:1] * (padded(len(plan.last)) - len(plan.last))
                out: torch.Tensor = self._model(**inputs, logits_to_keep=torch.tensor(keep)).logits[
                    0
                ]
                found = out[: len(plan.last)].float()
            else:
                self._model.base_model(**inputs)
                found = torch.empty(0, self.info.vocab_size)
        self.last_calls = dict(step.calls)
        return found

    def warm_up(self) -> None:
        """Run one prompt chunk and one decode step in memory of its own."""
        length = min(TILE + 1, self.info.context_max - 1)
        count = -(-(length + 1) // self.layout.block_size)
        blocks = np.arange(count, dtype=np.int32)
        self.attach("", memoryview(bytearray(count * self.layout.block_bytes)))
        ids = np.full(length, self.info.vocab_size // 2, dtype=np.int32)
        spec = SampleSpec(SamplingParams(seed=0), 0, ids, ())
        try:
            self.step([Row("", ids, 0, blocks, "")])
            self.step([Row("", ids[:1], length, blocks, "", spec)])
        finally:
            self.detach("")
