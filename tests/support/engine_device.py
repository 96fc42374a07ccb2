"""Engines for devices around tiny models: on the host, where the same code runs without graphs, and
on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from baton.engine.device_attention import NAME
from baton.engine.device_engine import DeviceEngine, no_cuda
from baton.engine.device_plan import Cutting
from baton.engine.info import layout_of
from baton.ports.engine import Row, Sampled, nothing
from support.engine_models import tiny_info, tiny_model

BLOCK = 16
#: Tokens of a piece in tests: few, so that prompts have many pieces.
ROWS = 32


def device_engine(
    family: str = "llama",
    dtype: str = "float32",
    *,
    device: str = "cpu",
    rows: int = ROWS,
    block: int = BLOCK,
) -> DeviceEngine:
    """Return an engine that is open; ``rows`` 0: pieces as large as the step."""
    model: Any = tiny_model(family, attention=NAME).to(getattr(torch, dtype))
    info = tiny_info(model)
    layout = layout_of(info, dtype, block)
    kind = DeviceEngine if device == "cpu" else MirroredEngine
    engine = kind.around(model, info, layout, device=device, cutting=Cutting(rows))
    engine.use_threads(1)
    return engine


class MirroredEngine(DeviceEngine):
    """An engine on a GPU whose arenas are also memory of the host, as the conformance suite wants
    them: what is there goes over before a step, what the step left comes back after it."""

    def attach(self, arena: str, blocks: memoryview | torch.Tensor) -> None:
        if isinstance(blocks, torch.Tensor):
            super().attach(arena, blocks)
            return
        host = torch.frombuffer(blocks, dtype=torch.uint8)
        there = host.to(self._device)
        self._mirrors[arena] = (host, there)
        super().attach(arena, there)

    def detach(self, arena: str) -> None:
        self._mirrors.pop(arena, None)
        super().detach(arena)

    @property
    def _mirrors(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        found: dict[str, tuple[torch.Tensor, torch.Tensor]]
        found = self.__dict__.setdefault("mirrors", {})
        return found

    def step(
        self, rows: Sequence[Row], stored: Callable[[], None] = nothing
    ) -> list[Sampled | None]:
        for host, there in self._mirrors.values():
            there.copy_(host)

        def told() -> None:
            self._bring_back()
            stored()

        try:
            return super().step(rows, told)
        finally:
            self._bring_back()

    def _bring_back(self) -> None:
        for host, there in self._mirrors.values():
            host.copy_(there)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=no_cuda())
