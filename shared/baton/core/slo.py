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

    @property
    def step_s(self) -> float:
        """How long a step with a chunk of a prompt may be planned to take beside streams: some
        steps take longer than planned."""
        return 0.8 * self.itl_s
