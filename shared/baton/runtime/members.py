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
