"""One worker as its router sees it.

Decides how long one that failed, or ended again and again, is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.ids import Peer, Role
from baton.wire.messages import WorkerStatus

if TYPE_CHECKING:
    from baton.router.entry import Entry

AVOID_FIRST_S = 0.2
AVOID_MAX_S = 10.0


@dataclass(slots=True)
class Health:
    """How a worker did lately, under its stable name: who starts again is not a better one."""

    failures: int = 0
    """Failed attempts and unasked-for ends in a row."""
    avoid_until: float = 0.0

    def failed(self, now: float) -> None:
        """It failed an attempt: leave it alone for a while if there is another."""
        self.failures += 1
        self._avoid(self.failures, now)

    def died(self, now: float) -> None:
        """It ended unasked. One death is nobody's habit, and what it had is in its successor's
        reach; from the second in a row on it counts."""
        self.failures += 1
        if self.failures > 1:
            self._avoid(self.failures - 1, now)

    def _avoid(self, steps: int, now: float) -> None:
        self.avoid_until = now + min(AVOID_FIRST_S * 2.0 ** min(steps - 1, 10), AVOID_MAX_S)

    def succeeded(self) -> None:
        """It had a part in an answer that is complete."""
        self.failures = 0
        self.avoid_until = 0.0


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
    health: Health = field(default_factory=Health)
    placed: int = 0
    """Given since the last status."""
    placed_joining: int = 0
    """Those of them whose prompt a prefill worker computes."""
    placed_blocks: int = 0
    placed_tokens: int = 0
    leaving: bool = False
    """It took work and says that it takes no more: its end is no failure."""
    sent: dict[str, Entry] = field(default_factory=dict)
    """Requests that this router placed there and that have not left."""
    changes: int = 0
    """Counts whatever was heard of it or given to it."""

    def refresh(self, status: WorkerStatus) -> None:
        self.leaving = not status.accepting and (self.leaving or self.status.accepting)
        self.status = status
        self.changes += 1
        self.placed = self.placed_joining = self.placed_blocks = self.placed_tokens = 0

    def given(self) -> None:
        """A request goes there."""
        self.placed += 1
        self.changes += 1

    def failed(self, now: float) -> None:
        """It failed an attempt."""
        self.health.failed(now)
        self.changes += 1

    def succeeded(self) -> None:
        """It had a part in an answer that is complete."""
        self.health.succeeded()
        self.changes += 1

    @property
    def joining(self) -> int:
        """How many are being handed over to a decode worker."""
        return self.status.joining + self.placed_joining

    @property
    def idle(self) -> bool:
        """Whether it computes nothing, as far as is known here, and so lends its cores."""
        status = self.status
        return not (status.running or status.waiting or status.queued_tokens or self.placed)

    @property
    def free_blocks(self) -> int:
        return self.status.blocks_free - self.placed_blocks

    @property
    def capacity_tokens(self) -> int:
        return self.status.blocks_total * self.status.block_size
