"""An arena's memory: in huge pages where the kernel has them, and all there in any case."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.channel import huge_pages
from baton.channel.mapping import Mapping
from baton.core.pages import EXTENT, Pages

LENGTH = 5 * EXTENT + 3 * mmap.PAGESIZE


@pytest.fixture
def file() -> Iterator[int]:
    """An empty file without a name on the tmpfs where arenas are."""
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    yield fd
    os.close(fd)


def mapped_huge(fd: int) -> int:
    """Return the bytes of the file that this process has mapped in huge pages."""
    inode, here, found = str(os.fstat(fd).st_ino), False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            here = words[4] == inode
        elif here and words[0] == "ShmemPmdMapped:":
            found += int(words[1]) * 1024
    return found


def collapses() -> bool:
    """Whether this kernel puts the pages of a tmpfs together when it is asked to (Linux 6.1)."""
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    said = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return version >= (6, 1) and said.exists() and "[deny]" not in said.read_text()


def gives_now() -> bool:
    """Whether the kernel puts together an extent of this process's own memory at this moment."""
    memory = mmap.mmap(-1, 2 * EXTENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % EXTENT
    memory[start : start + EXTENT] = b"x" * EXTENT
    try:
        memory.madvise(25, start, EXTENT)  # MADV_COLLAPSE
    except OSError:
        return False
    return True


@pytest.mark.skipif(not collapses(), reason="no huge pages of a tmpfs here")
def test_whole_extents_are_huge_pages(file: int) -> None:
    """Every whole extent of the file is one page, in whichever mapping it is seen."""
    huge_pages.allocate(file, LENGTH)
    os.posix_fallocate(file, 0, LENGTH)
    whole = Mapping(file, 0, LENGTH, writable=True)
    if not mapped_huge(file) and not gives_now():
        pytest.skip("the kernel has no huge page to give just now")
    assert mapped_huge(file) == 5 * EXTENT
    assert whole.pages() == Pages(LENGTH, 5 * EXTENT)
    # A writer maps the blocks alone, which begin anywhere.
    blocks = Mapping(file, 7 * mmap.PAGESIZE, LENGTH - 7 * mmap.PAGESIZE, writable=True)
    assert mapped_huge(file) == (5 + 4) * EXTENT
    assert blocks.pages().huge_bytes == 4 * EXTENT
    blocks.view[0] = 1
    assert whole.view[7 * mmap.PAGESIZE] == 1
    del whole, blocks


@pytest.mark.skipif(not collapses(), reason="no huge pages of a tmpfs here")
def test_gaps_in_the_address_space(file: int) -> None:
    """A process that has run for long has gaps of every size; a map lies right all the same.

    There are 400 gaps between the sizes of a page and of two maps, most of them with room.
    """
    pages = LENGTH // mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    sizes = (mmap.PAGESIZE * (1 + at * 997 % (2 * pages)) for at in range(800))
    held = [mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ) for size in sizes]
    for gap in held[::2]:
        gap.close()
    os.ftruncate(file, LENGTH)
    maps = [huge_pages.map_aligned(file, at * mmap.PAGESIZE, 3 * EXTENT) for at in range(20)]
    for at, one in enumerate(maps):
        found = ctypes.addressof(ctypes.c_char.from_buffer(one))
        assert (found - at * mmap.PAGESIZE) % EXTENT == 0
        one.close()
    for rest in held[1::2]:
        rest.close()


def test_a_new_file_is_zero_and_all_there(file: int) -> None:
    """Huge pages or not: the length is right, every page allocated, and all bytes zero."""
    huge_pages.allocate(file, LENGTH)
    os.posix_fallocate(file, 0, LENGTH)
    found = os.fstat(file)
    assert found.st_size == LENGTH
    assert found.st_blocks * 512 == LENGTH
    mapping = Mapping(file, 0, LENGTH, writable=True)
    assert bytes(mapping.view) == bytes(LENGTH)
    assert mapping.close()


def test_a_file_of_less_than_an_extent(file: int) -> None:
    """There is nothing to put together, and nothing is allocated here."""
    huge_pages.allocate(file, mmap.PAGESIZE)
    assert os.fstat(file).st_size == mmap.PAGESIZE
    with huge_pages.map_aligned(file, 0, mmap.PAGESIZE) as mapping:
        assert mapping[:] == bytes(mmap.PAGESIZE)


def test_no_filler_stays(file: int) -> None:
    """What shifted a mapping is gone when it is given out."""
    os.ftruncate(file, LENGTH)
    held = [huge_pages.map_aligned(file, at * mmap.PAGESIZE, 2 * EXTENT) for at in range(3)]
    before = len(Path("/proc/self/maps").read_text().splitlines())
    one = huge_pages.map_aligned(file, 3 * mmap.PAGESIZE, 2 * EXTENT)
    after = len(Path("/proc/self/maps").read_text().splitlines())
    assert after <= before + 1
    for mapping in (*held, one):
        mapping.close()
