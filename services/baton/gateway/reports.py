"""Collects reports of all linked processes for one scrape, within a bounded wait."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.core.ids import Peer
from baton.gateway.timers import Timers
from baton.gateway.vocabulary import Command, ReportsReady
from baton.ports.driving import Send
from baton.wire.messages import ReadReport, Report

#: A process that does not answer in this time is left out: a scrape must not wait for a hung one.
WAIT_S = 1.0
#: More scrapes at once get what this gateway knows alone.
COLLECTIONS_MAX = 16


@dataclass(slots=True)
class _Collection:
    kind: str
    missing: set[Peer]
    bodies: dict[str, bytes] = field(default_factory=dict)


class Reports:
    """Collections under way, by token."""

    def __init__(self) -> None:
        self._open: dict[int, _Collection] = {}
        self._timers = Timers()

    def begin(self, token: int, kind: str, peers: Iterable[Peer], now: float) -> list[Command]:
        """Ask every peer; answer at once if there is none to ask."""
        asked = set(peers)
        if not asked or token in self._open or len(self._open) >= COLLECTIONS_MAX:
            return [ReportsReady(token, {})]
        self._open[token] = _Collection(kind, asked)
        self._timers.set(str(token), now + WAIT_S)
        return [Send(peer, ReadReport(kind=kind, token=token)) for peer in sorted(asked)]

    def received(self, peer: Peer, report: Report) -> list[Command]:
        """Take one answer; late and unasked ones are dropped."""
        collection = self._open.get(report.token)
        if collection is None or peer not in collection.missing or report.kind != collection.kind:
            return []
        collection.missing.discard(peer)
        collection.bodies[peer.worker_id] = report.body
        return self._close(report.token) if not collection.missing else []

    def lost(self, peer: Peer) -> list[Command]:
        """A peer that is gone is not waited for."""
        done = []
        for token, collection in self._open.items():
            collection.missing.discard(peer)
            if not collection.missing:
                done.append(token)
        return [command for token in done for command in self._close(token)]

    def deadline(self) -> float | None:
        """When the longest waiting collection is closed."""
        return self._timers.next_at()

    def time_passed(self, now: float) -> list[Command]:
        """Close what has waited long enough with what came in."""
        return [command for key in self._timers.pop_due(now) for command in self._close(int(key))]

    def _close(self, token: int) -> list[Command]:
        self._timers.set(str(token), None)
        return [ReportsReady(token, self._open.pop(token).bodies)]

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._open) <= COLLECTIONS_MAX
        assert all(collection.missing for collection in self._open.values())
