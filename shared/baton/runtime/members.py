"""Who opens links to whom.

Decides the dial rule: of each pair exactly one side dials, so that a link is never made twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from baton.core.ids import Member, Peer, Role

#: Role -> the roles it dials. The command line dials anybody and is dialled by nobody.
DIALS: Mapping[Role, frozenset[Role]] = {
    Role.DECODE: frozenset({Role.ROUTER, Role.GATEWAY, Role.PREFILL}),
    Role.PREFILL: frozenset({Role.ROUTER, Role.GATEWAY}),
    Role.GATEWAY: frozenset({Role.ROUTER}),
    Role.ROUTER: frozenset(),
    Role.CLI: frozenset(Role) - {Role.CLI},
}


def to_dial(me: Peer, role: Role, members: Iterable[Member]) -> list[Member]:
    """Return those of ``members`` that a process ``me`` of ``role`` opens a link to."""
    return [
        member
        for member in members
        if member.role in DIALS[role] and member.endpoint and member.peer != me
    ]


class LinkWatch:
    """Knows when this process is cut off from living peers and so must start anew.

    A link that ended is over for this pair of incarnations. A process that was frozen for longer
    than ``peer_silent_ms`` thaws, gets its lease back, and would live on without a link. Whoever
    was frozen has lost most of its links, its peers only one each: so a process gives up when it
    is cut off from more than half of those it should have a link with. If nobody has lost most
    (two processes that lost each other), the one whose restart costs least gives up, later.
    """

    #: Longer than it takes to hear from the ledger that a peer has left.
    MOST_S = 1.5
    ANY_S = 6.0
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

    def lost(self, peer: Peer, reason: str, now: float) -> None:
        """A link ended. (One that says goodbye may have given *us* up; who leaves is struck off.)

        A peer that never was linked (it does not fit, or does not answer) is not one we lost.
        """
        if peer in self._linked and reason != "died":
            self._lost.setdefault(peer, now)
        self._linked.discard(peer)

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
