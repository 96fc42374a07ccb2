"""Where everything of one step lies on a device: a step cut into pieces of one shape.

Decides the cut and all index arithmetic, once a step, for all layers; no torch. A *piece* is one
forward: a fixed number of tokens of one arena, filled up. Within it a *segment* is up to
``SEGMENT`` consecutive tokens of one row, which attend together over the same gathered positions.

All numbers of a piece are one array of int64, so that they reach the device in one copy and a CUDA
graph finds them in one place; :func:`fields` says what lies where in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.ports.engine import KVLayout, Row

#: Tokens of a segment at most. With a few query heads to a KV head they fill one tile of queries.
SEGMENT = 16
#: Positions gathered for a segment at least; a multiple of every kernel's tile of keys.
POSITIONS = 512
#: Positions gathered at once for all segments: more are cut into more pieces.
GATHERED_MAX = 2**18
#: Rows of the largest piece where rows may see each other.
FREE_ROWS_MAX = 2048

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a piece's arrays look like: kernels are chosen, and graphs captured, by it."""

    rows: int
    """Tokens, filled up."""
    segments: int
    positions: int
    """Gathered for each segment."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """How steps are cut."""

    rows: int
    """Tokens of every piece; 0: as many as there are, rounded up to a power of two."""

    @property
    def rows_max(self) -> int:
        return self.rows or FREE_ROWS_MAX

    def rows_for(self, tokens: int) -> int:
        return self.rows or _power(max(tokens, SEGMENT))


@dataclass(frozen=True, slots=True)
class Piece:
    """One forward."""

    arena: str
    shape: Shape
    numbers: Int
    """See :func:`fields`."""
    sampled: tuple[tuple[int, int], ...]
    """(place in the piece, number among the step's rows that sample) of each last token."""


def fields(shape: Shape, block_size: int) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return start and shape of each part of ``Piece.numbers``.

    - ``ids``, ``positions`` [rows]: of the tokens.
    - ``sources``, ``slots`` [rows]: which token's K and V are stored, and the K slot of layer 0
      they go to. What fills up stores a token's own values into its own slot once more.
    - ``homes`` [rows]: each token's place among the queries.
    - ``queries``, ``at`` [segments, SEGMENT]: which token asks, and its position.
    - ``ends`` [segments]: positions that were written, counted from 0.
    - ``units`` [segments, blocks]: K unit of layer 0 of each block.
    """
    rows, segments = shape.rows, shape.segments
    parts = {
        "ids": (rows,),
        "positions": (rows,),
        "sources": (rows,),
        "slots": (rows,),
        "homes": (rows,),
        "queries": (segments, SEGMENT),
        "at": (segments, SEGMENT),
        "ends": (segments,),
        "units": (segments, shape.positions // block_size),
    }
    found, start = {}, 0
    for name, size in parts.items():
        found[name] = (start, size)
        start += math.prod(size)
    return found


@dataclass(frozen=True, slots=True)
class _Segment:
    row: Row
    begin: int
    """Of its tokens among the row's."""
    count: int
    sampled: int | None
    """Number among the rows that sample, if its last token is one of those."""

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.row.start + self.begin + self.count


def plan_pieces(rows: Sequence[Row], layout: KVLayout, cutting: Cutting) -> list[Piece]:
    """Cut a step. Pieces run in order: a later one reads what earlier ones stored."""
    segments = list(_segments(rows))
    pieces = []
    for arena in dict.fromkeys(row.arena for row in rows):
        mine = [segment for segment in segments if segment.row.arena == arena]
        pieces += [_piece(arena, part, layout, cutting) for part in _parts(mine, cutting)]
    return pieces


def _segments(rows: Sequence[Row]) -> Iterator[_Segment]:
    sampled = 0
    for row in rows:
        length = len(row.token_ids)
        for begin in range(0, length, SEGMENT):
            count = min(SEGMENT, length - begin)
            last = row.sample is not None and begin + count == length
            yield _Segment(row, begin, count, sampled if last else None)
        sampled += row.sample is not None


def _parts(segments: Sequence[_Segment], cutting: Cutting) -> Iterator[list[_Segment]]:
    """Yield the segments of each piece: as many as its rows and the gathered positions allow."""
    part: list[_Segment] = []
    for segment in segments:
        more = [*part, segment]
        tokens = sum(each.count for each in more)
        if part and (tokens > cutting.rows_max or _gathered(more) > GATHERED_MAX):
            yield part
            more = [segment]
        part = more
    if part:
        yield part


def _gathered(segments: Sequence[_Segment]) -> int:
    return _power(len(segments)) * _positions(segments)


def _positions(segments: Sequence[_Segment]) -> int:
    return _power(max(POSITIONS, *(segment.end for segment in segments)))


def _piece(arena: str, segments: Sequence[_Segment], layout: KVLayout, cutting: Cutting) -> Piece:
    tokens = sum(segment.count for segment in segments)
    shape = Shape(cutting.rows_for(tokens), _power(len(segments)), _positions(segments))
    places = fields(shape, layout.block_size)
    start, size = places["units"]
    numbers = np.zeros(start + math.prod(size), np.int64)
    part = {
        name: numbers[start : start + math.prod(size)].reshape(size)
        for name, (start, size) in places.items()
    }
    at, sampled = 0, []
    for number, segment in enumerate(segments):
        _fill(part, number, at, segment, layout)
        at += segment.count
        if segment.sampled is not None:
            sampled.append((at - 1, segment.sampled))
    # What fills up: the first token's values once more into its own slot, and queries and segments
    # that see one position. Nobody looks at what they give.
    part["slots"][at:] = part["slots"][0]
    part["ends"][len(segments) :] = 1
    part["units"][len(segments) :] = part["units"][0, 0]
    return Piece(arena, shape, numbers, tuple(sampled))


def _fill(part: dict[str, Int], number: int, at: int, segment: _Segment, layout: KVLayout) -> None:
    row, count, size = segment.row, segment.count, layout.block_size
    first = row.start + segment.begin
    positions = np.arange(first, segment.end)
    blocks = row.blocks.astype(np.int64)
    here, block_slots = slice(at, at + count), layout.layers * 2 * size
    part["ids"][here] = row.token_ids[segment.begin : segment.begin + count]
    part["positions"][here] = positions
    part["sources"][here] = np.arange(at, at + count)
    part["slots"][here] = blocks[positions // size] * block_slots + positions % size
    part["homes"][here] = number * SEGMENT + np.arange(count)
    part["queries"][number, :count] = np.arange(at, at + count)
    part["at"][number, :count] = positions
    part["ends"][number] = segment.end
    used = -(-segment.end // size)
    # Beyond its blocks its first one is gathered, memory that may be read, and hidden.
    part["units"][number] = blocks[0] * layout.layers * 2
    part["units"][number, :used] = blocks[:used] * layout.layers * 2


def _power(count: int) -> int:
    """Return the power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()
