"""Weights of 8 and 4 bits: what a matrix is rounded to, and how its codes are packed.

Decides the numbers, exactly as GGUF's Q8_0 and Q4_1 have them: every 32 elements along k share a
scale in half precision and, of 4 bits, a least value; ``weight = scale * code + least``. Weights
that came from such a file are therefore found again without any loss. The head of a model whose
layers have 4 bits gets 8, as in those files. How slabs lie in memory is ``native/quant.h``'s rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.info import ModelRefused
from baton.engine.native.abi import GROUP, SHARED

#: Bits of a code, by kind of weights; what is not here is not quantised.
BITS = {"int8": 8, "int4": 4}
_LARGEST_HALF = 65504.0


def head_kind(weights: str) -> str:
    """Return the kind of the head's weights beside layers of kind ``weights``."""
    return "int8" if weights == "int4" else weights


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [n, k], its elements along k in groups of 32."""

    codes: torch.Tensor
    """int16 [n, k / 32, 32]: -127 to 127, or 0 to 15."""
    scale: torch.Tensor
    """float16 [n, k / 32, 1]"""
    least: torch.Tensor | None
    """float16 [n, k / 32, 1]; ``None``: 0 everywhere, 8 bits."""

    def weight(self) -> torch.Tensor:
        """Return float32 [n, k]: what the codes stand for."""
        found = self.codes.float() * self.scale.float()
        return (found if self.least is None else found + self.least.float()).flatten(1)


def quantize(weight: torch.Tensor, kind: str) -> Quantized:
    """Return ``weight`` [n, k] with the codes of ``kind``.

    Raises:
        ModelRefused: k is no multiple of 32, or a value is beyond half precision.
    """
    n, k = weight.shape
    if k % SHARED:
        raise ModelRefused(f"{kind} weights of {k} columns: multiples of {SHARED} needed")
    lined = weight.float().view(n, k // SHARED, SHARED)
    if not bool((lined.abs() <= _LARGEST_HALF).all()):
        raise ModelRefused(f"{kind} weights of values beyond {_LARGEST_HALF:.0f}")
    if kind == "int8":
        scale = (lined.abs().amax(-1, keepdim=True) / 127).half()
        return Quantized(_codes(lined, scale, -127, 127), scale, None)
    least = lined.amin(-1, keepdim=True).half()
    scale = ((lined.amax(-1, keepdim=True) - lined.amin(-1, keepdim=True)) / 15).half()
    return Quantized(_codes(lined - least.float(), scale, 0, 15), scale, least)


def loses_nothing(weight: torch.Tensor, kind: str, dtype: torch.dtype) -> bool:
    """Whether the codes of ``kind`` stand for the very numbers that ``weight`` has in ``dtype``."""
    try:
        found = quantize(weight, kind).weight()
    except ModelRefused:
        return False
    return torch.equal(found.to(dtype), weight.to(dtype))


def _codes(lined: torch.Tensor, scale: torch.Tensor, low: int, high: int) -> torch.Tensor:
    # A scale of 0: all elements are alike, and no code matters.
    wide = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    return (lined / wide).round().clamp(low, high).to(torch.int16)


def packed_slabs(matrix: Quantized) -> NDArray[np.uint8]:
    """Return slabs [n / 32][k / 32], zeros where n ends within a group."""
    bits = 8 if matrix.least is None else 4
    codes = _whole_groups(matrix.codes.numpy()).astype(np.uint32) & (2**bits - 1)
    groups, pairs = len(codes) // GROUP, 16 // bits
    # group, column, slab, word, pair of the word, half of the pair
    lined = codes.reshape(groups, GROUP, -1, SHARED // (2 * pairs), pairs, 2)
    shifts = np.arange(pairs, dtype=np.uint32)[:, None] * bits + np.array([0, 16], np.uint32)
    words = np.bitwise_or.reduce(lined << shifts, axis=(4, 5)).transpose(0, 2, 3, 1)
    parts = [_halves(matrix.scale)]
    if matrix.least is not None:
        parts.append(_halves(matrix.least))
    slabs = words.shape[:2]
    parts.append(np.ascontiguousarray(words).reshape(*slabs, -1).view(np.uint8))
    return np.ascontiguousarray(np.concatenate(parts, axis=-1)).reshape(-1)


def _halves(values: torch.Tensor) -> NDArray[np.uint8]:
    """Return uint8 [n / 32, k / 32, 64]."""
    whole = _whole_groups(values.squeeze(-1).numpy())
    lined = whole.reshape(-1, GROUP, whole.shape[1]).transpose(0, 2, 1)
    found: NDArray[np.uint8] = np.ascontiguousarray(lined).view(np.uint8)
    return found


def _whole_groups(values: NDArray[np.generic]) -> NDArray[np.generic]:
    return np.pad(values, [(0, -len(values) % GROUP), *[(0, 0)] * (values.ndim - 1)])
