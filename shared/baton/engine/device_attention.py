"""Attention over blocks on a device: torch's own, over gathered positions.

Decides the arithmetic of one layer of one piece (``device_plan``): K and V of its tokens are stored
into their slots, then every segment's positions are gathered from its blocks and all segments are
attended to in one call of torch's ``scaled_dot_product_attention``. Shapes depend on the piece's
shape alone, and nothing asks the device for a value, so that it can be captured in a CUDA graph.

On CUDA the memory-efficient kernel is demanded: it visits the keys in one order, in tiles whose
size the head decides, and never splits them among thread blocks. What is hidden has the finite
score ``HIDDEN`` and weighs exactly nothing beside anything seen (as in ``attention``).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from baton.engine.attending import Attending
from baton.engine.attention import refuse_unknown
from baton.engine.info import ModelRefused
from baton.engine.plan import HIDDEN
from baton.ports.engine import KVLayout

#: Name under which transformers knows this attention.
NAME = "baton_device"


class DeviceArena:
    """One attached arena as torch sees it; no copy."""

    def __init__(self, blocks: torch.Tensor, layout: KVLayout) -> None:
        """``blocks``: uint8, contiguous, whole blocks."""
        whole = blocks.view(getattr(torch, layout.dtype))
        self.slots = whole.view(-1, layout.heads * layout.head_dim)
        """[blocks * layers * 2 * block_size, heads * head_dim]"""
        self.units = whole.view(-1, layout.block_size, layout.heads, layout.head_dim)
        """[blocks * layers * 2, block_size, heads, head_dim]"""


class PieceStep:
    """One piece's attention: its numbers on the device, and what layers share."""

    def __init__(
        self, arena: DeviceArena, layout: KVLayout, numbers: Mapping[str, torch.Tensor]
    ) -> None:
        self.arena = arena
        self.layout = layout
        self.numbers = numbers
        segments, blocks = numbers["units"].shape
        self.positions = blocks * layout.block_size
        at = torch.arange(self.positions, device=numbers["units"].device)
        self._at = at
        unwritten = at >= numbers["ends"][:, None]
        self.unwritten = unwritten.view(segments, self.positions, 1, 1)
        """Places that nobody may have written: whatever lies there counts as zero."""
        self._biases: dict[tuple[int | None, int], torch.Tensor] = {}

    def bias(self, window: int | None, group: int) -> torch.Tensor:
        """Return what is added to scores: [segments, 1, group * SEGMENT, positions]."""
        key = (window, group)
        if key not in self._biases:
            query = self.numbers["at"][:, :, None]
            hidden = self._at > query
            if window is not None:
                hidden |= self._at <= query - window
            dtype = self.arena.units.dtype
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            bias.masked_fill_(hidden, HIDDEN)
            self._biases[key] = bias.repeat(1, group, 1).unsqueeze(1)
        return self._biases[key]


#: Makes a step what the registered attention works on.
attending: Attending[PieceStep] = Attending()


def device_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Store and attend; the function transformers calls once a layer.

    Args:
        module: the attention module; its ``layer_idx`` says which layer's units are meant.
        query: [1, heads, tokens, head_dim], positions already encoded.
        key, value: [1, kv_heads, tokens, head_dim].
        attention_mask: must be absent: who sees whom follows from the plan.
        scaling: of the scores; ``head_dim ** -0.5`` if absent.
        sliding_window: positions a query sees, itself included.
        softcap: refused: torch's attention has none.

    Returns:
        [1, tokens, heads, head_dim] and no weights.
    """
    step = attending.step
    assert step is not None, "device attention is called outside a step"
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ModelRefused("an attention module does not know its layer")
    if softcap is not None:
        raise ModelRefused("scores with a soft cap are not supported on a device")
    refuse_unknown(step.layout, key, value, attention_mask, others)
    unit = layer * 2
    _store(step, unit, key[0], value[0])
    return _attend(step, unit, query[0], scaling, sliding_window).unsqueeze(0), None


def _store(step: PieceStep, unit: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write K and V of the piece's tokens; key, value: [kv_heads, tokens, head_dim]."""
    layout, numbers = step.layout, step.numbers
    slots = numbers["slots"] + unit * layout.block_size
    for axis, part in enumerate((key, value)):
        lines = part.transpose(0, 1).reshape(part.shape[1], -1).to(step.arena.slots.dtype)
        chosen = lines.index_select(0, numbers["sources"])
        step.arena.slots.index_copy_(0, slots + axis * layout.block_size, chosen)


def _attend(
    step: PieceStep,
    unit: int,
    query: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return [tokens, heads, head_dim] of ``query`` [heads, tokens, head_dim]."""
    layout, numbers = step.layout, step.numbers
    heads, tokens, width = query.shape
    kv, group = layout.heads, heads // layout.heads
    segments, length = numbers["queries"].shape
    keys, values = (_gather(step, unit + axis) for axis in (0, 1))
    lines = query.transpose(0, 1).index_select(0, numbers["queries"].view(-1))
    asked = lines.view(segments, length, kv, group, width).permute(0, 2, 3, 1, 4)
    with _kernel(query.device):
        found = scaled_dot_product_attention(
            asked.reshape(segments, kv, group * length, width).to(keys.dtype),
            keys,
            values,
            attn_mask=step.bias(window, group).expand(-1, kv, -1, -1),
            scale=scaling,
        )
    told = found.view(segments, kv, group, length, width).permute(0, 3, 1, 2, 4)
    places = told.reshape(segments * length, heads, width)
    return places.index_select(0, numbers["homes"]).view(tokens, heads, width).to(query.dtype)


def _gather(step: PieceStep, unit: int) -> torch.Tensor:
    """Return K or V of all segments, [segments, kv_heads, positions, head_dim]."""
    layout, units = step.layout, step.numbers["units"]
    found = step.arena.units.index_select(0, (units + unit).view(-1))
    lines = found.view(len(units), step.positions, layout.heads, layout.head_dim)
    return lines.masked_fill_(step.unwritten, 0).transpose(1, 2)


def _kernel(device: torch.device) -> Any:
    """Demand the one kernel whose order of sums no shape changes, where there is a choice."""
    if device.type == "cuda":
        return sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    return nullcontext()


AttentionInterface.register(NAME, device_attention)
