"""A decode worker that shuts down: what it offers to others, what it keeps for them, until when.

Decides that a sequence runs on here until its router has found it another place. Where that is, and
whether there is one, only the router knows; without one the sequence runs to its end, or to
``drain_ms``.
"""

from __future__ import annotations

from baton.core.ids import Peer
from baton.decode.sequence import Sequence, Stage
from baton.decode.state import State
from baton.wire.messages import MoveOffered

#: What another worker can go on with. A prompt that prefill still writes is finished here first:
#: what it has computed would be lost, and its commit makes it one of these.
MOVABLE = (Stage.RUNNING, Stage.LOCAL)


class Departure:
    """The drain of one decode worker."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.due: float | None = None
        """When what still runs is given back."""

    def begin(self, now: float) -> None:
        """Take nothing new."""
        self.state.draining = True
        self.due = now + self.state.limits.drain_ms / 1000
        self.state.note("draining", sequences=len(self.state.sequences))

    def offer(self) -> None:
        """Tell the routers what could go on elsewhere, each sequence once a link."""
        if not self.state.draining:
            return
        for seq in self.state.sequences.values():
            if seq.stage in MOVABLE and not seq.offered and seq.router in self.state.peers:
                seq.offered = True
                offer = MoveOffered(seq.spec.request_id, seq.epoch, seq.length)
                self.state.send(seq.router, offer)

    def keep(self, seq: Sequence) -> None:
        """Stop stepping it; its blocks stay what they are."""
        seq.stage = Stage.MOVED
        self.state.note("moved", seq, tokens=seq.length)

    def router_lost(self, router: Peer) -> list[Sequence]:
        """Return what is kept for nobody any more. What still runs is offered on the next link."""
        mine = [seq for seq in self.state.sequences.values() if seq.router == router]
        for seq in mine:
            seq.offered = False
        return [seq for seq in mine if seq.stage is Stage.MOVED]
