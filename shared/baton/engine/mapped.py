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

#: What one huge page holds on x86-64, and on arm64 with 4-KiB pages.
EXTENT = 2 << 20
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
        if size < 2 * EXTENT or huge_bytes(found) >= _ENOUGH * size:
            return found
        # Pages can be dropped only while they are not mapped.
        found.close()
        if _worth_it(fd, size // 2 // EXTENT * EXTENT):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return _mapped(fd)


def huge_bytes(mapping: mmap.mmap) -> int:
    """Return how many bytes of a file's mapping are in huge pages."""
    start = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    return sum(size for first, size in _huge_maps() if start <= first < start + len(mapping))


def _huge_maps() -> list[tuple[int, int]]:
    """Return the start of each of this process's mappings, and its bytes in files' huge pages."""
    found, first = [], 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, *rest = line.split()
        if word == "FilePmdMapped:":
            found.append((first, int(rest[0]) * 1024))
        elif "-" in word and not word.endswith(":"):
            first = int(word.partition("-")[0], 16)
    return found


def _worth_it(fd: int, at: int) -> bool:
    """Read one extent again; return whether it came in a huge page."""
    os.posix_fadvise(fd, at, EXTENT, os.POSIX_FADV_DONTNEED)
    with _mapped(fd, at, EXTENT) as extent:
        return huge_bytes(extent) == EXTENT


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
