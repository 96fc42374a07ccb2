"""Huge pages, as the kernel tells of them: how much of a mapping lies in pages of 2 MiB (ADR 26).

Decides how the text of ``/proc/self/smaps`` is read. Who reads it, and when, is the business of
those who map: weights in ``baton.engine.mapped``, arenas in ``baton.channel.mapping``.
"""

from __future__ import annotations

from dataclasses import dataclass

#: What one huge page holds on x86-64, and on arm64 with 4-KiB pages.
EXTENT = 2 << 20
#: Of files on disk, and of a tmpfs.
_HUGE = ("FilePmdMapped:", "ShmemPmdMapped:")


@dataclass(frozen=True, slots=True)
class Pages:
    """How one mapped file lies in memory."""

    total_bytes: int
    huge_bytes: int
    """Those of them in huge pages. The ends of a file never are."""

    @property
    def huge_share(self) -> float:
        """From 0 to 1."""
        return self.huge_bytes / self.total_bytes if self.total_bytes else 0.0


def pages_at(smaps: str, start: int, length: int) -> Pages:
    """Return how ``length`` bytes that are mapped from the address ``start`` on lie in memory.

    The kernel may tell of them in several pieces: one for each part that it was told something of.
    """
    huge, inside = 0, False
    for line in smaps.splitlines():
        word, *rest = line.split()
        if not word.endswith(":"):
            inside = start <= int(word.partition("-")[0], 16) < start + length
        elif inside and word in _HUGE:
            huge += int(rest[0]) * 1024
    return Pages(length, huge)
