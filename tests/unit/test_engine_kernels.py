"""The compiled kernels, each held to plain arithmetic over shapes, dtypes, lengths and layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.engine.native import abi
from baton.engine.native.binding import Level
from baton.engine.pack import packed
from baton.engine.quantize import packed_slabs, quantize
from baton.ports.engine import KVLayout
from support.engine_compiled import LEVELS, library_of
from support.engine_steps import by_token

FEW = settings(max_examples=25, deadline=None)
DTYPES = st.sampled_from(["float32", "bfloat16"])
#: The best, what serves where it cannot, and the one of most other machines; the others are tried
#: where it is cheap.
LEVEL = st.sampled_from([at for at in LEVELS if at.name in (LEVELS[0].name, "avx512bf16", "avx2")])
#: Largest error, relative to the sum of the terms' sizes: some roundings of a chain of float32.
ROUNDING = 2e-5


def rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Return the values as the dtype can hold them."""
    return torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()


def product(
    level: Level,
    dtype: str,
    left: NDArray[np.float32],
    right: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Return ``left @ right.T + bias`` as the kernels compute it with full weights."""
    n, k = right.shape
    data = packed(torch.from_numpy(right).to(getattr(torch, dtype)), abi.K_STEP[dtype])
    out = np.full((len(left), n), np.nan, np.float32)
    added = None if bias is None else abi.address(bias)
    weights = abi.Weights(abi.address(data), added, n, k, abi.WEIGHT_KINDS["full"])
    library_of(level).product(dtype, weights, np.ascontiguousarray(left), out)
    return out


@FEW
@given(
    level=LEVEL,
    dtype=DTYPES,
    shape=st.tuples(st.integers(1, 300), st.integers(1, 200), st.integers(1, 300)),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_product_is_right_and_every_row_is_its_own(
    level: Level, dtype: str, shape: tuple[int, int, int], seed: int
) -> None:
    """Against float64; and the bits of a row are the same in any company."""
    m, n, half_k = shape
    draw = np.random.default_rng(seed)
    left = rounded(draw.standard_normal((m, 2 * half_k), np.float32), dtype)
    right = rounded(draw.standard_normal((n, 2 * half_k), np.float32), dtype)
    found = product(level, dtype, left, right)
    wanted = left.astype(np.float64) @ right.T.astype(np.float64)
    sizes = np.abs(left).astype(np.float64) @ np.abs(right.T).astype(np.float64)
    assert (np.abs(found - wanted) <= ROUNDING * sizes).all()
    first, last = sorted(draw.integers(0, m + 1, 2))
    if first < last:
        assert np.array_equal(product(level, dtype, left[first:last], right), found[first:last])


@pytest.mark.parametrize("level", [LEVELS[0], LEVELS[-1]], ids=lambda level: level.name)
@pytest.mark.parametrize("shape", [(157, 40, 8208), (1100, 33, 512)], ids=str)
def test_rows_that_do_not_fit_the_cache_together_are_their_own(
    level: Level, shape: tuple[int, int, int]
) -> None:
    """A product cut into shares of rows, each for all columns: the same bits as rows alone."""
    m, n, k = shape
    draw = np.random.default_rng(6)
    left, right = (
        rounded(draw.standard_normal((count, k), np.float32), "bfloat16") for count in (m, n)
    )
    found = product(level, "bfloat16", left, right)
    wanted = left.astype(np.float64) @ right.T.astype(np.float64)
    sizes = np.abs(left).astype(np.float64) @ np.abs(right.T).astype(np.float64)
    assert (np.abs(found - wanted) <= ROUNDING * sizes).all()
    for row in (0, 63, 100, m - 1):
        alone = product(level, "bfloat16", left[row : row + 1], right)
        assert np.array_equal(alone[0], found[row])


@pytest.mark.skipif(LEVELS[0].name != "amxbf16", reason="this CPU has no AMX for bfloat16")
@pytest.mark.parametrize("k", [32, 30, 96, 146])
def test_the_order_of_a_tile_products_sum(k: int) -> None:
    """What the level's name stands for, bit for bit: of 32 elements the even and the odd ones are
    summed apart. Products of two bfloat16 are exact in float32, so plain sums are the hardware's.
    """
    draw = np.random.default_rng(k)
    left = rounded(draw.standard_normal((19, k), np.float32), "bfloat16")
    right = rounded(draw.standard_normal((37, k), np.float32), "bfloat16")
    found = product(LEVELS[0], "bfloat16", left, right)
    terms = left[:, None] * right[None]
    wanted = np.zeros((19, 37), np.float32)
    for first in range(0, k, 32):
        halves = np.zeros((2, 19, 37), np.float32)
        for at in range(first, min(first + 32, k)):
            halves[at % 2] += terms[:, :, at]
        wanted += halves[0] + halves[1]
    assert np.array_equal(found, wanted)


@FEW
@given(
    level=st.sampled_from(LEVELS),
    dtype=DTYPES,
    kind=st.sampled_from(["int8", "int4"]),
    shape=st.tuples(st.integers(1, 300), st.integers(1, 100), st.integers(1, 6)),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_product_with_quantised_weights_is_right_and_every_row_is_its_own(
    *, level: Level, dtype: str, kind: str, shape: tuple[int, int, int], size: float, seed: int
) -> None:
    """Against what the codes stand for, in float64; a row has the same bits in any company."""
    m, n, slabs = shape
    draw = np.random.default_rng(seed)
    left = rounded(draw.standard_normal((m, 32 * slabs), np.float32), dtype)
    right = size * torch.from_numpy(draw.standard_normal((n, 32 * slabs), np.float32))
    right[0, :32] = right[0, 0]  # all alike: a scale of 0
    matrix = quantize(right, kind)
    data, bias = packed_slabs(matrix), draw.standard_normal(n + 32).astype(np.float32)

    def product_of(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        out = np.full((len(rows), n), np.nan, np.float32)
        kinds = abi.WEIGHT_KINDS[kind]
        weights = abi.Weights(abi.address(data), abi.address(bias), n, 32 * slabs, kinds)
        library_of(level).product(dtype, weights, np.ascontiguousarray(rows), out)
        return out

    found = product_of(left)
    weight = matrix.weight().numpy()
    if (level.name, dtype) == ("amxbf16", "bfloat16"):
        # There codes become weights of the dtype first: the bits are those of such full weights.
        weight = rounded(weight, dtype)
        assert np.array_equal(found, product(level, dtype, left, weight, bias))
    wanted = left.astype(np.float64) @ weight.T.astype(np.float64) + bias[:n]
    terms = matrix.scale.float() * matrix.codes.abs()
    if matrix.least is not None:
        terms = terms + matrix.least.float().abs()
    sizes = np.abs(left).astype(np.float64) @ terms.flatten(1).numpy().T + np.abs(bias[:n])
    assert (np.abs(found - wanted) <= ROUNDING * sizes).all()
    first, last = sorted(draw.integers(0, m + 1, 2))
    if first < last:
        assert np.array_equal(product_of(left[first:last]), found[first:last])


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_powers_of_two(level: Level) -> None:
    """Within two units in the last place, exact at whole numbers, defined beyond the ends."""
    library = library_of(level)
    x = np.linspace(-126, 127.49, 64_000, dtype=np.float32)
    found, wanted = library.exp2(x), np.exp2(x.astype(np.float64))
    assert (np.abs(found - wanted) <= 2 * np.spacing(wanted.astype(np.float32))).all()
    whole = np.arange(-126, 128, dtype=np.float32)[:240]
    assert np.array_equal(library.exp2(whole), np.exp2(whole))
    ends = np.array([-np.inf, -1e30, -127, 128, np.inf, np.nan, 0, -0.0] * 2, np.float32)
    wanted_ends = np.array([0, 0, 0, np.inf, np.inf, np.nan, 1, 1] * 2, np.float32)
    assert np.array_equal(library.exp2(ends), wanted_ends, equal_nan=True)


# --- attention ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Some sequences in one arena, of which the last ``fed`` tokens are this step's."""

    level: Level
    layout: KVLayout
    group: int
    fed: tuple[int, ...]
    before: tuple[int, ...]
    window: int
    softcap: float
    seed: int

    @property
    def heads(self) -> int:
        return self.layout.heads * self.group


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.integers(1, 5))
    layout = KVLayout(
        layers=2,
        heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([16, 48, 64, 80, 96, 128, 256])),
        block_size=draw(st.sampled_from([16, 32, 64])),
        dtype=draw(DTYPES),
        order="lanes",
    )
    return Case(
        level=draw(LEVEL),
        layout=layout,
        group=draw(st.integers(1, 14)),
        fed=tuple(draw(st.one_of(st.just(1), st.integers(1, 150))) for _ in range(rows)),
        before=tuple(draw(st.integers(0, 300)) for _ in range(rows)),
        window=draw(st.sampled_from([0, 0, 1, 37, 128, 200])),
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


class Attended:
    """Runs one case: what was there before is fed as a step of its own, into NaN."""

    def __init__(self, case: Case, *, threads: int = 1) -> None:
        self.case = case
        layout = case.layout
        draw = np.random.default_rng(case.seed)
        self.lengths = [fed + before for fed, before in zip(case.fed, case.before, strict=True)]
        counts = [-(-length // layout.block_size) for length in self.lengths]
        order = draw.permutation(sum(counts) + 1)[: sum(counts)].astype(np.int32)
        self.tables = [part.copy() for part in np.split(order, np.cumsum(counts)[:-1])]
        self.memory = bytearray(b"\xff" * ((sum(counts) + 1) * layout.block_bytes))
        self.spare = (set(range(sum(counts) + 1)) - set(order.tolist())).pop()

        def some(heads: int) -> list[NDArray[np.float32]]:
            shapes = [(length, heads, layout.head_dim) for length in self.lengths]
            return [
                rounded(draw.standard_normal(shape, np.float32), layout.dtype) for shape in shapes
            ]

        self.query, self.key, self.value = some(case.heads), some(layout.heads), some(layout.heads)
        self.scale = layout.head_dim**-0.5
        library = library_of(case.level)
        self.pool = library.pool_new(threads)
        try:
            begun = [i for i, before in enumerate(case.before) if before]
            if begun:
                self.feed(begun, [0] * len(begun), [case.before[i] for i in begun])
            everyone = list(range(len(case.fed)))
            self.out = self.feed(everyone, list(case.before), list(case.fed))
        finally:
            library.pool_free(self.pool)

    def feed(self, which: list[int], starts: list[int], counts: list[int]) -> list[Any]:
        """Attend for tokens ``starts .. + counts`` of some sequences; one array each."""
        case = self.case
        arena = abi.address(np.frombuffer(self.memory, np.uint8))
        begins = np.concatenate(([0], np.cumsum(counts)))
        blocks = len(self.memory) // case.layout.block_bytes
        rows = [
            (begins[i], counts[i], starts[i], blocks, abi.address(self.tables[which[i]]), arena)
            for i in range(len(which))
        ]

        def joined(parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
            cut = [parts[w][s : s + c] for w, s, c in zip(which, starts, counts, strict=True)]
            return np.ascontiguousarray(np.concatenate(cut))

        arrays = [joined(parts) for parts in (self.query, self.key, self.value)]
        out = np.full_like(arrays[0], np.nan)
        call = abi.AttentionCall(
            layers=case.layout.layers,
            kv_heads=case.layout.heads,
            head_dim=case.layout.head_dim,
            block_size=case.layout.block_size,
            dtype=abi.DTYPES[case.layout.dtype],
            layer=1,
            heads=case.heads,
            window=case.window,
            scale=self.scale,
            softcap=case.softcap,
        )
        places = [abi.address(array) for array in (*arrays, out)]
        library_of(case.level).attend(
            call, self.pool, np.array(rows, abi.ROW), int(begins[-1]), *places
        )
        return np.split(out, begins[1:-1])

    def wanted(self, row: int) -> NDArray[np.float64]:
        """Return attention in float64, over the whole sequence at once."""
        case = self.case
        start, end = case.before[row], self.lengths[row]
        key, value = (
            np.repeat(part[row].astype(np.float64), case.group, 1)
            for part in (self.key, self.value)
        )
        query = self.query[row][start:].astype(np.float64)
        scores = np.einsum("qhd,khd->hqk", query, key) * self.scale
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        place, at = np.arange(start, end)[:, None], np.arange(end)
        hidden = at > place
        if case.window:
            hidden |= at <= place - case.window
        scores = np.where(hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, value)


@FEW
@given(case=cases())
def test_attention_is_right(case: Case) -> None:
    """Against float64 over the dense sequence; NaN around what was written changes nothing."""
    run = Attended(case)
    allowed = 1e-5 if case.layout.dtype == "float32" else 3e-2
    for row, out in enumerate(run.out):
        assert np.abs(out - run.wanted(row)).max() <= allowed


@FEW
@given(case=cases())
def test_attention_stores_k_and_v_of_its_layer_only(case: Case) -> None:
    """Every token's K and V stand where the layout says; every other byte is as it was."""
    run = Attended(case, threads=3)
    layout = case.layout
    lines = by_token(run.memory, layout)
    shape = (*lines.shape[:2], layout.layers, 2, layout.heads * layout.head_dim * layout.itemsize)
    lines = lines.reshape(shape)
    untouched = np.ones(lines.shape[:2], bool)
    for row, table in enumerate(run.tables):
        places = np.arange(run.lengths[row])
        found = lines[table[places // layout.block_size], places % layout.block_size, 1]
        for axis, source in enumerate((run.key[row], run.value[row])):
            wanted = torch.from_numpy(source).to(getattr(torch, layout.dtype)).flatten(1)
            assert np.array_equal(found[:, axis], wanted.view(torch.uint8).numpy())
        untouched[table[places // layout.block_size], places % layout.block_size] = False
    assert (lines[:, :, 0] == 0xFF).all()
    assert (lines[untouched] == 0xFF).all()
    assert untouched[run.spare].all()


@FEW
@given(case=cases(), data=st.data())
def test_a_rows_attention_is_its_own(case: Case, data: st.DataObject) -> None:
    """Alone, on other threads and cut elsewhere, a token's attention has the same bits."""
    whole = Attended(case)
    row = data.draw(st.integers(0, len(case.fed) - 1))
    cut = data.draw(st.integers(0, case.fed[row] - 1))
    alone = Attended(case, threads=2)
    alone.pool = library_of(case.level).pool_new(2)
    try:
        alone.memory[:] = b"\xff" * len(alone.memory)
        middle = case.before[row] + cut
        if middle:
            alone.feed([row], [0], [middle])
        (out,) = alone.feed([row], [middle], [case.fed[row] - cut])
    finally:
        library_of(case.level).pool_free(alone.pool)
    assert np.array_equal(out, whole.out[row][cut:])
