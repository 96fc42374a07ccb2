"""Checksums of blocks on a device: what is summed there, and what becomes of the sum on the host.

Decides one definition (ADR 27): of the filled tokens' 32-bit words, each times the odd 64-bit key
of its place in the block, the sum modulo 2^64. Such a sum is exact in any order, so every device,
kernel and split gives the same. One changed word never goes unseen (its key is odd, the difference
below 2^32); several do with a chance of 2^-32 at most. What it becomes with the number of tokens,
seeded with the block's name like a checksum on the host, is the checksum.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from baton.ports.channel import BlockCheck
from baton.ports.engine import KVLayout

_KEY = 27
#: Bytes of blocks summed at once; what is computed in between takes four times as much.
_PIECE_BYTES = 32 * 2**20
_TOLD = struct.Struct("<qI")


class DeviceChecksums:
    """Makes the checksums of one arena's blocks. May be used by several threads."""

    def __init__(self, blocks: torch.Tensor, layout: KVLayout) -> None:
        """``blocks``: uint8, whole blocks in order of tokens."""
        assert layout.order == "tokens" and layout.token_bytes_per_axis % 4 == 0
        self._shape = (layout.layers * 2, layout.block_size, layout.token_bytes_per_axis // 4)
        self._words = blocks.view(torch.int32).view(-1, *self._shape)
        self._size = layout.block_size
        self._at_once = max(1, _PIECE_BYTES // layout.block_bytes)
        self._keys = torch.from_numpy(keys(self._shape)).to(blocks.device)

    @torch.inference_mode()
    def of(self, checks: Sequence[BlockCheck]) -> list[int]:
        """Return the checksum of each block's filled tokens."""
        found: dict[int, int] = {}
        by_tokens: dict[int, list[int]] = defaultdict(list)
        for number, check in enumerate(checks):
            assert 1 <= check.tokens <= self._size, f"no such tokens: {check}"
            by_tokens[check.tokens].append(number)
        for tokens, numbers in by_tokens.items():
            for at in range(0, len(numbers), self._at_once):
                part = numbers[at : at + self._at_once]
                sums = self._sums([checks[number].block for number in part], tokens)
                found.update(zip(part, sums, strict=True))
        return [told(found[n], check.tokens, check.chain) for n, check in enumerate(checks)]

    def _sums(self, blocks: Sequence[int], tokens: int) -> list[int]:
        chosen = torch.tensor(blocks, device=self._words.device)
        words = self._words.index_select(0, chosen)[:, :, :tokens].to(torch.int64)
        sums: list[int] = words.mul_(self._keys[:, :tokens]).sum((1, 2, 3)).tolist()
        return sums


def keys(shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the key of each word: odd, the same everywhere and for ever."""
    count = int(np.prod(shape))
    raw = np.asarray(np.random.Philox(key=_KEY).random_raw(count), dtype=np.uint64)
    return (raw | np.uint64(1)).view(np.int64).reshape(shape)


def told(total: int, tokens: int, chain: bytes) -> int:
    """Return the checksum that a device's sum becomes; the seed is a host checksum's."""
    return xxhash.xxh3_64_intdigest(_TOLD.pack(total, tokens), seed=xxhash.xxh3_64_intdigest(chain))
