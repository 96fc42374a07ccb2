"""Forwards of pieces, and CUDA graphs of the shapes that come again.

Decides when a shape is captured: the first piece of a shape runs as it is, which also lets
libraries choose their kernels; the second is captured; later ones are one copy of numbers and one
replay. A captured graph holds addresses of its arena, so it goes with it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.engine.device_attention import DeviceArena, PieceStep, attending
from baton.engine.device_plan import Int, Piece, Shape, fields
from baton.ports.engine import KVLayout

#: Captured at a time; the one used longest ago goes first. Each holds its own result, and they
#: share the memory of what is computed in between.
GRAPHS_MAX = 64

Layers = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(ids [tokens], positions [tokens]) -> last hidden state [tokens, hidden]."""

_Key = tuple[str, Shape]


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: Any
    numbers: torch.Tensor
    hidden: torch.Tensor


class Forwards:
    """Runs pieces on one device, in order."""

    def __init__(self, layers: Layers, layout: KVLayout, device: torch.device) -> None:
        self._layers = layers
        self._layout = layout
        self._device = device
        self._arenas: dict[str, DeviceArena] = {}
        self._seen: Counter[_Key] = Counter()
        self._graphs: OrderedDict[_Key, _Graph] = OrderedDict()
        self._pool: Any = None

    def attach(self, arena: str, view: DeviceArena) -> None:
        self.detach(arena)
        self._arenas[arena] = view

    def detach(self, arena: str) -> None:
        """Drop every view of it, once nothing that was queued uses it any more."""
        if self._arenas.pop(arena, None) is None:
            return
        self.wait()
        for key in [key for key in self._graphs if key[0] == arena]:
            del self._graphs[key]
        for key in [key for key in self._seen if key[0] == arena]:
            del self._seen[key]

    def run(self, piece: Piece) -> torch.Tensor:
        """Return the last hidden state of its tokens, valid until the next piece."""
        if self._device.type != "cuda":
            return self._forward(piece.arena, piece.shape, self._moved(piece.numbers))
        key = (piece.arena, piece.shape)
        self._seen[key] += 1
        if key not in self._graphs:
            if self._seen[key] == 1:
                return self._forward(piece.arena, piece.shape, self._moved(piece.numbers))
            self._capture(key, piece)
        self._graphs.move_to_end(key)
        held = self._graphs[key]
        held.numbers.copy_(torch.from_numpy(piece.numbers))
        held.graph.replay()
        return held.hidden

    def wait(self) -> None:
        """Return when the device has done everything that was queued."""
        if self._device.type == "cuda":
            # Only what this thread queued: who verifies has a stream of its own.
            torch.cuda.current_stream(self._device).synchronize()

    def _moved(self, numbers: Int) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._device)

    def _forward(self, arena: str, shape: Shape, numbers: torch.Tensor) -> torch.Tensor:
        parts = self._parts(shape, numbers)
        step = PieceStep(self._arenas[arena], self._layout, parts)
        with attending(step):
            return self._layers(parts["ids"], parts["positions"])

    def _parts(self, shape: Shape, numbers: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {
            name: numbers[start : start + math.prod(size)].view(size)
            for name, (start, size) in fields(shape, self._layout.block_size).items()
        }

    def _capture(self, key: _Key, piece: Piece) -> None:
        """Record the forward of this shape; nothing is computed yet."""
        if len(self._graphs) == GRAPHS_MAX:
            self._graphs.popitem(last=False)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        numbers = self._moved(piece.numbers)
        graph = torch.cuda.CUDAGraph()
        self.wait()
        # Other threads use the device meanwhile: what they do is no part of this.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = self._forward(piece.arena, piece.shape, numbers)
        self._graphs[key] = _Graph(graph, numbers, hidden)
