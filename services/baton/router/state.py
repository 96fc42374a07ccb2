"""What the parts of the router machine share: requests, queue, workers, the commands of one event.

Decides nothing but how long a refused client should wait.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field

from baton.core.ids import Peer
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.ports.driving import Measure, Note, Send
from baton.router.entry import Entry, WaitingQueue
from baton.router.placement import Placement
from baton.wire.messages import AnyMessage

RETRY_AFTER_MIN_MS = 1_000
RETRY_AFTER_MAX_MS = 30_000


@dataclass(slots=True)
class State:
    """Shared by the machine and its parts; one owner: the machine."""

    me: Peer
    limits: Limits
    placement: Placement
    entries: dict[str, Entry] = field(default_factory=dict)
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    gateways: set[Peer] = field(default_factory=set)
    lease: LeaseState = LeaseState.VACANT
    since: float = math.inf
    """When the lease was held for the first time: workers need a moment to open their links."""
    had_decode: bool = False
    """Whether a decode worker was ever there."""
    alone_since: float | None = None
    """Since when no decode worker takes anything."""
    draining: bool = False
    commands: list[object] = field(default_factory=list)
    queue_s: float = 0.0
    """Moving mean of the time from admission to placement: what Retry-After rests on."""

    def emit(self, command: object) -> None:
        self.commands.append(command)

    def send(self, peer: Peer, message: AnyMessage) -> None:
        if peer in self.gateways or peer in self.placement.workers:
            self.emit(Send(peer, message))

    def note(self, event: str, entry: Entry, level: str = "info", **fields: object) -> None:
        ids = {"request_id": entry.spec.request_id, "epoch": entry.epoch}
        self.emit(Note(event, {**ids, **fields}, level))

    def measure(self, name: str, value: float = 1.0, **labels: str) -> None:
        self.emit(Measure(name, value, labels))

    def of_gateway(self, gateway: Peer) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.spec.gateway == gateway]

    def jitter(self, entry: Entry) -> float:
        """Return 0.5 to 1, the same for a request each time: those that failed together do not
        come back together."""
        return 0.5 + zlib.crc32(entry.spec.request_id.encode()) / 2**33

    def starting(self, now: float) -> bool:
        """Whether workers may still be about to open their links to this router."""
        return (now - self.since) * 1000 < self.limits.lease_ttl_ms

    def returning(self, now: float) -> bool:
        """Whether the last decode worker left so lately that its successor may be on its way."""
        since = self.alone_since
        return self.had_decode and (since is None or not self.outwaits(now - since))

    def outwaits(self, waited_s: float) -> bool:
        """Whether that is longer than anybody waits for a successor."""
        return waited_s * 1000 > self.limits.recovery_ms

    def retry_after_ms(self, reason: Reason) -> int:
        if reason is Reason.TOO_LONG:
            return 0
        wait_s = max(self.queue_s, self.placement.drain_s(self.queue.tokens))
        return int(min(max(RETRY_AFTER_MIN_MS, wait_s * 1000), RETRY_AFTER_MAX_MS))
