"""A row's bits in a product do not depend on the rows beside it, whatever the library does."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import linear

from baton.engine import products
from baton.engine.products import PIECE, product


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing found of other libraries, and torch's threads as they were."""
    monkeypatch.setattr(products, "_found", {})
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _matrices(n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(n + k)
    rows = torch.randn(700, k, generator=draw).to(dtype)
    return rows, torch.randn(n, k, generator=draw).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(192, 576), (576, 1536), (96, 4096), (7, 33)])
def test_a_row_has_the_same_bits_in_any_number_of_rows(n: int, k: int, dtype: torch.dtype) -> None:
    rows, weight = _matrices(n, k, dtype)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(dtype)
    torch.set_num_threads(1)
    right = torch.cat([product(rows[i : i + 1], weight, bias) for i in range(len(rows))])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (1, 2, 15, 17, 48, 49, 200, 256, 257, 384, 700):
            assert torch.equal(product(rows[:count], weight, bias), right[:count]), (threads, count)
            assert torch.equal(product(rows[-count:], weight, bias), right[-count:])
    assert torch.allclose(right.float(), linear(rows, weight, bias).float(), rtol=0.05, atol=0.5)


def test_shapes_and_views_are_those_of_linear() -> None:
    rows, weight = _matrices(12, 20, torch.float32)
    for shape in ((1, 1, 20), (2, 35, 20), (20,), (0, 20)):
        some = rows.flatten()[: int(torch.tensor(shape).prod())].view(shape)
        assert product(some, weight).shape == linear(some, weight).shape
        wide = weight.t().contiguous().t()
        assert torch.allclose(product(some, wide), linear(some, wide), atol=1e-4)


def test_only_numbers_of_rows_that_give_the_defining_bits_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def moody(rows: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        seen.append(len(rows))
        return linear(rows, weight, bias) + (len(rows) > 64)

    monkeypatch.setattr(products, "linear", moody)
    rows, weight = _matrices(8, 16, torch.float32)
    product(rows[:1], weight)
    seen.clear()
    found = product(rows[:300], weight)
    assert seen == [64, 64, 64, 64, 32, 16]
    assert torch.allclose(found, linear(rows[:300], weight), atol=1e-4)


def test_one_thread_computes_what_more_threads_compute_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def moody(rows: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return linear(rows, weight, bias) + (torch.get_num_threads() > 1)

    monkeypatch.setattr(products, "linear", moody)
    rows, weight = _matrices(8, 16, torch.float32)
    torch.set_num_threads(2)
    product(rows, weight)
    seen.clear()
    assert torch.equal(product(rows[:PIECE], weight), linear(rows[:PIECE], weight))
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2
