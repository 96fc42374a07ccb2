"""The cut of a step into pieces of one shape."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from baton.core.sampling import SamplingParams
from baton.engine.device_plan import (
    GATHERED_MAX,
    POSITIONS,
    SEGMENT,
    Cutting,
    Piece,
    fields,
    plan_pieces,
)
from baton.ports.engine import KVLayout, Row, SampleSpec
from support.engine_steps import ids_of

LAYOUT = KVLayout(layers=3, heads=2, head_dim=8, block_size=16, dtype="float32")
SPEC = SampleSpec(SamplingParams(seed=0), 0, ids_of([1]), ())


def row(count: int, start: int, blocks: list[int], *, arena: str = "a", sample: bool = True) -> Row:
    ids = ids_of(range(100, 100 + count))
    return Row("r", ids, start, ids_of(blocks), arena, SPEC if sample else None)


def parts(piece: Piece) -> dict[str, Any]:
    return {
        name: piece.numbers[start : start + math.prod(size)].reshape(size)
        for name, (start, size) in fields(piece.shape, LAYOUT.block_size).items()
    }


def test_pieces_have_the_fixed_number_of_rows() -> None:
    """One token or five hundred: each forward has 64 rows; what samples is found in its piece."""
    rows = [row(1, 5, [7]), row(150, 0, list(range(10, 20)), sample=False), row(1, 40, [1, 2, 3])]
    pieces = plan_pieces(rows, LAYOUT, Cutting(64))
    assert [piece.shape.rows for piece in pieces] == [64, 64, 64]
    assert [piece.sampled for piece in pieces] == [((0, 0),), (), ((38, 1),)]


def test_without_a_fixed_number_a_step_is_one_piece() -> None:
    """As many rows as there are, rounded up, so that few shapes occur."""
    (piece,) = plan_pieces([row(1, 5, [7])] * 3 + [row(60, 0, [1, 2, 3, 4])], LAYOUT, Cutting(0))
    assert (piece.shape.rows, piece.shape.segments) == (64, 8)
    assert piece.sampled == ((0, 0), (1, 1), (2, 2), (62, 3))


def test_slots_are_those_of_the_row_and_nothing_else_is_stored() -> None:
    """What fills a piece up stores a token's own values into its own slot once more."""
    (piece,) = plan_pieces([row(20, 30, [4, 9, 2, 6])], LAYOUT, Cutting(32))
    part = parts(piece)
    block = LAYOUT.layers * 2 * 16
    wanted = [9 * block + 14, 9 * block + 15, *(2 * block + n for n in range(16))]
    wanted += [6 * block, 6 * block + 1]
    assert part["slots"].tolist() == wanted + [wanted[0]] * 12
    assert part["sources"].tolist() == [*range(20), *[0] * 12]
    assert part["positions"][:20].tolist() == [*range(30, 50)]


def test_segments_gather_their_rows_blocks_and_hide_what_nobody_wrote() -> None:
    """A segment sees up to its own last token; beyond its blocks the first one stands in."""
    (piece,) = plan_pieces([row(20, 30, [4, 9, 2, 6])], LAYOUT, Cutting(32))
    part = parts(piece)
    units = LAYOUT.layers * 2
    assert part["ends"].tolist() == [46, 50]
    assert part["units"][0, :5].tolist() == [4 * units, 9 * units, 2 * units, 4 * units, 4 * units]
    assert part["units"][1, :5].tolist() == [4 * units, 9 * units, 2 * units, 6 * units, 4 * units]
    assert part["queries"][1, :4].tolist() == [16, 17, 18, 19]
    assert part["homes"][:20].tolist() == [*range(16), *(SEGMENT + n for n in range(4))]


def test_arenas_do_not_share_a_piece() -> None:
    """A piece stores into one arena; results keep the order of the rows."""
    rows = [row(1, 3, [1], arena=arena) for arena in ("a", "b", "a")]
    pieces = plan_pieces(rows, LAYOUT, Cutting(32))
    assert [(piece.arena, piece.sampled) for piece in pieces] == [
        ("a", ((0, 0), (1, 2))),
        ("b", ((0, 1),)),
    ]


def test_what_is_gathered_at_once_is_bounded() -> None:
    """Many rows with a long context are cut into more pieces, in their order."""
    long = GATHERED_MAX // 4
    rows = [row(1, long - 1, list(range(long // 16)))] * 9
    pieces = plan_pieces(rows, LAYOUT, Cutting(64))
    assert [len(piece.sampled) for piece in pieces] == [4, 4, 1]
    assert all(each.shape.segments * each.shape.positions <= GATHERED_MAX for each in pieces)


def test_few_shapes_occur() -> None:
    """Segments and positions are powers of two, so that graphs are found again."""
    seen = {
        piece.shape
        for count in range(1, 33)
        for piece in plan_pieces([row(1, 9, [1])] * count, LAYOUT, Cutting(32))
    }
    assert {shape.segments for shape in seen} == {1, 2, 4, 8, 16, 32}
    assert {shape.positions for shape in seen} == {POSITIONS}
    assert len(seen) == 6
    assert np.log2(POSITIONS).is_integer()
