"""A router that looks for requests of processes that are gone."""

from __future__ import annotations

from typing import Any

from baton.core.events import LeaseChanged, TimePassed
from baton.core.lifecycles import LeaseState
from baton.core.outcomes import Ending, Outcome, Reason
from baton.ports.driving import CallLedger, LedgerAnswered
from baton.ports.ledger import (
    AdoptRequest,
    Conflict,
    Done,
    EndRequest,
    FindOrphans,
    Orphans,
    Unavailable,
)
from baton.ports.transport import PeerLost
from baton.wire.messages import CancelWork
from support.machine_playbook import Like, sent
from support.router_playbook import ME, D, G, P, R, Router, call, spec

LOST = Outcome(Ending.CANCELLED, reason=Reason.GATEWAY_LOST)


def sweeps(play: Router, seconds: float, answer: Any) -> list[object]:
    """Let time pass; answer every look with ``answer``. Return what the router does about it."""
    done: list[object] = []
    until = play.now + seconds
    while (due := play.machine.deadline()) is not None and due <= until:
        play.now = max(play.now, due)
        for command in play.do(TimePassed()):
            if isinstance(command, CallLedger) and isinstance(command.op, FindOrphans):
                done += play.do(LedgerAnswered(command.op, answer))
    play.now = until
    return [each for each in done if isinstance(each, CallLedger)]


def test_what_stays_nobodys_is_ended_within_recovery_ms() -> None:
    """(104) Found once it may only look so; found again and again, its owners do not come back.
    The first answer says at which epoch it stands."""
    play = Router()
    assert sweeps(play, 6.0, Orphans({"x": 0})) == []
    ends = sweeps(play, 2.0, Orphans({"x": 0}))
    first = call(EndRequest, request_id="x", epoch=0, outcome=LOST)
    assert len(ends) == 1 and first.matches(ends[0])
    play.feed(
        LedgerAnswered(EndRequest("x", 0, LOST, ME), Conflict(3, R.DECODING)),
        call(EndRequest, request_id="x", epoch=3, outcome=LOST, by=ME),
    )
    play.feed(LedgerAnswered(EndRequest("x", 3, LOST, ME), Done(3, R.CANCELLED)), *told(3))
    play.feed(LedgerAnswered(EndRequest("x", 3, LOST, ME), Conflict(4, R.PLACED)))


def told(epoch: int, turn: int = 1) -> list[Like]:
    """Every worker hears that it is over: nobody here knows who has it."""
    values = {"request_id": "x", "epoch": epoch, "reason": Reason.GATEWAY_LOST, "turn": turn}
    return [sent(worker, CancelWork, **values) for worker in (D, P)]


def test_whoever_works_on_it_is_told_with_the_turn_of_its_record() -> None:
    """A worker that has heard of a higher one does not obey: it was moved, and is not over."""
    play = Router()
    sweeps(play, 8.0, Orphans({"x": 0}))
    ask = EndRequest("x", 2, LOST, ME, 5)
    play.feed(
        LedgerAnswered(EndRequest("x", 0, LOST, ME), Conflict(2, R.DECODING, turn=5)),
        call(EndRequest, epoch=2, turn=5),
    )
    play.feed(LedgerAnswered(ask, Done(2, R.CANCELLED)), *told(2, turn=5))


def test_what_was_ended_here_ends_where_its_record_is_behind() -> None:
    """The ledger was failed over, and has an earlier epoch of what this router has just ended for
    want of its gateway. Another router's later epoch is left alone."""
    play = Router()
    mine = EndRequest("x", 4, LOST, ME, 2)
    play.feed(
        LedgerAnswered(mine, Conflict(3, R.DECODING, turn=1)),
        call(EndRequest, request_id="x", epoch=3, turn=2, by=ME),
    )
    play.feed(LedgerAnswered(EndRequest("x", 3, LOST, ME, 2), Done(3, R.CANCELLED)))
    play.feed(LedgerAnswered(mine, Conflict(5, R.PLACED, turn=3)))
    play.feed(LedgerAnswered(mine, Conflict(0, None)))
    play.feed(LedgerAnswered(mine, Conflict(3, R.CANCELLED, LOST)))


def test_who_may_come_back_has_the_whole_window_for_it() -> None:
    """Its gateway and its router are gone, and the ledger says for how long its client may be."""
    play = Router()
    away = Orphans({"x": 30_000, "y": 0})
    assert sweeps(play, 6.0, away) == []
    ends = sweeps(play, 2.0, away)
    assert len(ends) == 1 and call(EndRequest, request_id="y").matches(ends[0])
    again = sweeps(play, 26.0, away)
    assert all(call(EndRequest, request_id="y").matches(each) for each in again)
    ends = sweeps(play, 4.0, Orphans({"x": 30_000}))
    assert call(EndRequest, request_id="x", epoch=0, outcome=LOST).matches(ends[0])


def test_workers_see_to_no_request() -> None:
    """The ledger is told who they are: a living one does not hide what its owners left."""
    play = Router()
    play.now += 2.0
    asked = [each.op for each in play.do(TimePassed()) if isinstance(each, CallLedger)]
    assert [op.workers for op in asked if isinstance(op, FindOrphans)] == [(D, P)]


def test_what_is_wanted_here_is_made_right_where_its_record_forgot_us() -> None:
    """A ledger that was failed over names owners of the past, who are gone: without a word the
    next router would end what runs well. It is not touched while its gateway is out of sight."""
    play = Router()
    play.place(spec())
    again = sweeps(play, 2.0, Orphans({"r": 0}))
    right = call(AdoptRequest, router=ME, turn=1, epoch=1, decode=D, prefill=P)
    assert len(again) == 1 and right.matches(again[0])
    play.do(PeerLost(G, "silent"))
    assert sweeps(play, 4.0, Orphans({"r": 0})) == []


def test_somebody_who_comes_back_keeps_his_requests() -> None:
    """A gateway that was frozen has its lease again before the time is up."""
    play = Router()
    sweeps(play, 4.5, Orphans({"x": 0}))
    sweeps(play, 2.0, Orphans({}))
    assert sweeps(play, 4.5, Orphans({"x": 0})) == []


def test_one_that_is_found_here_and_lives_elsewhere_is_left_alone() -> None:
    """The ledger refuses: its gateway or its router holds a lease."""
    play = Router()
    sweeps(play, 8.0, Orphans({"x": 0}))
    refused = Conflict(3, R.DECODING)
    play.do(LedgerAnswered(EndRequest("x", 0, LOST, ME), refused))
    play.feed(LedgerAnswered(EndRequest("x", 3, LOST, ME), refused))


def test_a_routers_own_requests_are_not_its_orphans() -> None:
    """It knows better: a lost worker of theirs is a retry, a lost gateway an end of its own."""
    play = Router()
    play.place(spec())
    ops = [
        each.op for each in sweeps(play, 20.0, Orphans({"r": 0})) if isinstance(each, CallLedger)
    ]
    assert not [op for op in ops if isinstance(op, EndRequest)]


def test_without_a_ledger_nobody_is_lost() -> None:
    """What was found before the ledger went away is found anew afterwards."""
    play = Router()
    sweeps(play, 6.0, Orphans({"x": 0}))
    play.feed(LeaseChanged(LeaseState.SUSPECT))
    assert sweeps(play, 10.0, Orphans({"x": 0})) == []
    play.feed(LeaseChanged(LeaseState.HELD))
    assert sweeps(play, 6.0, Orphans({"x": 0})) == []
    assert sweeps(play, 4.0, Unavailable("down")) == []
    assert Like(CallLedger).matches(sweeps(play, 4.0, Orphans({"x": 0}))[0])
