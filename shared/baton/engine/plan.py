"""Where everything of one step lies: index arithmetic, once a step, for all layers.

Decides the packing of rows into one line of tokens, the slots their K and V go to, and the tiles
their queries look at. Attention itself is in ``attention``.

Words used here. A *unit* is one block's K or V of one layer, ``[block_size, heads, head_dim]``,
contiguous in the arena; a *slot* is one token's part of a unit. A *tile* is ``TILE`` consecutive
positions of one sequence, beginning at a multiple of ``TILE``: the same cut for every query, chunk
and batch, which is what makes results independent of them. Tiles are visited from the last one
down to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from baton.ports.engine import KVLayout, Row

#: Keys of one tile. Part of the arithmetic: another value is another kernel set.
TILE = 256
#: Packed rows are padded to a multiple of this, so that attention's products see whole register
#: tiles, element-wise functions whole vectors, and ``products`` whole pieces: a row's result must
#: not depend on how many rows stand beside it.
ROWS_MULTIPLE = 16

#: Tiles of decoding rows that are attended to together: few enough for the caches, enough to keep
#: the number of calls low.
GROUP_TILES = 8
#: What is added to scores that must not be seen. Finite, so that a wholly hidden tile yields no
#: NaN; so large that the sum is this very number, whatever the score was.
HIDDEN = -1e30

Int = NDArray[np.int64]


def padded(count: int) -> int:
    """Return ``count`` rounded up to whole register tiles, at least one."""
    return max(ROWS_MULTIPLE, -(-count // ROWS_MULTIPLE) * ROWS_MULTIPLE)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of several tokens, attended to by itself."""

    begin: int
    """Its first token's place among the packed ones."""
    count: int
    start: int
    """Its first token's position."""
    units: torch.Tensor
    """int64 [tiles, units a tile]: K unit of layer 0."""
    _biases: dict[tuple[int, int, int | None], torch.Tensor | None] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.count

    def tiles(self, window: int | None) -> range:
        """Return the tiles its queries see, in visiting order."""
        first = 0 if window is None else max(0, self.start - window + 1) // TILE
        return range(len(self.units) - 1, first - 1, -1)

    def bias(self, tile: int, group: int, window: int | None) -> torch.Tensor | None:
        """Return float32 [group * count, TILE] to add to scores; ``None``: all is visible."""
        key = (tile, group, window)
        if key not in self._biases:
            base = tile * TILE
            after = base + TILE - 1 > self.start
            before = window is not None and base < self.end - window
            self._biases[key] = self._make_bias(base, group, window) if after or before else None
        return self._biases[key]

    def _make_bias(self, base: int, group: int, window: int | None) -> torch.Tensor:
        query = np.arange(self.start, self.end)[:, None]
        at = np.arange(base, base + TILE)
        hidden = at > query
        if window is not None:
            hidden |= at <= query - window
        return _bias(np.tile(hidden, (group, 1)))


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Some tiles whose K and V fit the caches together; views of :class:`DecodeTiles`' order."""

    units: torch.Tensor
    """int64 [tiles * units a tile]: K unit of layer 0."""
    row: torch.Tensor
    """int64 [tiles]: rank of each tile's row."""
    bias: torch.Tensor | None
    """float32 [n, 1, TILE], to be added to the scores of the first n tiles."""
    beyond: torch.Tensor | None
    """int64: places (tile * TILE + key) after the query, which nobody may have written."""


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """The tiles of all rows of one token, for one window, in visiting order.

    Rows are ranked by their number of tiles, most first, and tiles are laid out depth by depth. So
    a depth is one slice, and the rows that reach it are the first ones.
    """

    tokens: torch.Tensor
    """int64 [rows]: place of each row among the packed tokens, by rank."""
    count: int
    """Tiles in all."""
    groups: list[TileGroup]
    depths: list[tuple[int, int]]
    """(first tile, rows that reach it) of each depth; depth 0 holds every row's last tile."""


class DecodeRows:
    """All rows of one token that live in one arena."""

    def __init__(self, tokens: Int, positions: Int, blocks: list[Int], layout: KVLayout) -> None:
        self._tokens = tokens
        self._positions = positions
        self._tables = [
            _tile_units(table, int(position) + 1, layout)
            for table, position in zip(blocks, positions, strict=True)
        ]
        self._tiles: dict[int | None, DecodeTiles] = {}

    def tiles(self, window: int | None) -> DecodeTiles:
        """Return the tiles for layers that see ``window`` positions (``None``: all)."""
        if window not in self._tiles:
            self._tiles[window] = self._cut(window)
        return self._tiles[window]

    def _cut(self, window: int | None) -> DecodeTiles:
        last = self._positions // TILE
        first = np.zeros_like(last)
        if window is not None:
            first = np.maximum(self._positions - window + 1, 0) // TILE
        ranks = np.argsort(first - last, kind="stable")
        counts = (last - first + 1)[ranks]
        reaches = [int((counts > depth).sum()) for depth in range(int(counts[0]))]
        row = np.concatenate([np.arange(reach) for reach in reaches])
        tile = last[ranks][row] - np.repeat(np.arange(len(reaches)), reaches)
        units = np.stack([self._tables[ranks[r]][t] for r, t in zip(row, tile, strict=True)])
        at = tile[:, None] * TILE + np.arange(TILE)
        query = self._positions[ranks][row][:, None]
        beyond = (at > query)[: len(ranks)]
        # Without a window only last tiles hide keys.
        hidden = beyond if window is None else (at > query) | (at <= query - window)
        starts = np.concatenate(([0], np.cumsum(reaches)))
        return DecodeTiles(
            tokens=torch.from_numpy(self._tokens[ranks]),
            count=len(row),
            groups=[
                _group(units[part], row[part], hidden[part], beyond[part])
                for part in _parts(len(row))
            ],
            depths=[(int(start), reach) for start, reach in zip(starts, reaches, strict=False)],
        )


def _parts(count: int) -> list[slice]:
    return [slice(begin, begin + GROUP_TILES) for begin in range(0, count, GROUP_TILES)]


def _group(units: Int, row: Int, hidden: NDArray[np.bool_], beyond: NDArray[np.bool_]) -> TileGroup:
    return TileGroup(
        units=torch.from_numpy(units.reshape(-1)),
        row=torch.from_numpy(row),
        bias=_bias(hidden).unsqueeze(1) if hidden.size else None,
        beyond=torch.from_numpy(np.flatnonzero(beyond)) if beyond.size else None,
    )


@dataclass(slots=True)
class ArenaPart:
    """What one step does in one arena."""

    arena: str
    tokens: torch.Tensor | None
    """int64 [n]: places among the packed tokens; ``None``: the first n."""
    slots: torch.Tensor
    """int64 [n]: K slot of layer 0."""
    decode: DecodeRows | None
    chunks: list[Chunk]


@dataclass(slots=True)
class StepPlan:
    """One packed batch. The padding tokens at its end belong to nobody and are stored nowhere."""

    input_ids: torch.Tensor
    """int64 [1, padded]"""
    positions: torch.Tensor
    """int64 [1, padded]"""
    parts: list[ArenaPart]
    last: list[int]
    """Place of the last token of each row that samples, in the order of the rows."""


def plan_step(rows: Sequence[Row], layout: KVLayout, *, tiled: bool = True) -> StepPlan:
    """Pack ``rows``; without the parts unless ``tiled``: another attention has no use for them."""
    lengths = [len(row.token_ids) for row in rows]
    begins = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    total = padded(int(begins[-1]))
    ids = np.zeros((1, total), dtype=np.int64)
    positions = np.zeros((1, total), dtype=np.int64)
    for row, begin, length in zip(rows, begins, lengths, strict=False):
        ids[0, begin : begin + length] = row.token_ids
        positions[0, begin : begin + length] = np.arange(row.start, row.start + length)
    arenas = dict.fromkeys(row.arena for row in rows) if tiled else {}
    placed = [(row, int(begin)) for row, begin in zip(rows, begins, strict=False)]
    parts = [
        _part(arena, [pair for pair in placed if pair[0].arena == arena], len(arenas) == 1, layout)
        for arena in arenas
    ]
    return StepPlan(
        input_ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        parts=parts,
        last=[
            int(begin) + length - 1
            for row, begin, length in zip(rows, begins, lengths, strict=False)
            if row.sample is not None
        ],
    )


def _part(arena: str, placed: list[tuple[Row, int]], whole: bool, layout: KVLayout) -> ArenaPart:
    size = layout.block_size
    tokens, slots, chunks = [], [], []
    single: list[tuple[int, int, Int]] = []
    for row, begin in placed:
        count = len(row.token_ids)
        blocks = row.blocks.astype(np.int64)
        at = np.arange(row.start, row.start + count)
        tokens.append(np.arange(begin, begin + count))
        slots.append(blocks[at // size] * (layout.layers * 2 * size) + at % size)
        if count == 1:
            single.append((begin, row.start, blocks))
        else:
            units = torch.from_numpy(_tile_units(blocks, row.start + count, layout))
            chunks.append(Chunk(begin, count, row.start, units))
    decode = None
    if single:
        begins, starts, tables = zip(*single, strict=True)
        decode = DecodeRows(np.array(begins), np.array(starts), list(tables), layout)
    return ArenaPart(
        arena=arena,
        tokens=None if whole else torch.from_numpy(np.concatenate(tokens)),
        slots=torch.from_numpy(np.concatenate(slots)),
        decode=decode,
        chunks=chunks,
    )


def _bias(hidden: NDArray[np.bool_]) -> torch.Tensor:
    return torch.from_numpy(np.where(hidden, np.float32(HIDDEN), np.float32(0)))


def _tile_units(blocks: Int, length: int, layout: KVLayout) -> Int:
    """Return int64 [tiles, units a tile] for the first ``length`` positions.

    Places of the last tile beyond the row's blocks are filled with its first block: memory that
    may be read, and whose values are masked.
    """
    used = -(-length // layout.block_size)
    tiles = -(-length // TILE)
    table = np.full(tiles * (TILE // layout.block_size), blocks[0], dtype=np.int64)
    table[:used] = blocks[:used]
    return table.reshape(tiles, -1) * (layout.layers * 2)
