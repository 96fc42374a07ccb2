"""Checksums of blocks: what is covered and what seeds them.

Decides one definition: xxh3-64 over the filled tokens only, seeded with the block's name: the hash
of all tokens up to its last filled one. A full block is a single run of bytes. Of a partial one, in
the order ``tokens``, the ``layers * 2`` runs are hashed one after the other, which for a full block
is the same; in the order ``lanes``, first K of all layers as it lies, then V token by token. Wrong
bytes, fewer or more tokens, other tokens, another prefix or position all differ.

Nothing of the place goes in, neither number nor generation: a full block's checksum is the same in
every arena and may be stored beside its name, so that whoever reads both can verify the bytes.

No interpreter lock is held while large runs are hashed, so it may run beside the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from baton.channel.layout import CHAIN_BYTES
from baton.ports.channel import BlockCheck
from baton.ports.engine import KVLayout


def seed_of(chain: bytes) -> int:
    """Return the 64-bit seed that binds a checksum to a block's name."""
    assert len(chain) == CHAIN_BYTES
    return xxhash.xxh3_64_intdigest(chain)


def block_checksum(block: memoryview, layout: KVLayout, tokens: int, seed: int) -> int:
    """Return the checksum of the first ``tokens`` tokens of one block (``block_bytes`` bytes)."""
    assert 1 <= tokens <= layout.block_size
    assert len(block) == layout.block_bytes
    if tokens == layout.block_size:
        return xxhash.xxh3_64_intdigest(block, seed=seed)
    hasher = xxhash.xxh3_64(seed=seed)
    filled = _runs if layout.order == "tokens" else _lanes
    for part in filled(block, layout, tokens):
        hasher.update(part)
    return hasher.intdigest()


def _runs(block: memoryview, layout: KVLayout, tokens: int) -> Iterator[memoryview]:
    run = tokens * layout.token_bytes_per_axis
    stride = layout.block_size * layout.token_bytes_per_axis
    for start in range(0, layout.block_bytes, stride):
        yield block[start : start + run]


def _lanes(block: memoryview, layout: KVLayout, tokens: int) -> Iterator[Any]:
    """Yield copies: filled and empty places lie side by side."""
    side = 4 // layout.itemsize
    size, width = layout.block_size, layout.head_dim
    parts = np.frombuffer(block, f"u{layout.itemsize}").reshape(layout.layers, 2, layout.heads, -1)
    lines = (layout.layers, layout.heads)
    keys = parts[:, 0].reshape(*lines, width // side, size, side)
    yield np.ascontiguousarray(keys[:, :, :, :tokens])
    values = parts[:, 1].reshape(*lines, size // side, width, side).swapaxes(-1, -2)
    yield np.ascontiguousarray(values.reshape(*lines, size, width)[:, :, :tokens])


def checksum_in(blocks: memoryview, layout: KVLayout, check: BlockCheck) -> int:
    """Return the checksum of ``check``'s block within an arena's block area."""
    blocks_total = len(blocks) // layout.block_bytes
    assert plausible(check, layout, blocks_total), f"no such block or tokens: {check}"
    at = check.block * layout.block_bytes
    return block_checksum(
        blocks[at : at + layout.block_bytes],
        layout,
        check.tokens,
        seed_of(check.chain),
    )


def mismatches(blocks: memoryview, layout: KVLayout, checks: Sequence[BlockCheck]) -> list[int]:
    """Return the logical numbers whose bytes do not match."""

    def sums(sound: Sequence[BlockCheck]) -> list[int]:
        return [checksum_in(blocks, layout, check) for check in sound]

    return unmatched(checks, layout, len(blocks) // layout.block_bytes, sums)


def unmatched(
    checks: Sequence[BlockCheck],
    layout: KVLayout,
    blocks_total: int,
    sums: Callable[[Sequence[BlockCheck]], Sequence[int]],
) -> list[int]:
    """Return the logical numbers of the checks that ``sums``, of those that can be, contradicts.

    A check that cannot be true (more tokens than a block has, a number out of range) came from a
    peer's message, so it is a mismatch, not a bug.
    """
    sound = [
        number for number, check in enumerate(checks) if plausible(check, layout, blocks_total)
    ]
    found = dict(zip(sound, sums([checks[number] for number in sound]), strict=True))
    return [
        check.logical for number, check in enumerate(checks) if found.get(number) != check.checksum
    ]


def plausible(check: BlockCheck, layout: KVLayout, blocks_total: int) -> bool:
    """Whether there is such a block, with so many tokens."""
    return (
        0 <= check.block < blocks_total
        and 1 <= check.tokens <= layout.block_size
        and len(check.chain) == CHAIN_BYTES
    )
