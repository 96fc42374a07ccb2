"""Asks an engine whether its rows see each other, by computing the same tokens in other company.

Decides what is asked before a device serves (ADR 27): one sequence whole; then in uneven pieces
beside another one, its last token by itself among many. Every bit of K, V and logits has to be the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from baton.core.sampling import SamplingParams
from baton.ports.engine import KVLayout, ModelInfo, Row, SampleSpec, TokenIds

#: Tokens of the sequence: more than the positions that are gathered at least.
LENGTH = 700
_CUTS = (97, 23, 256, 1, 130)
_BESIDE = 40
_NAME = "invariance"
_GREEDY = SamplingParams(seed=0, temperature=0.0)


class Asked(Protocol):
    """What is asked of an engine."""

    info: ModelInfo
    layout: KVLayout

    def attach(self, arena: str, blocks: torch.Tensor) -> None: ...

    def detach(self, arena: str) -> None: ...

    def logits(self, rows: Sequence[Row]) -> NDArray[np.float32]: ...


def difference(engine: Asked, memory: Callable[[int], torch.Tensor]) -> str:
    """Return what differs, empty if nothing does. ``memory(blocks)`` gives zeroed blocks."""
    asked = _Asked(engine)
    blocks = memory(asked.blocks)
    engine.attach(_NAME, blocks)
    try:
        whole, beside = asked.whole(), asked.beside()
        states = blocks.view(asked.blocks, -1)
        first, second = (states.index_select(0, table) for table in asked.tables(blocks.device))
        if not torch.equal(first, second):
            return "K and V of a sequence alone and beside others differ"
        if not np.array_equal(whole, beside):
            return "logits of a sequence alone and beside others differ"
        return ""
    finally:
        engine.detach(_NAME)


class _Asked:
    """The rows that are computed."""

    def __init__(self, engine: Asked) -> None:
        self._engine = engine
        size = engine.layout.block_size
        # Whole blocks, so that nothing unwritten is compared.
        self._length = min(LENGTH, engine.info.context_max - 1) // size * size
        self._each = self._length // size
        self.blocks = 3 * self._each + _BESIDE
        draw = np.random.default_rng(20)
        self._ids = draw.integers(0, engine.info.vocab_size, self._length).astype(np.int32)
        self._order = draw.permutation(self.blocks).astype(np.int32)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks of the sequence in both runs."""
        first, second = (torch.from_numpy(self._table(n).astype(np.int64)) for n in (0, 1))
        return first.to(device), second.to(device)

    def whole(self) -> Any:
        last = self._length - 1
        self._engine.logits([self._row("a", self._ids[:last], 0, self._table(0))])
        return self._engine.logits([self._row("a", self._ids[last:], last, self._table(0))])[0]

    def beside(self) -> Any:
        last, at, cuts = self._length - 1, 0, list(_CUTS)
        while at < last:
            end = min(at + (cuts.pop(0) if cuts else last), last)
            other = self._row("b", self._ids[::-1][at:end].copy(), at, self._table(2))
            self._engine.logits([other, self._row("a", self._ids[at:end], at, self._table(1))])
            at = end
        mine = self._row("a", self._ids[last:], last, self._table(1))
        others = [
            self._row(f"{n}", self._ids[n : n + 1], 0, self._order[3 * self._each + n :])
            for n in range(_BESIDE)
        ]
        middle = _BESIDE // 2
        return self._engine.logits([*others[:middle], mine, *others[middle:]])[middle]

    def _table(self, number: int) -> TokenIds:
        return self._order[number * self._each : (number + 1) * self._each]

    @staticmethod
    def _row(name: str, ids: TokenIds, start: int, blocks: TokenIds) -> Row:
        return Row(name, ids, start, blocks, _NAME, SampleSpec(_GREEDY, 0, ids, ()))
