"""When a process tells the others how it is: at every beat, and soon after a change.

Decides the pace only. A change is told at once if nothing was told for ``pause_s``, else when that
time is over, so that a burst of changes costs its receivers one message.
"""

from __future__ import annotations

from dataclasses import dataclass

NEVER = float("-inf")


@dataclass(slots=True)
class Beacon:
    """One per kind of report; ``now`` in seconds."""

    beat_s: float
    pause_s: float
    _told: object = None
    _told_at: float = NEVER
    _changed: bool = False

    def must_tell(self, state: object, now: float) -> bool:
        """Whether ``state`` is to be told now; if so it counts as told."""
        self._changed = state != self._told
        wait = self.pause_s if self._changed else self.beat_s
        if now < self._told_at + wait:  # the very sum of deadline(): else it is asked for ever
            return False
        self._told, self._told_at, self._changed = state, now, False
        return True

    def forget(self) -> None:
        """Somebody new listens, or it cannot wait: the next state is told at once."""
        self._told, self._told_at = None, NEVER

    def deadline(self) -> float:
        """Return when :meth:`must_tell` is to be asked again at the latest."""
        return self._told_at + (self.pause_s if self._changed else self.beat_s)
