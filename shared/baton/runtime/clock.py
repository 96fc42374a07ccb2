"""The one place that reads a clock for decisions: monotonic, and counting suspend."""

from __future__ import annotations

import time


class BootClock:
    """CLOCK_BOOTTIME, in seconds (see ``baton.ports.clock.Clock``)."""

    def now(self) -> float:
        """Return seconds since the host's boot."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
