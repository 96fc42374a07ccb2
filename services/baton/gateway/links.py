"""Who is linked to this gateway: routers in turn, workers by role, and what is missing.

Decides which router is asked next and whether a request could be served at all.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Literal

from baton.core.ids import Member, Peer, Role
from baton.core.outcomes import Reason
from baton.wire.messages import PoolStatus

Mode = Literal["split", "adaptive", "colocated"]


class Links:
    """The open links."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._members: dict[Peer, Member] = {}
        self._routers: list[Peer] = []
        self._pools: dict[Peer, PoolStatus] = {}
        self._next = 0
        self.had_router = False
        """Whether a router was ever here: then one that is away is being started again."""

    def __contains__(self, peer: object) -> bool:
        return peer in self._members

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._members)

    def up(self, member: Member) -> None:
        """A link is open."""
        self._members[member.peer] = member
        if member.role is Role.ROUTER:
            self._routers = sorted({*self._routers, member.peer})
            self.had_router = True

    def lost(self, peer: Peer) -> Role | None:
        """A link is over; return what the peer was."""
        member = self._members.pop(peer, None)
        if peer in self._routers:
            self._routers.remove(peer)
            self._pools.pop(peer, None)
        return member.role if member is not None else None

    def role(self, peer: Peer) -> Role | None:
        """Return what a linked peer does."""
        member = self._members.get(peer)
        return member.role if member is not None else None

    def routers(self) -> tuple[Peer, ...]:
        """Return the linked routers."""
        return tuple(self._routers)

    def next_router(self) -> Peer | None:
        """Return the router whose turn it is; one that is going away takes nothing."""
        routers = [router for router in self._routers if not self.draining(router)]
        if not routers:
            return None
        self._next += 1
        return routers[self._next % len(routers)]

    def last_resort(self, declined: Container[Peer]) -> Peer | None:
        """Return a router that is going away and has not declined: it may have what was begun."""
        return next((router for router in self._routers if router not in declined), None)

    def leaving(self, router: Peer) -> None:
        """A router refused something because it is going away."""
        self.pool(router, PoolStatus(False, Reason.DRAINING, "this router is draining"))

    def draining(self, router: Peer) -> bool:
        """Whether a router said that it is going away."""
        pool = self._pools.get(router)
        return pool is not None and pool.reason is Reason.DRAINING

    def pool(self, router: Peer, status: PoolStatus) -> None:
        """A router says whether it could place a request."""
        if router in self._routers:
            self._pools[router] = status

    def missing(self) -> tuple[Reason, str] | None:
        """Return which process a request would lack."""
        if not self._routers:
            return Reason.NO_ROUTER, "no router is connected"
        roles = {member.role for member in self._members.values()}
        if Role.DECODE not in roles:
            return Reason.NO_DECODE_WORKER, "no decode worker is connected"
        if self._mode == "split" and Role.PREFILL not in roles:
            return Reason.NO_PREFILL_WORKER, "no prefill worker is connected"
        # Who is linked is not who can serve: workers must have met each other as well.
        pools = [self._pools[router] for router in self._routers if router in self._pools]
        if any(pool.serving for pool in pools):
            return None
        if not pools:
            return Reason.NO_ROUTER, "the router has not said yet what it has"
        return pools[0].reason or Reason.NO_DECODE_WORKER, pools[0].message

    def check(self) -> None:
        """Assert the invariants."""
        assert set(self._routers) <= self._members.keys()
