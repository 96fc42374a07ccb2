"""Huge pages for arenas: half of a decode step over 4-KiB pages is waiting for their addresses.

Decides how a file on a tmpfs gets them whatever that tmpfs was mounted with: its pages are put
together when they are allocated (``MADV_COLLAPSE``, Linux 6.1), which also takes less time than
allocating them one by one. Where the kernel has none to give, or is older, small pages serve. Knows
nothing of what lies in the file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from baton.channel import locks
from baton.core.pages import EXTENT, Pages, pages_at

_MADV_COLLAPSE = 25
#: Put together by one call, each of which waits for all cores once.
_PIECE = 32 * EXTENT
#: As often a piece is put together that could not be just now.
_TRIES = 8
#: Gaps that are used up until a map lies well.
_GAPS = 1024
#: A page was in use, there was no memory in one piece, or not for this control group.
_PASSING = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EBUSY})


def allocate(fd: int, length: int) -> None:
    """Allocate the huge pages of an empty file that will be ``length`` bytes long.

    Raises:
        OSError: there is no room.
    """
    os.ftruncate(fd, length)
    whole = length // EXTENT * EXTENT
    if not whole:
        return
    with map_aligned(fd, 0, whole) as mapping:
        for start in range(0, whole, _PIECE):
            size = min(_PIECE, whole - start)
            # The kernel leaves an extent alone of which nothing is there yet.
            for at in range(start, start + size, EXTENT):
                os.posix_fallocate(fd, at, mmap.PAGESIZE)
            if not _collapse(mapping, start, size):
                return


def _collapse(mapping: mmap.mmap, start: int, size: int) -> bool:
    """Put a piece together; return whether it is worth going on with the next one."""
    last = 0
    for _ in range(_TRIES):
        try:
            mapping.madvise(_MADV_COLLAPSE, start, size)
        except OSError as error:
            if error.errno not in _PASSING:
                return False
            last = error.errno
        else:
            return True
    return last == errno.EAGAIN


def map_aligned(fd: int, offset: int, length: int) -> mmap.mmap:
    """Map for reading and writing; extents of the file are extents of memory if that can be had.

    A huge page is mapped as one only where it lies so, and the kernel does not see to it on a tmpfs
    that was mounted without huge pages. It puts a map at the end of the highest gap with room. So
    one that lies wrong is kept for the moment, with as much below it as shifts the next one into
    place: if it comes into the same gap it lies right, otherwise that gap is used up. What is put
    below is as long as the map at least, or it would go into a gap that is too small for the map.
    """
    between: list[mmap.mmap] = []
    try:
        while True:
            mapping = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, offset=offset)
            locks.shield(mapping)
            over = (_address(mapping) - offset) % EXTENT
            if over == 0 or length < EXTENT or len(between) >= 2 * _GAPS:
                return mapping
            below = length + (over - 2 * length) % EXTENT
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            between += mapping, mmap.mmap(-1, below, flags=flags, prot=mmap.PROT_READ)
    finally:
        for filler in between:
            filler.close()


def pages_of(mapping: mmap.mmap) -> Pages:
    """Return how a mapping that may be written lies in memory."""
    return pages_at(Path("/proc/self/smaps").read_text(), _address(mapping), len(mapping))


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
