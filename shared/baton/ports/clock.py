"""Where time and chance come from."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic time that counts suspend (CLOCK_BOOTTIME), in seconds."""

    def now(self) -> float: ...
