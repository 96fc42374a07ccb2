"""Matrix products in which a row's bits do not depend on the rows beside it.

Decides how many rows go into one product. Libraries choose how the sum over k is cut by the number
of rows, the number of threads and the CPU (seen with oneDNN on AMX: 32 and 48 rows differ in the
last bit; with MKL on two threads: 192 and 208), and no option fixes that choice. So it is asked: a
product of ``PIECE`` rows on one thread says what a row's bits are, and of the larger pieces those
are used that give the same on this machine, with these weights' shape and this number of threads.
Any number of rows is cut into such pieces, the last one filled up with zeros.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.nn.functional import linear, pad
from transformers.pytorch_utils import Conv1D

from baton.engine.plan import ROWS_MULTIPLE

#: Rows of the product that defines a row's bits.
PIECE = ROWS_MULTIPLE
_SIZES = (512, 256, 128, 64, 32, PIECE)
_SEED = 20
#: Weights' shape, strides, dtype, whether there is a bias, threads -> pieces, largest first; empty:
#: only one thread gives the bits.
_found: dict[tuple[object, ...], tuple[int, ...]] = {}


def product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``rows @ weight.t() + bias``, each row's bits independent of the others.

    Args:
        rows: [..., k] of ``weight``'s dtype.
        weight: [n, k], of any strides.
        bias: [n].

    Returns:
        [..., n].
    """
    threads = torch.get_num_threads()
    pieces = _pieces(weight, bias, threads)
    flat = rows.reshape(-1, rows.shape[-1])
    if pieces:
        return _cut(flat, weight, bias, pieces).view(*rows.shape[:-1], len(weight))
    with _Threads(1):
        one = _pieces(weight, bias, 1)
        return _cut(flat, weight, bias, one).view(*rows.shape[:-1], len(weight))


def use_products(model: Any) -> None:
    """Let every linear module of ``model`` compute by :func:`product`."""
    forwards = {torch.nn.Linear: _linear_forward, Conv1D: _conv1d_forward}
    for module in model.modules():
        if type(module) in forwards:
            module.forward = types.MethodType(forwards[type(module)], module)


def _linear_forward(module: Any, rows: torch.Tensor) -> torch.Tensor:
    return product(rows, module.weight, module.bias)


def _conv1d_forward(module: Any, rows: torch.Tensor) -> torch.Tensor:
    return product(rows, module.weight.t(), module.bias)


def _cut(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pieces: tuple[int, ...]
) -> torch.Tensor:
    count = len(rows)
    beyond = -count % PIECE
    if beyond:
        rows = pad(rows, (0, 0, 0, beyond))
    if len(rows) in pieces or not count:
        return linear(rows, weight, bias)[:count]
    parts, at = [], 0
    for piece in pieces:
        while len(rows) - at >= piece:
            parts.append(linear(rows[at : at + piece], weight, bias))
            at += piece
    return torch.cat(parts)[:count]


def _pieces(weight: torch.Tensor, bias: torch.Tensor | None, threads: int) -> tuple[int, ...]:
    key = (weight.shape, weight.stride(), weight.dtype, bias is None, threads)
    if key not in _found:
        _found[key] = _probe(weight, bias, threads)
    return _found[key]


def _probe(weight: torch.Tensor, bias: torch.Tensor | None, threads: int) -> tuple[int, ...]:
    """Return the numbers of rows with which each row has the bits that define it."""
    draw = torch.Generator().manual_seed(_SEED)
    rows = torch.randn(_SIZES[0], weight.shape[1], generator=draw).to(weight.dtype)
    with _Threads(1):
        bits = _by(PIECE, rows, weight, bias)
    with _Threads(threads):
        return tuple(size for size in _SIZES if torch.equal(_by(size, rows, weight, bias), bits))


def _by(
    size: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    pieces = [rows[at : at + size] for at in range(0, len(rows), size)]
    return torch.cat([linear(piece, weight, bias) for piece in pieces])


class _Threads:
    """Within it torch computes with another number of threads."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        self._set(self._count)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)

    def _set(self, count: int) -> None:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
