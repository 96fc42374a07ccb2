"""How long to wait before something that failed is started again.

Decides the policy that guards (for their worker) and the supervisor's restarter (for guards and the
ledger) share: at once after a good run, then after pauses that grow to a bound and are never given
up; never after an exit code that says that a restart cannot mend it.
"""

from __future__ import annotations

#: Exit codes after which a process stays down: somebody asked (0), or wrong settings (78).
FINAL_CODES = frozenset({0, 78})
#: A run of this length was a good one: the next failure is the first again.
STEADY_S = 10.0
PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 10.0


def pause_s(failures: int) -> float:
    """Return how long to wait before the restart after so many failures in a row, at least 1."""
    if failures <= 1:
        return 0.0
    # The exponent is bounded too: 2.0**2000 does not exist.
    return min(PAUSE_FIRST_S * 2.0 ** min(failures - 2, 16), PAUSE_MAX_S)
