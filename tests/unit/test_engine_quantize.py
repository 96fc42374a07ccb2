"""Weights of 8 and 4 bits: what is kept of a matrix, and where its codes lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.info import ModelRefused
from baton.engine.quantize import head_kind, packed_slabs, quantize

KINDS = st.sampled_from(["int8", "int4"])


def drawn(n: int, k: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, k), np.float32))


@settings(max_examples=40, deadline=None)
@given(kind=KINDS, n=st.integers(1, 70), slabs=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_no_weight_moves_by_more_than_half_a_step(kind: str, n: int, slabs: int, seed: int) -> None:
    """Half a scale, and what rounding the scale and the least value to half precision costs."""
    weight = drawn(n, 32 * slabs, seed)
    matrix = quantize(weight, kind)
    error = (matrix.weight() - weight).abs().view(n, slabs, 32)
    reach = weight.abs().view(n, slabs, 32).amax(-1, keepdim=True)
    assert (error <= 0.5 * matrix.scale.float() + 2e-3 * reach).all()


@settings(max_examples=40, deadline=None)
@given(kind=KINDS, n=st.integers(1, 70), slabs=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_what_was_quantised_before_is_found_again(kind: str, n: int, slabs: int, seed: int) -> None:
    """Weights that came from such codes keep every bit: a GGUF file of 4 bits loses nothing."""
    once = quantize(drawn(n, 32 * slabs, seed), kind)
    again = quantize(once.weight(), kind)
    assert torch.equal(again.weight(), once.weight())


@pytest.mark.parametrize(("kind", "size"), [("int8", 64 + 1024), ("int4", 64 + 64 + 512)])
def test_a_slab_holds_scales_and_then_words(kind: str, size: int) -> None:
    """Column 3's element 5 of the second slab stands where the kernels look for it."""
    matrix = quantize(drawn(40, 64, 1), kind)
    data = packed_slabs(matrix).reshape(2, 2, size)
    slab = data[0, 1]
    assert slab[:64].view(np.float16)[3] == matrix.scale[3, 1, 0].item()
    words = slab[-512:] if kind == "int4" else slab[64:]
    if kind == "int4":
        assert slab[64:128].view(np.float16)[3] == matrix.least[3, 1, 0].item()
        # Pair 2 of word 0, second half.
        found = (words.view(np.uint32).reshape(4, 32)[0, 3] >> (16 + 4 * 2)) & 15
        assert found == matrix.codes[3, 1, 5].item()
    else:
        # Pair 0 of word 1, second half.
        found = (words.view(np.uint32).reshape(8, 32)[1, 3] >> 16) & 255
        assert found == matrix.codes[3, 1, 5].item() & 255
    assert not data[1, :, :64].view(np.float16)[:, 8:].any()  # columns 40 to 63 are nobody's


def test_what_cannot_be_quantised_is_refused() -> None:
    """Rows that are no whole slabs, and values that half precision does not hold."""
    with pytest.raises(ModelRefused, match="multiples of 32"):
        quantize(torch.zeros(2, 48), "int4")
    with pytest.raises(ModelRefused, match="beyond 65504"):
        quantize(torch.full((2, 32), 1e5), "int8")
    with pytest.raises(ModelRefused, match="beyond 65504"):
        quantize(torch.full((2, 32), torch.nan), "int8")


def test_the_head_of_four_bits_has_eight() -> None:
    """As in GGUF files, whose embeddings have more bits than their layers."""
    assert [head_kind(kind) for kind in ("full", "int8", "int4")] == ["full", "int8", "int8"]
