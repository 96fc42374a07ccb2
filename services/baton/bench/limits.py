"""What one core of this machine can do at most, measured beside what it is compared with.

Decides how memory bandwidth and arithmetic are measured, and what a step would cost if nothing but
one of them cost anything: the *floor* of a decode step (bytes it must read) and the *ceiling* of a
prompt (operations it must make). Time is the thread's CPU time, as in `engine`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.engine.packed import PackedSpec
from baton.ports.engine import KVLayout

#: Bytes read at a time: far beyond every cache.
_READ = 256 << 20
_TRIES = 8
#: Rows, columns and depth of the product that counts as the machine's arithmetic.
_SIDE = 1536
#: Of the packed tensors those that no step reads from end to end.
_LOOKED_UP = ("embedding", "rotary")


@dataclass(frozen=True, slots=True)
class Machine:
    """What one core reaches."""

    read_gb_s: float
    """Best of some passes over memory in one stream."""
    gflop_s: float
    """Best of some square products in the dtype, by torch (oneDNN)."""


def measure_machine(dtype: str) -> Machine:
    """Return this core's limits; the caller has pinned itself to it."""
    import torch

    torch.set_num_threads(1)
    memory = np.ones(_READ // 4, np.float32)
    left = torch.ones(_SIDE, _SIDE, dtype=getattr(torch, dtype))
    read = min(_timed(lambda: np.dot(memory, memory)) for _ in range(_TRIES))
    product = min(_timed(lambda: torch.matmul(left, left)) for _ in range(_TRIES))
    return Machine(round(_READ / read / 1e9, 1), round(2 * _SIDE**3 / product / 1e9, 1))


def _timed(work: Any) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


@dataclass(frozen=True, slots=True)
class Work:
    """What a model's steps must read and compute."""

    weight_bytes: int
    """Of matrices and norms, read by every step."""
    kv_bytes: int
    """K and V of one token in all layers."""
    layer_flop: float
    """Of one token in all matrices but the head."""
    head_flop: float
    key_flop: float
    """Of one token's attention to one key, in all layers."""

    def floor_ms(self, machine: Machine, streams: int, context: int) -> float:
        """Return what reading alone costs a decode step."""
        read = self.weight_bytes + streams * context * self.kv_bytes
        return read / machine.read_gb_s / 1e6

    def ceiling(self, machine: Machine, length: int) -> float:
        """Return the tokens per second of a prompt of which arithmetic alone costs anything."""
        flop = self.layer_flop + self.head_flop / length + self.key_flop * (length + 1) / 2
        return machine.gflop_s * 1e9 / flop


def work_of(spec: PackedSpec, layout: KVLayout) -> Work:
    """Return the work of a model whose packed header is ``spec``."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    a_layer = spec.hidden * (2 * q + 2 * kv + 3 * spec.intermediate)
    read = [size for name, (_, size) in spec.tensors.items() if name not in _LOOKED_UP]
    return Work(
        weight_bytes=sum(read),
        kv_bytes=layout.block_bytes // layout.block_size,
        layer_flop=2.0 * a_layer * len(spec.layers),
        head_flop=2.0 * spec.vocab * spec.hidden,
        key_flop=4.0 * q * len(spec.layers),
    )
