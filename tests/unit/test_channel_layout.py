"""The arena file's layout: what is packed comes back, what is damaged is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.channel.layout import (
    IDENTITY_MASK,
    PAGE,
    RECORD_BYTES,
    SLOT,
    BadHeader,
    Header,
    Records,
    filling,
    make_header,
    offsets,
    pack_header,
    pack_word,
    slot_of,
    unpack_header,
    unpack_word,
)
from baton.core.lifecycles import BlockState
from baton.ports.channel import BlockMark
from support.channel_parts import CHAIN, COMPAT, LAYOUT, OWNER, WRITER

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
STATES = st.sampled_from(BlockState)


def page_of(first: bytes, second: bytes = b"") -> bytes:
    return first.ljust(SLOT, b"\0") + second.ljust(SLOT, b"\0")


def header(blocks_total: int = 10) -> Header:
    return make_header(
        cluster="test",
        owner=OWNER,
        pid=1,
        file_id="f" * 32,
        layout=LAYOUT,
        compat=COMPAT,
        blocks_total=blocks_total,
    )


@given(
    blocks=st.integers(1, 10**6), block_bytes=st.integers(1, 10**7), journal=st.integers(0, 10**7)
)
def test_regions_are_page_aligned_and_do_not_overlap(
    blocks: int, block_bytes: int, journal: int
) -> None:
    """Header, records, journal and blocks follow one another with room for each."""
    journal_at, blocks_at, end = offsets(blocks, block_bytes, journal)
    assert journal_at % PAGE == blocks_at % PAGE == end % PAGE == 0
    assert journal_at >= PAGE + blocks * RECORD_BYTES
    assert blocks_at >= journal_at + journal
    assert end >= blocks_at + blocks * block_bytes


@given(st.integers(1, 10**6))
def test_a_header_comes_back_as_it_was_packed(blocks: int) -> None:
    """One slot of the page holds it all."""
    slot = pack_header(header(blocks))
    assert len(slot) == SLOT
    assert unpack_header(page_of(slot)) == header(blocks)


def test_every_damaged_byte_of_the_header_is_noticed() -> None:
    """Each byte that carries meaning is covered by magic, version, length or checksum."""
    page = page_of(pack_header(header()))
    for at in range(len(page.rstrip(b"\0"))):
        damaged = bytearray(page)
        damaged[at] ^= 0x10
        with pytest.raises(BadHeader):
            unpack_header(bytes(damaged))


def test_the_newest_whole_header_counts_and_a_torn_one_does_not() -> None:
    """A new owner's header goes beside the old one; cut off anywhere it changes nothing."""
    old = header()
    new = msgspec.structs.replace(old, sequence=1, owner=WRITER, pid=2)
    newest = msgspec.structs.replace(new, sequence=2, pid=3)
    assert (slot_of(old), slot_of(new), slot_of(newest)) == (0, SLOT, 0)
    first, second = pack_header(old), pack_header(new)
    assert unpack_header(page_of(first, second)) == new
    for cut in range(len(second.rstrip(b"\0"))):
        assert unpack_header(page_of(first, second[:cut])) == old
    third = pack_header(newest)
    assert unpack_header(page_of(third, second)) == newest
    for cut in range(len(third.rstrip(b"\0"))):
        torn = third[:cut] + first[cut:]
        assert unpack_header(page_of(torn, second)) == new


@pytest.mark.parametrize("page", [b"", b"BATONKV\n", b"\0" * PAGE, b"\xff" * PAGE])
def test_what_is_no_header_is_refused(page: bytes) -> None:
    """Empty, short and foreign files."""
    with pytest.raises(BadHeader):
        unpack_header(page)


@pytest.mark.parametrize(
    "change",
    [
        {"blocks_total": 0},
        {"blocks_total": 2**40},
        {"block_bytes": 1},
        {"journal_bytes": PAGE},
        {"blocks_offset": 0},
        {"records_offset": 2 * PAGE},
        {"file_bytes": PAGE},
    ],
)
def test_a_header_that_contradicts_itself_is_refused(change: dict[str, int]) -> None:
    """A checksum proves who wrote it, not that the offsets make sense."""
    with pytest.raises(BadHeader, match="offsets"):
        unpack_header(page_of(pack_header(msgspec.structs.replace(header(), **change))))


def test_names_too_long_for_the_page_are_an_error() -> None:
    """Nothing is cut off."""
    long = msgspec.structs.replace(
        header(), compat=msgspec.structs.replace(COMPAT, layout="x" * PAGE)
    )
    with pytest.raises(BadHeader, match="does not fit"):
        pack_header(long)


@given(U32, STATES, U16)
def test_a_word_holds_generation_state_and_filled(
    generation: int, state: BlockState, filled: int
) -> None:
    """64 bits are enough, and no field runs into another."""
    word = pack_word(generation, state, filled)
    assert 0 <= word < 2**64
    assert unpack_word(word) == (generation, state, filled)
    assert (word & IDENTITY_MASK == filling(generation)) == (state is BlockState.FILLING)


def test_an_unknown_state_is_an_error() -> None:
    """A number that no version of the table has is not read as some state."""
    with pytest.raises(ValueError, match="99"):
        unpack_word(99 << 32)


MARKS = st.builds(
    BlockMark,
    block=st.integers(0, 3),
    state=STATES,
    generation=U32,
    epoch=U64,
    writer=U64,
    chain=st.sampled_from([b"", CHAIN]),
    checksum=U64,
    filled=U16,
    request_key=U64,
)


@given(MARKS)
def test_a_record_comes_back_and_its_neighbours_stay(mark: BlockMark) -> None:
    """Storing one record touches its own 64 bytes only."""
    region = memoryview(bytearray(4 * RECORD_BYTES))
    records = Records(region, 4)
    block = mark.block
    records.store(mark)
    assert records.load(block) == mark
    rest = bytes(region[: block * RECORD_BYTES]) + bytes(region[(block + 1) * RECORD_BYTES :])
    assert not any(rest)


@pytest.mark.parametrize("block", [-1, 4])
def test_a_mark_outside_the_arena_is_a_bug(block: int) -> None:
    """A negative number would otherwise reach the last record."""
    records = Records(memoryview(bytearray(4 * RECORD_BYTES)), 4)
    with pytest.raises(AssertionError, match="no block"):
        records.store(BlockMark(block, BlockState.FREE, 1))
