"""What a service promises its clients: how soon the first token comes, how evenly the others."""

from __future__ import annotations

from dataclasses import dataclass
from math import pow

#: So much of a gap may be a step; the rest is for the way to the client, which is uneven too.
PATH = 0.85
#: Of so many steps of a kind one takes longer than the *spread* says: so many times its usual time.
#: A request is as bad as its longest gap, and a prompt is computed in many steps.
ONE_OF = 100


@dataclass(frozen=True, slots=True)
class Slo:
    """Both in seconds; a request that keeps both counts as good."""

    ttft_s: float
    itl_s: float
    refuse: bool = False
    """Whether a request whose wait alone would break the first is refused at once."""

    def keeps(self, step_s: float, spread: float) -> bool:
        """Return whether streams stay within the second if their steps are expected to take so
        long: it is the longest gap that counts, and some steps take ``spread`` times as long. A
        little more than is planned is let pass."""
        return step_s <= PATH * 1.125 / spread * self.itl_s

    def risk(self, step_s: float, spread: float) -> float:
        """Return the chance that a step which is expected to take so long takes longer than streams
        bear. One in ``ONE_OF`` takes ``spread`` times as long, and of longer ones there are fewer
        by the same factor each time that this much is added."""
        room = PATH * self.itl_s / step_s - 1 if step_s > 0 else float("inf")
        return min(1.0, pow(ONE_OF, -min(room / (spread - 1), 10.0)))

    def broken(self, calm_s: float) -> bool:
        """Return whether streams break the second by themselves, beyond doubt, if their steps
        take ``calm_s`` with nothing beside them: then there is nothing to keep."""
        return calm_s > 1.1 * self.itl_s

    def step_s(self, calm_s: float, spread: float) -> float:
        """Return how long a step with a chunk of a prompt may be planned to take beside streams
        whose steps take ``calm_s`` without one, where some take ``spread`` times as long."""
        return 2 * calm_s if self.broken(calm_s) else PATH / spread * self.itl_s
