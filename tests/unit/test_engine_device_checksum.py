"""Checksums of blocks on a device: one definition, in plain arithmetic."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
import xxhash

from baton.engine.device_checksum import DeviceChecksums, keys
from baton.ports.channel import BlockCheck
from baton.ports.engine import KVLayout
from support.channel_parts import CHAIN

LAYOUT = KVLayout(layers=2, heads=2, head_dim=4, block_size=4, dtype="bfloat16", place="device")
BLOCKS = 40


def memory() -> torch.Tensor:
    draw = np.random.default_rng(1)
    return torch.from_numpy(draw.integers(0, 256, BLOCKS * LAYOUT.block_bytes, dtype=np.uint8))


def plainly(blocks: torch.Tensor, block: int, tokens: int, chain: bytes = CHAIN) -> int:
    """The definition, in unsigned arithmetic that wraps."""
    shape = (LAYOUT.layers * 2, LAYOUT.block_size, LAYOUT.token_bytes_per_axis // 4)
    words = blocks.numpy().view(np.int32).reshape(BLOCKS, *shape)[block].astype(np.int64)
    table = keys(shape)
    total = 0
    for axis in range(shape[0]):
        for token in range(tokens):
            for word in range(shape[2]):
                total += int(words[axis, token, word]) * int(table[axis, token, word])
    signed = (total + 2**63) % 2**64 - 2**63
    seed = xxhash.xxh3_64_intdigest(chain)
    return xxhash.xxh3_64_intdigest(struct.pack("<qI", signed, tokens), seed=seed)


def test_it_is_the_sum_of_words_times_keys() -> None:
    """Of any number of tokens, of many blocks at once, in the order asked for."""
    blocks = memory()
    checks = [BlockCheck(n, (n * 7) % BLOCKS, 1 + n % 4, CHAIN) for n in range(BLOCKS)]
    found = DeviceChecksums(blocks, LAYOUT).of(checks)
    assert found == [plainly(blocks, check.block, check.tokens) for check in checks]
    assert DeviceChecksums(blocks, LAYOUT).of([]) == []


def test_keys_never_change() -> None:
    """They are part of what two processes agree on: odd, and these."""
    table = keys((2, 3, 4))
    assert (table & 1 == 1).all()
    assert xxhash.xxh3_64_hexdigest(table.tobytes()) == KEYS


#: Of Philox4x64-10 with key 27.
KEYS = "b07652e9b7bc20bc"


@pytest.mark.parametrize("bit", [0, 7, 31])
def test_every_single_changed_bit_shows(bit: int) -> None:
    """In each word of the filled tokens, and in no other."""
    blocks = memory()
    sums = DeviceChecksums(blocks, LAYOUT)
    check = BlockCheck(0, 3, 3, CHAIN)
    (before,) = sums.of([check])
    words = blocks.view(torch.int32).view(BLOCKS, LAYOUT.layers * 2, LAYOUT.block_size, -1)
    mask = np.uint32(1 << bit).astype(np.int32).item()
    for axis in range(LAYOUT.layers * 2):
        for token in range(LAYOUT.block_size):
            words[3, axis, token, 1] ^= mask
            (now,) = sums.of([check])
            assert (now != before) == (token < 3)
            words[3, axis, token, 1] ^= mask


def test_words_that_change_places_show() -> None:
    """A sum without keys would not see it."""
    blocks = memory()
    sums = DeviceChecksums(blocks, LAYOUT)
    (before,) = sums.of([BlockCheck(0, 0, 4, CHAIN)])
    words = blocks.view(torch.int32)
    words[0], words[1] = words[1].clone(), words[0].clone()
    assert sums.of([BlockCheck(0, 0, 4, CHAIN)]) != [before]


def test_name_and_number_of_tokens_go_in() -> None:
    """The same words under another name, or as fewer tokens followed by zeros, are others."""
    blocks = memory()
    blocks.view(BLOCKS, -1)[0] = 0
    sums = DeviceChecksums(blocks, LAYOUT)
    checks = [
        BlockCheck(0, 0, 4, CHAIN),
        BlockCheck(0, 0, 3, CHAIN),
        BlockCheck(0, 0, 4, bytes(16)),
    ]
    assert len(set(sums.of(checks))) == 3
