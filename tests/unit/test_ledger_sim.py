"""The faults of the simulator's ledger."""

from __future__ import annotations

import pytest

from baton.core.ids import Peer
from baton.core.lifecycles import RequestState
from baton.ports.ledger import (
    AcquireLease,
    AdmitRequest,
    Conflict,
    Done,
    LeaseHeld,
    LeaseLost,
    PlaceRequest,
    RenewLease,
    Reply,
    RetryRequest,
    Unavailable,
)
from support.ledger_bench import DECODE, GATEWAY, LIMITS, ROUTER, TTL, SimBench, member, spec

ADMIT = AdmitRequest(spec(), ROUTER)
PLACE = PlaceRequest("r1", 1, ROUTER, DECODE, None)
ADMITTED = Done(1, RequestState.ADMITTED, 0)


@pytest.fixture
def bench() -> SimBench:
    return SimBench()


def test_a_ledger_that_is_down_keeps_its_records(bench: SimBench) -> None:
    """Down: Unavailable at once; up again: everything answered before is there."""
    assert bench.ask(ADMIT) == ADMITTED
    bench.server.go_down()
    assert isinstance(bench.ask(PLACE), Unavailable)
    bench.server.come_up()
    assert bench.ask(RetryRequest("r1", 1, ROUTER)) == Done(2, RequestState.ADMITTED, 0)


def test_what_arrived_at_a_frozen_ledger_is_executed_after_the_thaw(bench: SimBench) -> None:
    """The caller gave up, the op takes effect later: it must be repeatable, and is."""
    bench.server.freeze()
    began = bench.time.now
    assert bench.ask(ADMIT) == Unavailable("timeout")
    assert bench.time.now - began == pytest.approx(LIMITS.ledger_timeout_ms / 1000)
    bench.server.thaw()
    assert bench.server.model.owned(GATEWAY) == {"r1"}
    assert bench.ask(ADMIT) == ADMITTED


def test_a_lost_reply_leaves_its_effect(bench: SimBench) -> None:
    """Exactly as many replies are lost as were asked for; repetitions get their answers."""
    bench.ask(ADMIT)
    bench.server.lose_replies(1)
    assert isinstance(bench.ask(PLACE), Unavailable)
    assert bench.ask(PLACE) == Done(1, RequestState.PLACED, 1)


def test_a_wiped_ledger_has_another_id(bench: SimBench) -> None:
    """Records and leases are gone; the id tells."""
    first = bench.ask(AcquireLease(member(ROUTER), TTL))
    bench.ask(ADMIT)
    bench.server.wipe()
    lost = bench.ask(RenewLease(ROUTER, TTL))
    assert isinstance(first, LeaseHeld)
    assert isinstance(lost, LeaseLost)
    assert lost.ledger_id != first.ledger_id
    assert bench.ask(PLACE) == Conflict(0, None)


def test_a_slow_ledger_keeps_the_order(bench: SimBench) -> None:
    """Calls made while it was slow are not overtaken by calls made after it is fast again."""
    answers: list[Reply | Unavailable] = []
    bench.server.delay_s = 0.2
    bench.ledger.call(ADMIT, answers.append)
    bench.server.delay_s = 0.001
    bench.ledger.call(PLACE, answers.append)
    bench.wait(lambda: len(answers) == 2)
    assert answers == [ADMITTED, Done(1, RequestState.PLACED, 1)]


def test_a_clock_that_jumps_ahead_costs_nobody_the_lease(bench: SimBench) -> None:
    """An hour in a moment looks like a gap: the first sweep prolongs all leases."""
    for peer in (ROUTER, DECODE):
        bench.ask(AcquireLease(member(peer), TTL))
    bench.server.clock_offset_ms = 3_600_000
    held = bench.ask(RenewLease(ROUTER, TTL))
    assert isinstance(held, LeaseHeld)
    assert held.lost == ()
    assert len(held.members) == 2


def test_a_clock_that_goes_back_does_not_keep_the_dead_alive(bench: SimBench) -> None:
    """Deadlines of the old time are set anew, so a dead member is lost one TTL later."""
    for peer in (ROUTER, DECODE):
        bench.ask(AcquireLease(member(peer), TTL))
    bench.server.clock_offset_ms = -3_600_000
    lost: list[Peer] = []
    for _ in range(30):
        held = bench.ask(RenewLease(ROUTER, TTL))
        assert isinstance(held, LeaseHeld)
        lost += held.lost
        bench.pass_time(TTL / 1000 / 20)
    assert lost == [DECODE]


def test_a_crashed_process_is_not_called_back(bench: SimBench) -> None:
    """What it had asked for still happens; nobody is told."""
    answers: list[Reply | Unavailable] = []
    bench.ledger.call(ADMIT, answers.append)
    bench.client.crash()
    bench.pass_time(2 * LIMITS.ledger_timeout_ms / 1000)
    assert answers == []
    assert bench.server.model.owned(ROUTER) == {"r1"}
