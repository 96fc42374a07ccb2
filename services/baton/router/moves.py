"""Requests whose KV outlives its owner's work on them: lost decode workers, and draining ones.

Decides whose arena the next attempt may start from, when a draining worker's request moves, and how
long its blocks are kept for that. Where it goes is decided in ``placement.py``.
"""

from __future__ import annotations

from baton.core.ids import Peer
from baton.core.outcomes import Reason
from baton.router.entry import Entry, Phase
from baton.router.state import State
from baton.wire.messages import CancelWork, MoveOffered


class Moves:
    """All sources of one router's requests."""

    def __init__(self, state: State) -> None:
        self.state = state
        #: Offered by draining workers, oldest offer first.
        self.offered: dict[str, Entry] = {}
        #: Blocks are kept for these.
        self.keeping: dict[str, Entry] = {}

    def offer(self, entry: Entry, message: MoveOffered) -> None:
        """Its decode worker drains and would give it away."""
        entry.grown = min(message.tokens, entry.spec.prompt_tokens + entry.spec.max_tokens)
        self.offered[entry.spec.request_id] = entry

    def next(self, now: float) -> Entry | None:
        """Return a request that moves now, its source named, or ``None``.

        One at a time is on its way to its new place, so that the room there is counted right; a few
        are imported at a time. The others go on where they are.
        """
        if not self.offered or len(self.keeping) >= self.state.limits.moves_max:
            return None
        if any(e.phase not in (Phase.PLACED, Phase.PLACING) for e in self.keeping.values()):
            return None
        for request_id, entry in list(self.offered.items()):
            if entry.phase is not Phase.PLACED:
                del self.offered[request_id]  # an attempt that is over
            elif self.state.placement.could_move(entry, now):
                del self.offered[request_id]
                assert entry.decode is not None
                self.starts_from(entry, entry.decode)
                entry.keeper = entry.decode
                self.keeping[request_id] = entry
                self.state.measure("moves_total")
                self.state.note("moving", entry, source=str(entry.decode))
                return entry
        return None

    def starts_from(self, entry: Entry, decode: Peer) -> None:
        """The next attempt finds what ``decode`` computed in its arena."""
        self.release(entry)
        entry.source = decode.worker_id
        entry.source_host = self.state.placement.workers[decode].host

    def settled(self, entry: Entry) -> None:
        """What its source has is here now, or of no use."""
        self.release(entry)
        entry.source = entry.source_host = ""

    def release(self, entry: Entry) -> None:
        """Nobody need keep its blocks any more."""
        keeper, entry.keeper = entry.keeper, None
        self.keeping.pop(entry.spec.request_id, None)
        self.offered.pop(entry.spec.request_id, None)
        if keeper is not None:
            request_id, epoch, turn = entry.spec.request_id, entry.epoch, entry.turn
            released = CancelWork(request_id, epoch, Reason.SUPERSEDED, turn)
            self.state.send(keeper, released)

    def lost(self, peer: Peer) -> None:
        """A worker is gone: what it kept stays in its file, but nobody need tell it anything."""
        for request_id, entry in list(self.keeping.items()):
            if entry.keeper == peer:
                entry.keeper = None
                del self.keeping[request_id]

    def check(self) -> None:
        """Assert that what is kept is kept for somebody."""
        for request_id, entry in self.keeping.items():
            assert self.state.entries.get(request_id) is entry, f"kept for nobody: {request_id}"
            assert entry.keeper is not None and entry.source
        for request_id, entry in self.offered.items():
            assert self.state.entries.get(request_id) is entry, f"offered for nobody: {request_id}"
