"""Checksums: independent of the path, and sensitive to everything that matters."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from baton.channel.checksum import block_checksum, mismatches, seed_of
from baton.ports.engine import KVLayout
from support.channel_parts import CHAIN, LAYOUT, check_of, pattern

LAYOUTS = st.builds(
    KVLayout,
    layers=st.integers(1, 4),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8, 64]),
    block_size=st.integers(1, 16),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)

GOLDEN = [
    0x8355E3A6F61770DB,
    0x5FAF716CD9C7C34B,
    0x06CFC8AD660166A0,
]


def filled_bytes(block: bytes, layout: KVLayout, tokens: int) -> bytes:
    """The filled tokens' bytes, cut out by numpy from the documented shape."""
    width = layout.heads * layout.head_dim * layout.itemsize
    shaped = np.frombuffer(block, np.uint8).reshape(layout.layers, 2, layout.block_size, width)
    return shaped[:, :, :tokens].tobytes()


@given(layout=LAYOUTS, seed=st.integers(0, 2**64 - 1), data=st.data())
def test_the_sum_is_that_of_the_filled_tokens_in_memory_order(
    layout: KVLayout, seed: int, data: st.DataObject
) -> None:
    """Full and partial blocks follow one definition, whatever the shape."""
    tokens = data.draw(st.integers(1, layout.block_size))
    block = pattern(layout.block_bytes)
    expected = xxhash.xxh3_64_intdigest(filled_bytes(block, layout, tokens), seed=seed)
    assert block_checksum(memoryview(block), layout, tokens, seed) == expected


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_each_filled_byte_counts_and_no_other(tokens: int) -> None:
    """Every byte of the block is flipped once: filled ones change the sum, the rest do not."""
    positions = np.arange(LAYOUT.block_bytes, dtype=np.uint32).reshape(
        LAYOUT.layers, 2, LAYOUT.block_size, -1
    )
    filled = set(positions[:, :, :tokens].ravel().tolist())
    memory = memoryview(bytearray(pattern(LAYOUT.block_bytes)))
    check = check_of(memory, 0, tokens=tokens)
    for at in range(LAYOUT.block_bytes):
        memory[at] ^= 1 << at % 8
        assert (mismatches(memory, LAYOUT, [check]) != []) == (at in filled)
        memory[at] ^= 1 << at % 8
    assert mismatches(memory, LAYOUT, [check]) == []


def places_in_lanes(layout: KVLayout, tokens: int) -> set[int]:
    """Bytes of the filled tokens, element by element from the documented shapes."""
    side, width, size = 4 // layout.itemsize, layout.head_dim, layout.block_size
    found = set()
    for part, token, d in itertools.product(
        range(layout.layers * 2 * layout.heads), range(tokens), range(width)
    ):
        is_key = part // layout.heads % 2 == 0
        key = (d // side * size + token) * side + d % side
        value = (token // side * width + d) * side + token % side
        at = (part * width * size + (key if is_key else value)) * layout.itemsize
        found |= set(range(at, at + layout.itemsize))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_each_filled_byte_counts_in_lanes_too(dtype: str, tokens: int) -> None:
    """The same where filled and empty places lie side by side."""
    layout = KVLayout(layers=2, heads=2, head_dim=4, block_size=4, dtype=dtype, order="lanes")
    block = bytearray(pattern(layout.block_bytes))
    filled = places_in_lanes(layout, tokens)
    assert len(filled) == layout.block_bytes // 4 * tokens
    right = block_checksum(memoryview(block), layout, tokens, 7)
    for at in range(layout.block_bytes):
        block[at] ^= 1 << at % 8
        assert (block_checksum(memoryview(block), layout, tokens, 7) != right) == (at in filled)
        block[at] ^= 1 << at % 8


@given(chain=st.binary(min_size=16, max_size=16))
def test_another_name_has_another_seed(chain: bytes) -> None:
    """A name is that of all tokens before: another prefix or position is another name."""
    assert seed_of(chain) != seed_of(chain[1:] + bytes([chain[0] ^ 1]))


def test_two_swapped_blocks_are_both_wrong() -> None:
    """Right bytes under the wrong name do not pass."""
    memory = memoryview(bytearray(pattern(2 * LAYOUT.block_bytes)))
    chains = (CHAIN, CHAIN[::-1])
    checks = [check_of(memory, block, logical=block, chain=chains[block]) for block in (0, 1)]
    first = bytes(memory[: LAYOUT.block_bytes])
    memory[: LAYOUT.block_bytes] = memory[LAYOUT.block_bytes :]
    memory[LAYOUT.block_bytes :] = first
    assert mismatches(memory, LAYOUT, checks) == [0, 1]


def test_the_definition_does_not_change_by_accident() -> None:
    """Two processes of different versions would refuse all of each other's blocks."""
    block = memoryview(pattern(LAYOUT.block_bytes))
    seed = seed_of(CHAIN)
    got = [seed, *(block_checksum(block, LAYOUT, tokens, seed) for tokens in (1, 4))]
    assert got == GOLDEN
