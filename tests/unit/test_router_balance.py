"""Conversations with a router that has workers change their role when the work drifts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from baton.core.events import LeaseChanged
from baton.core.ids import Peer, Role, WorkerRole
from baton.core.lifecycles import LeaseState
from baton.core.slo import Slo
from baton.core.step_times import StepCurve
from baton.ports.driving import Measure
from baton.router.balance import Policy
from baton.router.reversals import FIRST, LONGEST, Reversals
from baton.wire.messages import ChangeRole, RoleAnswered, WorkerStatus
from support.router_playbook import D1, P1, D, P, Router

#: A token takes 2 ms, 32 of them together 20.
CURVE = StepCurve((1, 32, 256), (2_000, 20_000, 160_000))
SLO = Slo(ttft_s=1.0, itl_s=0.05)
POLICY = Policy(SLO, WorkerRole.DECODE, hold_s=5.0, settle_s=30.0)
ALL = (P, P1, D, D1)
#: All places of a batch are taken.
FULL = {"running": 32}
#: Three seconds of prompts wait.
LONG = {"running": 1, "waiting": 4, "queued_tokens": 5_000}


class Roles(Router):
    """A router that may have roles changed, and two workers of each kind."""

    def __init__(self, workers: tuple[Peer, ...] = ALL) -> None:
        super().__init__((), roles=POLICY)
        self.loads: dict[Peer, dict[str, Any]] = {worker: {} for worker in workers}
        self.say()

    def say(self) -> None:
        """Every worker tells how it is."""
        for worker, load in self.loads.items():
            self.ready(worker, **{"blocks": 1_000, "curve": CURVE, "chunk_tokens": 256, **load})

    def during(self, seconds: float) -> list[tuple[Peer, ChangeRole]]:
        """Let time pass, with all workers as they are; return who was asked to change."""
        asked = []
        until = self.now + seconds
        while self.now < until:
            for command in self.wait(0.5):
                assert isinstance(command.message, ChangeRole)
                asked.append((command.peer, command.message))
            self.say()
        return asked


def test_a_prefill_worker_decodes_when_streams_fill_the_batches() -> None:
    """Who has the least to do changes, once the imbalance has lasted; the ledger is told how long a
    change has to settle, and until then nobody else is asked."""
    play = Roles()
    play.loads |= {D: FULL, D1: FULL, P: {"waiting": 1}}
    assert play.during(5.0) == []
    assert play.during(45.0) == [(P1, ChangeRole(WorkerRole.DECODE, 30_000))] * 2
    counted = [each for each in play.all if isinstance(each, Measure)]
    assert Measure("role_changes_asked_total", 1.0, {"wanted": "decode"}) in counted


def test_a_decode_worker_prefills_when_prompts_wait() -> None:
    """Long enough to break the first token's SLO, while streams have room."""
    play = Roles()
    play.loads |= {P: LONG, P1: LONG, D: {"running": 6}, D1: {"running": 4}}
    assert play.during(20.0) == [(D1, ChangeRole(WorkerRole.PREFILL, 30_000))]


@pytest.mark.parametrize(
    "loads", [{D: FULL, D1: FULL, P: LONG, P1: LONG}, {}], ids=["both", "none"]
)
def test_where_nobody_has_time_to_spare_or_nobody_needs_it_roles_stay(loads: Any) -> None:
    """A change would only move the trouble."""
    play = Roles()
    play.loads |= loads
    assert play.during(60.0) == []


def test_a_short_burst_changes_nothing() -> None:
    """A change costs a prefix cache and some seconds."""
    play = Roles()
    play.loads |= {D: FULL, D1: FULL}
    assert play.during(6.0) == []
    play.loads |= {D: {}, D1: {}}
    assert play.during(60.0) == []


@pytest.mark.parametrize("load", [{D: FULL, D1: FULL}, {P: LONG}])
def test_the_last_of_a_kind_is_not_asked(load: dict[Peer, Any]) -> None:
    """However strained the others are."""
    play = Roles((P, D, D1) if D in load else (P, P1, D))
    play.loads |= load
    if P in load:
        play.loads[P1] = LONG
    assert play.during(60.0) == []


def test_what_a_change_has_settled_does_not_call_for_the_way_back() -> None:
    """The same streams on three workers fill two thirds of their places: neither side lacks
    anybody, and none could go."""
    play = Roles()
    play.loads |= {D: FULL, D1: FULL}
    assert [peer for peer, _ in play.during(20.0)] == [P]
    play.lose(P, gone=True)
    del play.loads[P]
    third, shared = Peer(P.worker_id, 9), {"running": 21}
    play.up(third, Role.DECODE)
    play.hear(third, WorkerStatus(accepting=True, block_size=16, blocks_total=1_000, **shared))
    play.loads |= {D: shared, D1: shared, P1: {"running": 1}}
    assert play.during(120.0) == []


class Swinging(Roles):
    """Three workers, so that one can go and come back only. Whoever is asked to change does, and is
    back three seconds later as the other one."""

    def __init__(self) -> None:
        super().__init__((P, P1, D))
        self.decoding = {D.worker_id}
        self.changed: list[tuple[float, Role]] = []

    def swing(self, seconds: float, period_s: float) -> list[tuple[float, Role]]:
        """Let the load go from one side to the other for ``seconds``, each of them half of the
        time; return what changed, and when."""
        self.changed.clear()
        until = self.now + seconds
        while self.now < until:
            prompts = self.now % period_s < period_s / 2
            for peer in self.loads:
                decodes = peer.worker_id in self.decoding
                self.loads[peer] = {} if prompts == decodes else FULL if decodes else LONG
            for peer, message in self.during(0.5):
                self.change(peer, message.role.process)
        return list(self.changed)

    def change(self, peer: Peer, role: Role) -> None:
        self.lose(peer, gone=True)
        del self.loads[peer]
        self.during(3.0)
        self.back(peer, role)

    def back(self, peer: Peer, role: Role) -> None:
        """It is there again, with ``role``."""
        successor = Peer(peer.worker_id, peer.incarnation + 10)
        self.decoding ^= {peer.worker_id}
        self.changed.append((self.now, role))
        self.up(successor, role)
        self.loads[successor] = {}


def test_a_load_that_swings_as_fast_as_roles_can_follow_does_not_move_them_for_ever() -> None:
    """Each way back waits twice as long as the one before, up to a bound; what was known before a
    worker was away is known when it is back."""
    play = Swinging()
    settle_s = POLICY.settle_s
    changes = play.swing(120 * settle_s, period_s=70.0)
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(changes)]
    assert 3 <= len(changes) <= 8
    assert all(one[1] is not other[1] for one, other in itertools.pairwise(changes))
    for number, gap in enumerate(gaps):
        assert gap >= min(FIRST * 2**number, LONGEST) * settle_s


def test_a_change_in_the_same_direction_waits_for_the_first_one_only() -> None:
    """More of the same work is no way back; nor is a change that somebody else asked for."""
    workers = [(Peer(f"w-{n}", n + 1), Role.PREFILL) for n in range(4)]
    seen = Reversals(30.0)
    for now in range(3):
        seen.see(workers, float(now))
        assert seen.not_before(Role.DECODE) == seen.not_before(Role.PREFILL) == 0.0
    for number, now in ((0, 10.0), (1, 20.0)):
        workers.append((Peer(f"w-{number}", 10), Role.DECODE))
        seen.see(workers, now)
        assert seen.not_before(Role.DECODE) == 0.0
        assert seen.not_before(Role.PREFILL) == now + 60.0
    assert seen.pause_s == 60.0


def test_what_has_stood_for_long_is_turned_back_sooner_again() -> None:
    """Work that drifts by the hour is followed; what was learned of a hectic hour is forgotten."""
    seen, now = Reversals(30.0), 0.0
    turn = itertools.count(1)

    def turns(after_s: float) -> float:
        nonlocal now
        now, number = now + after_s, next(turn)
        role = (Role.DECODE, Role.PREFILL)[number % 2]
        seen.see([(Peer("w", number), role)], now)
        return seen.pause_s

    assert [turns(1.0), turns(1.0)] == [60.0, 60.0]
    assert [turns(seen.pause_s) for _ in range(7)] == [120, 240, 480, 960, 1_920, 1_920, 1_920]
    assert [turns(2 * seen.pause_s) for _ in range(6)] == [960, 480, 240, 120, 60, 60]


def test_slow_steps_strain_as_full_batches_do() -> None:
    """What counts is how far two tokens are apart."""
    play = Roles()
    slow = {"running": 10, "curve": StepCurve((1, 32), (60_000, 80_000))}
    play.loads |= {D: slow, D1: slow}
    assert [peer for peer, _ in play.during(20.0)] == [P]


def test_a_refused_change_is_asked_for_again_later() -> None:
    """Another worker may be changing just now."""
    play = Roles()
    play.loads |= {D: FULL, D1: FULL}
    while not (asked := play.during(0.5)):
        pass
    play.hear(asked[0][0], RoleAnswered(WorkerRole.DECODE, "prefill-1 changes its role"))
    assert play.during(4.0) == []
    assert [peer for peer, _ in play.during(4.0)] == [P]


def test_a_router_without_a_lease_asks_nobody() -> None:
    """It may be cut off from what the others know."""
    play = Roles()
    play.loads |= {D: FULL, D1: FULL}
    play.feed(LeaseChanged(LeaseState.SUSPECT))
    assert play.during(60.0) == []
