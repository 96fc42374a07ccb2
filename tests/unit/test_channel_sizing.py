"""How large an arena becomes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.channel.sizing import AUTO_BYTES_MAX, MIB, Room, choose_size, room_in
from baton.ports.channel import ArenaTooSmall
from support.channel_parts import LAYOUT

ROOMY = Room(space=64 * 1024 * MIB, memory=64 * 1024 * MIB)


def test_an_asked_number_of_blocks_is_what_one_gets() -> None:
    """The number that fits is not rounded."""
    assert choose_size(LAYOUT, ROOMY, blocks=17).blocks_total == 17


@given(size_mb=st.integers(1, 4096))
def test_an_asked_size_is_used_up_and_not_exceeded(size_mb: int) -> None:
    """One block more would not fit into the megabytes asked for."""
    size = choose_size(LAYOUT, ROOMY, size_mb=size_mb)
    assert size.file_bytes <= size_mb * MIB
    bigger = choose_size(LAYOUT, ROOMY, blocks=size.blocks_total + 1)
    assert bigger.file_bytes > size_mb * MIB


def test_an_asked_size_that_does_not_fit_names_both_sizes() -> None:
    """Needed and available, in bytes, and which setting to change."""
    room = Room(space=64 * MIB, memory=1024 * MIB)
    with pytest.raises(ArenaTooSmall) as caught:
        choose_size(LAYOUT, room, size_mb=200)
    text = str(caught.value)
    assert "200 MiB asked for" in text
    assert str(64 * MIB) in text
    assert "size_mb" in text


@pytest.mark.parametrize(
    ("room", "most"),
    [
        (ROOMY, AUTO_BYTES_MAX),
        (Room(space=64 * MIB, memory=8192 * MIB), 32 * MIB),
        (Room(space=8192 * MIB, memory=400 * MIB), 100 * MIB),
    ],
)
def test_an_unset_size_takes_its_share_of_what_there_is_and_says_so(room: Room, most: int) -> None:
    """Half of the file system, a quarter of the memory, at most 1 GiB."""
    size = choose_size(LAYOUT, room)
    assert most * 0.99 < size.file_bytes <= most
    assert "no size set" in size.note
    assert f"{size.blocks_total} blocks" in size.note


def test_not_even_one_block_is_an_error() -> None:
    """An arena that can hold nothing is not created."""
    with pytest.raises(ArenaTooSmall):
        choose_size(LAYOUT, Room(space=8192, memory=8192))
    with pytest.raises(ArenaTooSmall):
        choose_size(LAYOUT, Room(space=0, memory=0), blocks=1)


def test_the_machine_tells_its_room() -> None:
    """Both numbers are real ones."""
    room = room_in(Path("/dev/shm"))
    assert room.memory > 0
    assert room.space > 0
