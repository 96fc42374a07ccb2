"""Who dials whom, and when a process counts itself as cut off."""

from __future__ import annotations

import itertools

import pytest

from baton.core.ids import Member, Peer, Role
from baton.ports.transport import PeerLost
from baton.runtime.members import DIALS, LinkWatch, to_dial

ROLES = (Role.ROUTER, Role.PREFILL, Role.DECODE, Role.GATEWAY)


def member(role: Role, number: int = 0) -> Member:
    """Return a member with an endpoint of its own."""
    peer = Peer(f"{role.value}-{number}", 7)
    return Member(peer, role, f"ipc:///run/{peer.worker_id}.sock", 1, "boot")


ALL = tuple(member(role, number) for role in ROLES for number in (0, 1))


def watch_of(role: Role) -> LinkWatch:
    """Return the watch of ``role``-0, which has all its links."""
    me = member(role)
    watch = LinkWatch(me.peer, role)
    watch.members(ALL)
    for other in ALL:
        watch.up(other.peer)
    return watch


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(ROLES, 2)))
def test_each_pair_has_one_dialling_side(one: Role, other: Role) -> None:
    """Of two roles that work together exactly one dials, and equals never do."""
    assert (other in DIALS[one]) + (one in DIALS[other]) == 1
    assert one not in DIALS[one]


def test_a_newcomer_dials_everybody_it_works_with() -> None:
    """Once, whoever's turn it is otherwise: the others have not heard of it yet."""
    found = to_dial(Peer("router-0", 8), Role.ROUTER, ALL, newcomer=True)
    assert {one.role for one in found} == {Role.PREFILL, Role.DECODE, Role.GATEWAY}
    assert to_dial(Peer("router-0", 8), Role.ROUTER, ALL) == []


def test_to_dial_leaves_out_the_unreachable() -> None:
    """A process dials neither itself nor who has no inbox (the command line)."""
    silent = Member(Peer("router-9", 1), Role.ROUTER, "", 1, "boot")
    found = to_dial(Peer("decode-0", 7), Role.DECODE, (*ALL, silent))
    assert {one.peer.worker_id for one in found} == {
        f"{role}-{n}" for role in ("router", "gateway", "prefill") for n in (0, 1)
    }


def test_most_links_lost_is_cut_off() -> None:
    """Who has lost more than half of its links to living peers starts anew, after a moment."""
    watch = watch_of(Role.DECODE)
    for role in (Role.ROUTER, Role.GATEWAY):
        for number in (0, 1):
            watch.lost(PeerLost(member(role, number).peer, "silent for 2000 ms"), 10.0)
    assert watch.cut_off(14.9) is None
    assert watch.cut_off(15.0) == Peer("gateway-0", 7)


def test_one_link_lost_is_the_other_side_s_matter() -> None:
    """Who lost one link of many waits for the other side to start anew, and then is well."""
    watch = watch_of(Role.GATEWAY)
    watch.lost(PeerLost(Peer("router-0", 7), "silent for 2000 ms"), 10.0)
    assert watch.cut_off(1000.0) is None
    watch.members([one for one in ALL if one.peer.worker_id != "router-0"])
    watch.members(ALL)
    assert watch.cut_off(2000.0) is None


def test_two_that_lost_each_other() -> None:
    """If neither has lost most of its links, the one whose restart costs least starts anew."""
    watch = watch_of(Role.ROUTER)
    watch.lost(PeerLost(Peer("gateway-0", 7), "left 4096 messages unacknowledged"), 10.0)
    assert watch.cut_off(24.9) is None
    assert watch.cut_off(25.0) == Peer("gateway-0", 7)


def test_what_is_not_cut_off() -> None:
    """Dead peers, peers that left, and pairs that never fitted are no reason to start anew."""
    watch = watch_of(Role.DECODE)
    for other in ALL:
        watch.lost(PeerLost(other.peer, "died"), 10.0)
    assert watch.cut_off(1000.0) is None
    fresh = LinkWatch(Peer("decode-0", 7), Role.DECODE)
    fresh.members(ALL)
    for other in ALL:
        fresh.lost(PeerLost(other.peer, "decode-0/7 and router-0/7 differ: dtype"), 10.0)
    assert fresh.cut_off(1000.0) is None
    left = watch_of(Role.DECODE)
    for other in ALL:
        left.lost(PeerLost(other.peer, "said goodbye", gone=True), 10.0)
    assert left.cut_off(1000.0) is None
