"""The C interface of the compiled kernels, as ctypes sees it; mirrors ``kernels.cpp``.

Decides how arrays become pointers. Every call gives the interpreter lock up while it computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ABI = 4
DTYPES = {"float32": 0, "bfloat16": 1}
#: Elements of K that a packed line holds of one column.
K_STEP = {"float32": 1, "bfloat16": 2}
#: Columns of one packed group.
GROUP = 32
#: Elements along k that share a scale, of weights of 8 and 4 bits.
SHARED = 32
#: What a matrix's elements are: of the model's dtype, or codes.
WEIGHT_KINDS = {"full": 0, "int8": 1, "int4": 2}
#: Most query heads of one KV head.
GROUP_HEADS_MAX = 192

#: One row of a step, as C sees it.
ROW = np.dtype(
    [
        ("begin", "<i4"),
        ("count", "<i4"),
        ("start", "<i4"),
        ("blocks_max", "<i4"),
        ("blocks", "<u8"),
        ("arena", "<u8"),
    ]
)
#: No refusal: the step was done.
_NOT_FINITE = -1
_REFUSALS = {
    1: "a token id is outside the vocabulary",
    2: "a position is beyond the model's context",
    3: "a block number is outside its arena",
    4: "the rows do not follow each other",
}


class Weights(Structure):
    """One packed matrix."""

    _fields_ = (
        *(("data", c_void_p), ("bias", c_void_p)),
        *((name, c_int32) for name in ("n", "k", "kind")),
    )


class LlamaShape(Structure):
    """Sizes of a Llama-like model."""

    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("intermediate", "vocab", "context", "block_size")),
        ("rotary", c_int32),
        ("norm_eps", c_float),
        ("scale", c_float),
    )


class LlamaLayer(Structure):
    """One layer's weights."""

    _fields_ = (
        *((name, Weights) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        ("window", c_int32),
        ("rotate", c_int32),
    )


class Cores(Structure):
    """A worker's cores on the core board; all null: nobody lends."""

    _fields_ = (
        ("lines", c_void_p),
        *((name, POINTER(c_int32)) for name in ("own", "loans")),
        *((name, c_int32) for name in ("own_count", "loan_count")),
    )


class Llama(Structure):
    """A Llama-like model."""

    _fields_ = (
        ("shape", LlamaShape),
        ("dtype", c_int32),
        ("threads", c_int32),
        ("embedding", c_void_p),
        ("rotary", c_void_p),
        ("final_norm", c_void_p),
        ("head", Weights),
        ("layers", POINTER(LlamaLayer)),
        ("cores", Cores),
    )


class AttentionCall(Structure):
    """One layer's attention."""

    _fields_ = (
        *((name, c_int32) for name in ("layers", "kv_heads", "head_dim", "block_size")),
        *((name, c_int32) for name in ("dtype", "layer", "heads", "window")),
        ("scale", c_float),
        ("softcap", c_float),
    )


class Library:
    """The loaded library with its functions' types."""

    def __init__(self, path: Path) -> None:
        """Load ``path``.

        Raises:
            OSError: it is no library that this process can load, or its registers are refused.
        """
        self.path = path
        self._c: Any = ctypes.CDLL(str(path))
        for name, result, arguments in _SIGNATURES:
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments
        if self._c.baton_abi() != ABI:
            raise OSError(f"{path} has another interface than this version of Baton")
        if not self._c.baton_granted():
            raise OSError(f"this process does not get the registers that {path.name} needs")

    def llama_new(self, spec: Llama) -> int:
        """Return a handle; the arrays that ``spec`` points to must outlive it."""
        handle: int = self._c.baton_llama_new(ctypes.byref(spec))
        return handle

    def llama_free(self, handle: int) -> None:
        """Stop the model's threads and drop its working memory."""
        self._c.baton_llama_free(handle)

    def llama_step(
        self,
        handle: int,
        rows: NDArray[Any],
        ids: NDArray[np.int32],
        keep: NDArray[np.int32],
    ) -> bool:
        """Compute one packed step up to the head, see ``Llama::step``; return whether what goes
        into the head is finite."""
        code: int = self._c.baton_llama_step(
            *(handle, address(rows), len(rows), address(ids), len(ids)),
            *(address(keep), len(keep)),
        )
        if code == _NOT_FINITE:
            return False
        self._checked(code)
        return True

    def llama_head(self, handle: int, logits: NDArray[np.float32]) -> None:
        """Compute the logits of the step before; see ``Llama::head``."""
        self._checked(self._c.baton_llama_head(handle, len(logits), address(logits)))

    def llama_claim(self, handle: int) -> None:
        """See ``Pool::claim``."""
        self._c.baton_llama_claim(handle)

    def llama_begin(self, handle: int, *, borrows: bool) -> None:
        """A step begins: see ``Pool::begin``."""
        self._c.baton_llama_begin(handle, borrows)

    def llama_end(self, handle: int) -> float:
        """It has ended; return for which share of it others' cores were borrowed."""
        share: float = self._c.baton_llama_end(handle)
        return share

    def pool_new(self, threads: int) -> int:
        """Return a handle of threads for :meth:`attend`."""
        handle: int = self._c.baton_pool_new(threads)
        return handle

    def pool_free(self, handle: int) -> None:
        """Stop the threads."""
        self._c.baton_pool_free(handle)

    def attend(
        self, call: AttentionCall, pool: int, rows: NDArray[Any], tokens: int, *arrays: int
    ) -> None:
        """Store K and V and attend; ``arrays`` are addresses of query, key, value and out."""
        self._checked(
            self._c.baton_attend(
                ctypes.byref(call), pool, address(rows), len(rows), tokens, *arrays
            )
        )

    def product(
        self, dtype: str, weights: Weights, left: NDArray[np.float32], out: NDArray[np.float32]
    ) -> None:
        """``out = left @ weights.T``."""
        self._c.baton_product(
            DTYPES[dtype], ctypes.byref(weights), address(left), len(left), address(out)
        )

    def exp2(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return 2 ** x; the length is a multiple of 16."""
        out = np.empty_like(x)
        self._c.baton_exp2(address(x), len(x), address(out))
        return out

    @staticmethod
    def _checked(code: int) -> None:
        # A caller that got this far with such rows has a bug; nothing was read or written.
        assert code == 0, _REFUSALS.get(code, f"refusal {code}")


_P, _I = c_void_p, c_int32
_SIGNATURES: Sequence[tuple[str, Any, list[Any]]] = (
    ("baton_abi", _I, []),
    ("baton_granted", _I, []),
    ("baton_llama_new", _P, [POINTER(Llama)]),
    ("baton_llama_free", None, [_P]),
    ("baton_llama_step", _I, [_P, _P, _I, _P, _I, _P, _I]),
    ("baton_llama_head", _I, [_P, _I, _P]),
    ("baton_llama_claim", None, [_P]),
    ("baton_llama_begin", None, [_P, c_int32]),
    ("baton_llama_end", c_double, [_P]),
    ("baton_pool_new", _P, [_I]),
    ("baton_pool_free", None, [_P]),
    ("baton_attend", _I, [POINTER(AttentionCall), _P, _P, _I, _I, _P, _P, _P, _P]),
    ("baton_product", None, [_I, POINTER(Weights), _P, _I, _P]),
    ("baton_exp2", None, [_P, _I, _P]),
)


def address(array: NDArray[Any]) -> int:
    """Return where a contiguous array's data lie."""
    assert array.flags.c_contiguous
    place: int = array.__array_interface__["data"][0]
    return place
