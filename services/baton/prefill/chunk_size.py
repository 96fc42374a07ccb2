"""How many prompt tokens one step computes, learned from the steps themselves.

Decides by feedback on measured time and not by a speed in tokens per second: a step reads all
weights whatever its length, so a speed measured on short chunks would ask for ever shorter ones.
"""

from __future__ import annotations

from dataclasses import dataclass

GROWTH = 1.25
SHRINK_MIN = 0.5


@dataclass(slots=True)
class ChunkSize:
    """Grows while steps stay below the limit, shrinks in proportion when one does not."""

    block_size: int
    tokens_max: int
    limit_s: float
    """A step should stay below this."""
    _wanted: float = 0.0

    def __post_init__(self) -> None:
        self._wanted = min(128.0, float(self.tokens_max))

    def rehearsed(self, tokens: int, seconds: float) -> None:
        """A step of ``tokens`` tokens took ``seconds`` before the first request: begin with as many
        if that is well below the limit."""
        if seconds * GROWTH * GROWTH < self.limit_s:
            self._wanted = max(self._wanted, min(float(tokens), float(self.tokens_max)))

    def tokens(self) -> int:
        """Return the budget of the next step: whole blocks, at least one."""
        whole = int(self._wanted)
        return max(self.block_size, whole - whole % self.block_size)

    def learn(self, tokens: int, seconds: float) -> None:
        """A step of ``tokens`` tokens took ``seconds``."""
        if seconds > self.limit_s:
            shrunk = min(tokens, self._wanted) * max(SHRINK_MIN, self.limit_s / seconds)
            self._wanted = max(float(self.block_size), shrunk)
        elif tokens >= self.tokens() and seconds * GROWTH < self.limit_s:
            self._wanted = min(float(self.tokens_max), self._wanted * GROWTH)
