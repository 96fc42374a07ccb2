"""What routers hear of this worker's prefix cache: names that come and go, and all on demand.

Decides when changes are told, and what is told instead when they are too many. Changes are numbered
in this incarnation, the same for every router. A page lists a range of blocks as it is when it is
sent, behind all changes until then: what changes in it afterwards is told behind it. So a router
has all of it when it has every page and every number, and nothing is kept for it here.
"""

from __future__ import annotations

from baton.core.ids import Peer, Role
from baton.core.prefix import short_names
from baton.decode.state import State
from baton.wire.messages import BlocksChanged, BlocksListed

NEVER = float("-inf")


class BlockNews:
    """The news of one decode worker."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.number = 0
        """Of the last change told."""
        self._told_at = NEVER

    def tell(self, now: float, *, at_once: bool) -> None:
        """Tell the routers what has changed, at once or when the pause is over."""
        if self.state.pool.renamed and (at_once or now >= self._due()):
            self._told_at = now
            self._flush()

    def deadline(self) -> float | None:
        """Return when :meth:`tell` is to be asked again."""
        return self._due() if self.state.pool.renamed else None

    def list_from(self, router: Peer, start: int) -> None:
        """Send one page."""
        if self.state.pool.renamed:
            self._flush()
        pool, size = self.state.pool, self.state.limits.block_names_max
        end = start + size
        names = short_names(pool.named_in(start, size))
        more = end if end < pool.total else None
        self.state.send(router, BlocksListed(self.number, start, names, more))

    def _due(self) -> float:
        return self._told_at + self.state.limits.status_pause_ms / 1000

    def _flush(self) -> None:
        came, gone = self.state.pool.take_renamed()
        self.number += 1
        if len(came) + len(gone) > self.state.limits.block_names_max:
            message = BlocksChanged(self.number, too_many=True)
        else:
            message = BlocksChanged(self.number, short_names(came), short_names(gone))
        for peer, member in self.state.peers.items():
            if member.role is Role.ROUTER:
                self.state.send(peer, message)
