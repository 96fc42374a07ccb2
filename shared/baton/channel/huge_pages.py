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
#: Maps that are tried until one lies well; a gap of the right size elsewhere costs one. As often a
#: piece is put together that could not be just now.
_TRIES = 8
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
    that was mounted without huge pages. It maps downwards from what is mapped already, so another
    mapping of the right size in between shifts this one.
    """
    between: list[mmap.mmap] = []
    try:
        while True:
            mapping = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, offset=offset)
            locks.shield(mapping)
            over = (_address(mapping) - offset) % EXTENT
            if over == 0 or length < EXTENT or len(between) == _TRIES:
                return mapping
            mapping.close()
            between.append(mmap.mmap(-1, over, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    finally:
        for filler in between:
            filler.close()


def pages_of(mapping: mmap.mmap) -> Pages:
    """Return how a mapping that may be written lies in memory."""
    return pages_at(Path("/proc/self/smaps").read_text(), _address(mapping), len(mapping))


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
