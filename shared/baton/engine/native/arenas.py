"""Attached arenas and a step's rows, as the compiled kernels read them; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.engine.native.abi import ROW, address
from baton.ports.engine import KVLayout, Row


class Arenas:
    """The arenas an engine may read and write."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._attached: dict[str, tuple[NDArray[np.uint8], int, int]] = {}

    def attach(self, arena: str, blocks: memoryview) -> None:
        """Make ``blocks`` usable as ``arena``, without a copy."""
        memory = np.frombuffer(blocks, np.uint8)
        assert memory.flags.writeable, "an arena that cannot be written"
        self._attached[arena] = (memory, address(memory), len(memory) // self._layout.block_bytes)

    def detach(self, arena: str) -> None:
        """Drop every view of ``arena``."""
        self._attached.pop(arena, None)

    def lines(self, rows: Sequence[Row]) -> StepRows:
        """Return ``rows`` one after the other, as C sees them."""
        found: list[tuple[int, ...]] = []
        tables, last, begin = [], [], 0
        for row in rows:
            table = np.ascontiguousarray(row.blocks, np.int32)
            tables.append(table)
            _, place, blocks = self._attached[row.arena]
            count = len(row.token_ids)
            assert len(table) * self._layout.block_size >= row.start + count, "a block is missing"
            found.append((begin, count, row.start, blocks, address(table), place))
            begin += count
            if row.sample is not None:
                last.append(begin - 1)
        return StepRows(np.array(found, ROW), begin, last, tables)


class StepRows:
    """The rows of one step; the block tables that they point to live as long."""

    def __init__(
        self, rows: NDArray[Any], tokens: int, last: list[int], tables: list[NDArray[np.int32]]
    ) -> None:
        self.rows = rows
        """[rows] of :data:`~baton.engine.native.abi.ROW`."""
        self.tokens = tokens
        self.last = last
        """Place of the last token of each row that samples."""
        self._tables = tables
