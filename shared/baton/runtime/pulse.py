"""The pulse of a worker: one page of memory that it shares with its guard.

Decides nothing. The worker's event loop stores the time at which it last ran; its guard reads it.
Each value is one aligned 8-byte word with one writer, so no lock is needed and none can be left
behind by a kill. The memory has no name and ends with both; its descriptor is how a guard that is
replaced hands it to the next one.
"""

from __future__ import annotations

import mmap
import os

_BEAT, _READY = 0, 1


class Pulse:
    """Made by the guard before it forks."""

    def __init__(self, fd: int | None = None) -> None:
        """Make a pulse, or map the one behind ``fd``."""
        if fd is None:
            fd = os.memfd_create("pulse")
            os.ftruncate(fd, mmap.PAGESIZE)
        self.fd = fd
        self._words = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("d")

    def reset(self) -> None:
        """Forget the former worker; it is dead, and the next one is not yet there."""
        self._words[_BEAT] = self._words[_READY] = 0.0

    def beat(self, now: float) -> None:
        """The event loop runs."""
        self._words[_BEAT] = now

    def ready(self) -> None:
        """The worker can do its work."""
        self._words[_READY] = 1.0

    @property
    def last_beat(self) -> float:
        """When the event loop last ran (CLOCK_BOOTTIME, seconds); 0.0: never yet."""
        return self._words[_BEAT]

    @property
    def is_ready(self) -> bool:
        return self._words[_READY] == 1.0
