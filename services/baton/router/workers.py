"""One worker as its router sees it.

Decides how long one that failed is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.ids import Peer, Role
from baton.wire.messages import WorkerStatus

AVOID_FIRST_S = 0.2
AVOID_MAX_S = 10.0


@dataclass(slots=True)
class WorkerView:
    """One worker incarnation: what it last said, and what it was given since."""

    peer: Peer
    role: Role
    status: WorkerStatus
    since: float
    """When its link opened."""
    host: str
    """Workers of one host can read each other's arenas."""
    placed: int = 0
    """Given since the last status."""
    placed_blocks: int = 0
    placed_tokens: int = 0
    failures: int = 0
    """Failed attempts in a row."""
    avoid_until: float = 0.0
    changes: int = 0
    """Counts whatever was heard of it or given to it."""

    def refresh(self, status: WorkerStatus) -> None:
        self.status = status
        self.changes += 1
        self.placed = self.placed_blocks = self.placed_tokens = 0

    def given(self) -> None:
        """A request goes there."""
        self.placed += 1
        self.changes += 1

    def failed(self, now: float) -> None:
        """It failed an attempt: leave it alone for a while if there is another."""
        self.failures += 1
        self.changes += 1
        wait = min(AVOID_FIRST_S * 2.0 ** min(self.failures - 1, 10), AVOID_MAX_S)
        self.avoid_until = now + wait

    def succeeded(self) -> None:
        self.failures = 0
        self.changes += 1
        self.avoid_until = 0.0

    @property
    def free_blocks(self) -> int:
        return self.status.blocks_free - self.placed_blocks

    @property
    def capacity_tokens(self) -> int:
        return self.status.blocks_total * self.status.block_size
