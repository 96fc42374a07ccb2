"""When something is due: a heap of times by key, cheap to move.

Moving a time leaves the old entry in the heap; it is skipped when it comes up. A machine asks
``next_at`` after every event, so that must cost nothing with a thousand sessions.
"""

from __future__ import annotations

import heapq


class Timers:
    """Times by key; setting a key again replaces its time."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._due)

    def set(self, key: str, at: float | None) -> None:
        """Set or (with ``None``) forget the time of ``key``."""
        if at is None:
            self._due.pop(key, None)
        elif self._due.get(key) != at:
            self._due[key] = at
            heapq.heappush(self._heap, (at, key))

    def next_at(self) -> float | None:
        """Return the earliest time set."""
        while self._heap:
            at, key = self._heap[0]
            if self._due.get(key) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> list[str]:
        """Forget and return the keys whose time has come, earliest first."""
        keys = []
        while (at := self.next_at()) is not None and at <= now:
            _, key = heapq.heappop(self._heap)
            del self._due[key]
            keys.append(key)
        return keys
