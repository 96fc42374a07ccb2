"""Locks that prove life: their exact form, and that only the kernel ends them."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator

import pytest

from baton.channel import locks
from baton.core.ids import INCARNATION_MAX


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    yield fd
    os.close(fd)


def again(fd: int) -> int:
    """Another open description of the same file."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def test_a_lock_is_seen_by_others_and_not_by_oneself(file: int) -> None:
    """Which is why an owner asks through the descriptor it has."""
    other = again(file)
    assert locks.lock(file, 7)
    assert locks.is_locked(other, 7)
    assert locks.is_any_locked(other)
    assert not locks.is_locked(file, 7)
    os.close(other)


@pytest.mark.parametrize("incarnation", [1, 2**32, INCARNATION_MAX])
def test_each_incarnation_has_its_own_byte(file: int, incarnation: int) -> None:
    """The whole range of incarnations fits behind the data; neighbours are free."""
    other = again(file)
    assert locks.lock(file, incarnation)
    assert not locks.lock(other, incarnation)
    assert not locks.is_locked(other, incarnation - 1)
    assert locks.lock(other, incarnation - 1)
    os.close(other)


def test_the_byte_is_at_the_documented_offset(file: int) -> None:
    """Another program that follows the document sees the same lock."""
    other = again(file)
    locks.lock(file, 1234)
    probe = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 2**62 + 1234, 1, 0)
    answer = struct.unpack("hhqqi4x", fcntl.fcntl(other, fcntl.F_OFD_GETLK, probe))
    assert answer == (fcntl.F_WRLCK, 0, 2**62 + 1234, 1, -1)
    os.close(other)


def test_opening_and_closing_the_file_elsewhere_does_not_drop_the_lock(file: int) -> None:
    """The trap of ordinary record locks: any close in the process drops them all."""
    other = again(file)
    locks.lock(file, 7)
    os.close(again(file))
    assert locks.is_locked(other, 7)
    os.close(other)


def test_the_lock_ends_with_the_last_descriptor_and_mapping_of_its_description(file: int) -> None:
    """A mapping alone keeps it: unmapping is what proves that no store can follow."""
    from baton.channel.mapping import Mapping

    os.posix_fallocate(file, 0, 8192)
    holder = again(file)
    locks.lock(holder, 7)
    mapping = Mapping(holder, 4096, 4096, writable=True)
    os.close(holder)
    assert locks.is_locked(file, 7)
    assert mapping.close()
    assert not locks.is_locked(file, 7)


def test_every_holder_is_named(file: int) -> None:
    """Whoever looks in from outside sees each incarnation that holds a byte, in order."""
    others = [again(file) for _ in range(4)]
    for other, incarnation in zip(others, (INCARNATION_MAX, 3, 2**40, 4), strict=True):
        assert locks.lock(other, incarnation)
    looking = again(file)
    assert locks.holders(looking) == [3, 4, 2**40, INCARNATION_MAX]
    for fd in others:
        os.close(fd)
    assert locks.holders(looking) == []
    os.close(looking)
