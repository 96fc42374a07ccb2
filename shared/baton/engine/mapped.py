"""A file mapped for reading, in huge pages where the kernel has them for its file system.

Decides how weights get into the page cache. A core that streams through 4-KiB pages waits for
their addresses half of the time; a page of 2 MiB is translated once (ADR 26). Page cache is shared
whatever its pages look like, so this costs no memory. The kernel makes huge pages of a file when it
*reads* it for a mapping that asked for them, so what was cached in small ones (a file just written,
or read by somebody else) is dropped and read again. One extent is tried first: where a file system
has no huge pages, or another process maps the small ones, nothing more is read.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from baton.core.pages import EXTENT, Pages, pages_at

#: ``madvise`` value of Linux 5.14 and newer, which the mmap module does not name.
_MADV_POPULATE_READ = 22
#: A file counts as cached in huge pages with this share of it: its ends never are.
_ENOUGH = 0.9


def map_file(path: Path) -> mmap.mmap:
    """Map all of ``path``, shared and read-only, with every page present."""
    with path.open("rb") as file:
        fd = file.fileno()
        found = _mapped(fd)
        size = len(found)
        if size < 2 * EXTENT or pages_of(found).huge_share >= _ENOUGH:
            return found
        # Pages can be dropped only while they are not mapped.
        found.close()
        if _worth_it(fd, size // 2 // EXTENT * EXTENT):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return _mapped(fd)


def pages_of(mapping: mmap.mmap) -> Pages:
    """Return how a file's mapping lies in memory."""
    start = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    return pages_at(Path("/proc/self/smaps").read_text(), start, len(mapping))


def _worth_it(fd: int, at: int) -> bool:
    """Read one extent again; return whether it came in a huge page."""
    os.posix_fadvise(fd, at, EXTENT, os.POSIX_FADV_DONTNEED)
    with _mapped(fd, at, EXTENT) as extent:
        return pages_of(extent).huge_bytes == EXTENT


def _mapped(fd: int, offset: int = 0, length: int = 0) -> mmap.mmap:
    """Map ``length`` bytes (0: to the end), with every page present."""
    flags, prot = mmap.MAP_SHARED, mmap.PROT_READ
    found = mmap.mmap(fd, length, flags=flags, prot=prot, offset=offset)
    try:
        found.madvise(mmap.MADV_HUGEPAGE)
        found.madvise(_MADV_POPULATE_READ)
    except OSError:  # a kernel without huge pages, or an older one
        found.close()
        found = mmap.mmap(fd, length, flags=flags | mmap.MAP_POPULATE, prot=prot, offset=offset)
    return found
