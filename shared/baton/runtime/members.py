"""Who opens links to whom.

Decides the dial rule: of each pair one side dials and keeps dialling; and whoever has just come
dials everybody once, because the others hear of it only with their next renewal. Dials that cross
make one link (``baton.transport.switchboard``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from baton.core.ids import Member, Peer, Role
from baton.ports.transport import PeerLost

#: Role -> the roles it dials. The command line dials anybody and is dialled by nobody.
DIALS: Mapping[Role, frozenset[Role]] = {
    Role.DECODE: frozenset({Role.ROUTER, Role.GATEWAY, Role.PREFILL}),
    Role.PREFILL: frozenset({Role.ROUTER, Role.GATEWAY}),
    Role.GATEWAY: frozenset({Role.ROUTER}),
    Role.ROUTER: frozenset(),
    Role.CLI: frozenset(Role) - {Role.CLI},
}


def to_dial(
    me: Peer, role: Role, members: Iterable[Member], *, newcomer: bool = False
) -> list[Member]:
    """Return those of ``members`` that a process ``me`` of ``role`` opens a link to."""
    return [
        member
        for member in members
        if (member.role in DIALS[role] or (newcomer and role in DIALS[member.role]))
        and member.endpoint
        and member.peer != me
    ]


class LinkWatch:
    """Knows when this process stays cut off from living peers and so must start anew.

    A lost link to a living process is opened anew (``Membership`` dials again at every beat). This
    is the last resort where that does not help: without it a process could hold its lease and live
    on without links. Whoever was frozen has lost most of its links, its peers only one each: so a
    process gives up when it stays cut off from more than half of those it should have a link with.
    If nobody has lost most (two that lost each other), the one whose restart costs least gives up.
    """

    MOST_S = 5.0
    ANY_S = 15.0
    _COST: Mapping[Role, int] = {
        Role.ROUTER: 0,
        Role.PREFILL: 1,
        Role.DECODE: 2,
        Role.GATEWAY: 3,
    }

    def __init__(self, me: Peer, role: Role) -> None:
        self._me = me
        self._role = role
        self._expected: dict[Peer, Role] = {}
        self._linked: set[Peer] = set()
        self._lost: dict[Peer, float] = {}

    def members(self, members: Iterable[Member]) -> None:
        """The ledger says who lives."""
        self._expected = {
            member.peer: member.role
            for member in members
            if member.peer != self._me
            and (member.role in DIALS[self._role] or self._role in DIALS[member.role])
        }
        self._lost = {peer: at for peer, at in self._lost.items() if peer in self._expected}

    def lost(self, event: PeerLost, now: float) -> None:
        """A link ended. A peer that is gone is not one we are cut off from, and neither is one
        that never was linked (it does not fit, or does not answer)."""
        if event.peer in self._linked and not event.gone and event.reason != "died":
            self._lost.setdefault(event.peer, now)
        self._linked.discard(event.peer)

    def up(self, peer: Peer) -> None:
        """A link opened."""
        self._linked.add(peer)
        self._lost.pop(peer, None)

    def cut_off(self, now: float) -> Peer | None:
        """Return a living peer because of which this process should start anew, if any."""
        lost = {peer: at for peer, at in self._lost.items() if peer in self._expected}
        long = [peer for peer, at in lost.items() if now - at >= self.MOST_S]
        if 2 * len(long) > len(self._expected):
            return min(long)
        for peer, at in sorted(lost.items()):
            if now - at >= self.ANY_S and self._COST[self._role] < self._COST[self._expected[peer]]:
                return peer
        return None
