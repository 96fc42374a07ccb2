"""Paged attention over the arena, in plain torch: the reference every other kernel is held to.

Decides the arithmetic. K and V of the step's tokens are stored into their slots first; then every
query reads its keys and values where they lie, tile by tile. Arithmetic is float32 in every dtype
(where the CPU lacks bf16 instructions it is also the faster way); what is stored has the layout's
dtype.

Row invariance. A query's result is a fold over its tiles from the last to the first, each tile's
part a matrix product of fixed inner sizes; a tile it must not see at all is an exact no-op, whether
visited or not: its weight underflows to zero, or its sum is wiped by a factor of exactly zero when
the first visible tile comes. Row counts are padded to whole register tiles, element-wise work
always covers whole vectors, and nothing is split by the number of threads along a sum.
``tests/conformance/test_engine.py`` holds this bit for bit.

The registered function finds its step in a thread-local, not in the forward's keyword arguments:
several architectures do not pass those on to their attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface

from baton.engine.attending import Attending
from baton.engine.compiled_attention import CompiledStep
from baton.engine.info import ModelRefused
from baton.engine.plan import (
    GROUP_TILES,
    HIDDEN,
    TILE,
    ArenaPart,
    Chunk,
    DecodeRows,
    StepPlan,
    TileGroup,
    padded,
)
from baton.ports.engine import KVLayout

#: Name under which transformers knows this attention.
NAME = "baton_paged"


class ArenaView:
    """One attached arena as torch sees it; no copy."""

    def __init__(self, memory: memoryview, layout: KVLayout) -> None:
        dtype = getattr(torch, layout.dtype)
        whole = torch.frombuffer(memory, dtype=dtype)
        self.slots = whole.view(-1, layout.heads * layout.head_dim)
        """[blocks * layers * 2 * block_size, heads * head_dim]"""
        self.units = whole.view(-1, layout.block_size, layout.heads, layout.head_dim)
        """[blocks * layers * 2, block_size, heads, head_dim]"""
        scratch = (2, GROUP_TILES * TILE // layout.block_size, *self.units.shape[1:])
        self._scratch = torch.empty(scratch, dtype=dtype)
        self._wide = torch.empty(scratch) if dtype != torch.float32 else self._scratch

    def read(self, axis: int, units: torch.Tensor) -> torch.Tensor:
        """Return float32 [units, block_size, heads, head_dim] in scratch; overwritten by the next
        call with the same ``axis``."""
        found = self._scratch[axis, : len(units)]
        torch.index_select(self.units, 0, units, out=found)
        if self._wide is self._scratch:
            return found
        return self._wide[axis, : len(units)].copy_(found)


class AttentionStep:
    """One step's attention: the plan, the arenas, and who called."""

    def __init__(
        self,
        plan: StepPlan,
        arenas: Mapping[str, ArenaView],
        layout: KVLayout,
        compiled: CompiledStep | None = None,
    ) -> None:
        self.plan = plan
        self.arenas = arenas
        self.layout = layout
        self.compiled = compiled
        """Does it instead of this module's own tiles, if there."""
        self.calls: Counter[int] = Counter()
        """Calls by layer: the proof wants exactly one each."""


#: Makes a step what the registered attention works on.
attending: Attending[AttentionStep] = Attending()


def paged_attention(
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
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).

    Returns:
        [1, tokens, heads, head_dim] and no weights.
    """
    step = attending.step
    assert step is not None, "paged attention is called outside a step"
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ModelRefused("an attention module does not know its layer")
    refuse_unknown(step.layout, key, value, attention_mask, others)
    step.calls[layer] += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if step.compiled is not None:
        done = step.compiled.attend(
            layer, query, key, value, scaling=scale, window=sliding_window, softcap=softcap
        )
        return done.to(query.dtype).unsqueeze(0), None
    scaled = query[0].float() * scale
    out = torch.zeros(query.shape[2], query.shape[1], query.shape[3])
    for part in step.plan.parts:
        arena = step.arenas[part.arena]
        _store(arena, part, layer * 2 * step.layout.block_size, key[0], value[0])
        work = _LayerWork(arena, step.layout, layer, sliding_window, softcap)
        if part.decode is not None:
            work.decode(scaled, part.decode, out)
        for chunk in part.chunks:
            work.chunk(scaled, chunk, out)
    return out.to(query.dtype).unsqueeze(0), None


def refuse_unknown(
    layout: KVLayout,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    others: Mapping[str, Any],
) -> None:
    """Refuse what would silently change the result if it were ignored."""
    if mask is not None:
        raise ModelRefused("the model brings its own attention mask")
    wanted = (1, layout.heads, key.shape[2], layout.head_dim)
    if tuple(key.shape) != wanted or tuple(value.shape) != wanted:
        raise ModelRefused(
            f"K {tuple(key.shape)} and V {tuple(value.shape)} are not of the one layout {wanted}"
        )
    for name in ("s_aux", "sinks", "position_bias", "alibi", "head_mask"):
        if others.get(name) is not None:
            raise ModelRefused(f"the model's attention takes {name}, which is not supported")
    if others.get("dropout"):
        raise ModelRefused("the model is in training mode (dropout)")


def _store(
    arena: ArenaView, part: ArenaPart, offset: int, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Write K and V of the part's tokens; the one write every engine has to make.

    Args:
        arena: where to.
        part: which tokens, and their slots in layer 0.
        offset: slots from layer 0's K unit of a block to this layer's.
        key, value: [heads, tokens, head_dim].
    """
    slots = part.slots + offset
    block_size = arena.units.shape[1]
    for axis, source in enumerate((key, value)):
        if part.tokens is None:
            lines = source[:, : len(slots)]
        else:
            lines = source.index_select(1, part.tokens)
        arena.slots.index_copy_(0, slots + axis * block_size, lines.transpose(0, 1).flatten(1))


class _LayerWork:
    """The attention of one layer in one arena."""

    def __init__(
        self,
        arena: ArenaView,
        layout: KVLayout,
        layer: int,
        window: int | None,
        softcap: float | None,
    ) -> None:
        self._arena = arena
        self._heads = layout.heads
        self._width = layout.head_dim
        self._k_unit = layer * 2
        self._window = window
        self._softcap = softcap

    def decode(self, query: torch.Tensor, rows: DecodeRows, out: torch.Tensor) -> None:
        """Attend for all rows of one token together: a batch entry is one tile of one row."""
        tiles = rows.tiles(self._window)
        count, group = len(tiles.tokens), query.shape[0] // self._heads
        lined = query.new_zeros(self._heads, count, padded(group), self._width)
        lined[:, :, :group] = (
            query[:, tiles.tokens].view(self._heads, group, count, -1).transpose(1, 2)
        )
        shape = (self._heads, tiles.count, lined.shape[2])
        top, mass = torch.empty(shape), torch.empty(shape)
        parts = torch.empty(*shape, self._width)
        begin = 0
        for tile_group in tiles.groups:
            part = slice(begin, begin + len(tile_group.row))
            top[:, part], mass[:, part], parts[:, part] = self._decode_group(lined, tile_group)
            begin = part.stop
        fold = _Fold(self._heads, count, lined.shape[2], width=self._width)
        for first, reach in tiles.depths:
            depth = slice(first, first + reach)
            fold.add(reach, top[:, depth], mass[:, depth], parts[:, depth])
        done = fold.result()[:, :, :group].transpose(1, 2).flatten(0, 1)
        out.index_copy_(0, tiles.tokens, done.transpose(0, 1))

    def _decode_group(
        self, lined: torch.Tensor, group: TileGroup
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return largest score, sum of exponentials and weighted values of each tile."""
        keys, values = self._gather(group.units)
        if group.beyond is not None:
            for scratch in (keys, values):  # 0 * NaN is NaN: what nobody wrote must be zero
                scratch.view(-1, self._heads * self._width).index_fill_(0, group.beyond, 0.0)
        spread = lined[:, group.row]
        scores = torch.empty(*spread.shape[:3], TILE)
        for head in range(self._heads):
            torch.bmm(spread[head], keys[:, :, head].transpose(1, 2), out=scores[head])
        self._cap(scores)
        if group.bias is not None:
            scores[:, : len(group.bias)].add_(group.bias)
        top, mass, weights = _weigh(scores)
        parts = torch.empty_like(spread)
        for head in range(self._heads):
            torch.bmm(weights[head], values[:, :, head], out=parts[head])
        return top, mass, parts

    def chunk(self, query: torch.Tensor, chunk: Chunk, out: torch.Tensor) -> None:
        """Attend for one row of several tokens, its heads' groups stacked into one product."""
        count, group = chunk.count, query.shape[0] // self._heads
        place = slice(chunk.begin, chunk.begin + count)
        stacked = query[:, place].reshape(self._heads, group * count, self._width)
        rows = padded(group * count)
        lined = query.new_zeros(self._heads, rows, self._width)
        lined[:, : group * count] = stacked
        fold = _Fold(self._heads, rows, width=self._width)
        for tile in chunk.tiles(self._window):
            keys, values = self._gather(chunk.units[tile])
            written = chunk.end - tile * TILE
            if written < TILE:
                keys[0, written:] = 0.0
                values[0, written:] = 0.0
            scores = torch.bmm(lined, keys[0].permute(1, 2, 0))
            self._cap(scores)
            bias = chunk.bias(tile, group, self._window)
            if bias is not None:
                scores[:, : group * count].add_(bias)
            top, mass, weights = _weigh(scores)
            fold.add(rows, top, mass, torch.bmm(weights, values[0].transpose(0, 1)))
        done = fold.result()[:, : group * count].reshape(-1, count, self._width)
        out[place] = done.transpose(0, 1)

    def _gather(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 K and V [tiles, TILE, heads, head_dim] of the units.

        They are scratch of the arena, valid until the next call: fresh memory for each tile would
        cost more in page faults than the copy itself.
        """
        shape = (-1, TILE, self._heads, self._width)
        keys = self._arena.read(0, units + self._k_unit)
        values = self._arena.read(1, units + (self._k_unit + 1))
        return keys.view(shape), values.view(shape)

    def _cap(self, scores: torch.Tensor) -> None:
        if self._softcap is not None:
            scores.div_(self._softcap).tanh_().mul_(self._softcap)


def _weigh(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of each query and tile: the largest score, the sum of exponentials, the weights.

    The sum comes from the softmax itself: its largest weight is exp(0) / sum.
    """
    top = scores.amax(-1)
    weights = torch.softmax(scores, -1)
    return top, weights.amax(-1).reciprocal_(), weights


class _Fold:
    """Joins tiles' parts in visiting order (the online softmax of Milakov & Gimelshein 2018)."""

    def __init__(self, heads: int, *rows: int, width: int) -> None:
        self._top = torch.full((heads, *rows), HIDDEN)
        self._mass = torch.zeros(heads, *rows)
        self._sum = torch.zeros(heads, *rows, width)

    def add(self, reach: int, top: torch.Tensor, mass: torch.Tensor, part: torch.Tensor) -> None:
        """Join one tile of the first ``reach`` rows: part [heads, reach, ..., head_dim]."""
        held = self._top[:, :reach]
        higher = torch.maximum(held, top)
        old = (held - higher).exp_()
        new = (top - higher).exp_().mul_(mass)
        self._sum[:, :reach].mul_(old.unsqueeze(-1)).add_(part.mul_(new.unsqueeze(-1)))
        self._mass[:, :reach].mul_(old).add_(new)
        held.copy_(higher)

    def result(self) -> torch.Tensor:
        """Return the attention output, float32."""
        return self._sum.div_(self._mass.unsqueeze(-1))


AttentionInterface.register(NAME, paged_attention)
