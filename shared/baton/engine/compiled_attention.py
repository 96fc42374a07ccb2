"""The compiled attention under transformers modules, for models whose step is not compiled whole.

Decides how the modules' tensors become the arrays that ``native/attention.h`` reads: float32, token
by token. The kernel rounds to the layout's dtype what the modules had rounded before, so nothing
changes on the way.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from baton.engine.native import abi
from baton.engine.native.arenas import Arenas, StepRows
from baton.ports.engine import KVLayout, Row


class CompiledAttention:
    """Threads and attached arenas; makes one :class:`CompiledStep` a step."""

    def __init__(
        self, library: abi.Library, layout: KVLayout, *, kernels: str, threads: int = 0
    ) -> None:
        """Start ``threads`` threads; 0 takes the cores this process may run on."""
        self.kernels = kernels
        self.layout = layout
        self.native = library
        self.arenas = Arenas(layout)
        self.pool = library.pool_new(threads or len(os.sched_getaffinity(0)))

    def __del__(self) -> None:
        """Stop the threads."""
        self.native.pool_free(self.pool)

    def use_threads(self, threads: int) -> None:
        """Have so many threads from now on."""
        self.native.pool_free(self.pool)
        self.pool = self.native.pool_new(threads)

    def step(self, rows: Sequence[Row]) -> CompiledStep:
        """Return the attention of one packed step."""
        return CompiledStep(self, self.arenas.lines(rows))


class CompiledStep:
    """One step's rows."""

    def __init__(self, attention: CompiledAttention, rows: StepRows) -> None:
        self._attention = attention
        self._rows = rows

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Store K and V of one layer and attend; see ``paged_attention`` for the shapes.

        Returns:
            float32 [tokens, heads, head_dim]; zeros for padding tokens.
        """
        layout = self._attention.layout
        lined = [part[0].transpose(0, 1).float().contiguous() for part in (query, key, value)]
        out = torch.zeros_like(lined[0])
        call = abi.AttentionCall(
            layers=layout.layers,
            kv_heads=layout.heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            dtype=abi.DTYPES[layout.dtype],
            layer=layer,
            heads=query.shape[1],
            window=window or 0,
            scale=scaling,
            softcap=softcap or 0.0,
        )
        places = [part.data_ptr() for part in (*lined, out)]
        self._attention.native.attend(
            call, self._attention.pool, self._rows.rows, self._rows.tokens, *places
        )
        return out
