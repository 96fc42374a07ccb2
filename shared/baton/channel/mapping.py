"""Memory maps whose lifetime is that of the views into them.

Decides how an arena's pages are mapped and when they go. Views are given out as memoryviews that
nobody ever releases by force: torch keeps a pointer and a reference, not a buffer export, so a
forced release would unmap pages it still uses. Closing drops our own references; if a view lives,
the mapping (and with it the lock) stays exactly as long as that view.
"""

from __future__ import annotations

import errno
import mmap

from baton.channel import locks
from baton.channel.huge_pages import map_aligned, pages_of
from baton.core.pages import Pages

#: ``madvise`` values of Linux 5.14 and newer, which the mmap module does not name.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
#: Populated at once. CPython holds its lock in madvise, so other threads wait for one piece only.
_PIECE = 8 * 2**20


class Mapping:
    """One shared mapping of ``[offset, offset + length)`` of an open arena file, all page aligned.

    Every page is present in the page table when it exists, so that no request pays for faults.
    """

    def __init__(self, fd: int, offset: int, length: int, *, writable: bool) -> None:
        self._map: mmap.mmap | None = _map_populated(fd, offset, length, writable=writable)
        self._view: memoryview | None = memoryview(self._map)

    @property
    def view(self) -> memoryview:
        """All of it. Whoever keeps a slice keeps the pages."""
        assert self._view is not None, "arena is closed"
        return self._view

    def pages(self) -> Pages:
        """Return how it lies in memory; only of one that may be written."""
        assert self._map is not None, "arena is closed"
        return pages_of(self._map)

    def close(self) -> bool:
        """Unmap, or leave that to the last view. Return whether it is unmapped now."""
        mapping, self._map, self._view = self._map, None, None
        if mapping is None:
            return True
        try:
            mapping.close()
        except BufferError:
            return False  # the last view holds the map object, whose end unmaps
        return True


def _map_populated(fd: int, offset: int, length: int, *, writable: bool) -> mmap.mmap:
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    if writable:
        mapping = map_aligned(fd, offset, length)
    else:
        mapping = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=prot, offset=offset)
        locks.shield(mapping)
    try:
        for start in range(0, length, _PIECE):
            mapping.madvise(advice, start, min(_PIECE, length - start))
    except OSError as error:
        mapping.close()
        if error.errno != errno.EINVAL:
            raise
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # an older kernel: all at once
        mapping = mmap.mmap(fd, length, flags=flags, prot=prot, offset=offset)
        locks.shield(mapping)
    return mapping
