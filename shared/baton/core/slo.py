"""What a service promises its clients: how soon the first token comes, how evenly the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slo:
    """Both in seconds; a request that keeps both counts as good."""

    ttft_s: float
    itl_s: float
    refuse: bool = False
    """Whether a request whose wait alone would break the first is refused at once."""

    def step_s(self, calm_s: float) -> float:
        """Return how long a step with a chunk of a prompt may be planned to take beside streams
        whose steps take ``calm_s`` without one. Some take longer than planned. Where the streams
        break the SLO by themselves there is none to keep: then a step takes twice as long."""
        return 0.8 * self.itl_s if calm_s <= self.itl_s else 2 * calm_s
