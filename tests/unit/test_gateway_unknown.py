"""A gateway that looks for records which name it and which it does not know."""

from __future__ import annotations

from typing import Any

from baton.core.events import LeaseChanged, TimePassed
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, FinishReason, Outcome
from baton.gateway.endings import FORGOTTEN
from baton.gateway.machine import GatewayMachine
from baton.gateway.vocabulary import Command, End, Submitted
from baton.ports.driving import CallLedger, LedgerAnswered
from baton.ports.ledger import Conflict, Done, EndRequest, FindOwned, Owned, Unavailable
from baton.wire.messages import RequestPlaced, SubmitRequest, TokenChunk, TokenRun
from support.machine_playbook import Playbook, request, sent

ME, R, P, D = Peer("gateway-0", 1), Peer("router-0", 2), Peer("prefill-0", 4), Peer("decode-0", 5)
S = RequestState
COMPLETED = Outcome(Ending.COMPLETED, FinishReason.LENGTH, completion_tokens=1)


def gateway() -> Playbook:
    play = Playbook(GatewayMachine(ME, Limits()))
    play.feed(LeaseChanged(LeaseState.HELD))
    for peer, role in ((R, Role.ROUTER), (P, Role.PREFILL), (D, Role.DECODE)):
        play.up(peer, role)
    return play


def looks(play: Playbook, seconds: float, answer: Any) -> list[EndRequest]:
    """Let time pass; answer every look with ``answer``. Return the ends asked for."""
    found: list[Command] = []
    until = play.now + seconds
    while (due := play.machine.deadline()) is not None and due <= until:
        play.now = max(play.now, due)
        for command in play.do(TimePassed()):
            if isinstance(command, CallLedger) and isinstance(command.op, FindOwned):
                found += play.do(LedgerAnswered(command.op, answer))
    play.now = until
    ops = [each.op for each in found if isinstance(each, CallLedger)]
    return [op for op in ops if isinstance(op, EndRequest)]


def run_one(play: Playbook) -> EndRequest:
    """A request of one token; return its end, which the ledger has not answered yet."""
    play.feed(Submitted(request(gateway=ME, max_tokens=1)), sent(R, SubmitRequest))
    play.hear(R, RequestPlaced("r", 1, D, P))
    play.do_hear(D, TokenChunk((TokenRun("r", 1, 0, (50,), finish=FinishReason.LENGTH),)))
    op = play.last(CallLedger).op
    assert isinstance(op, EndRequest)
    return op


def answered(play: Playbook, op: EndRequest, reply: Any) -> list[EndRequest]:
    """The ledger answers ``op``; return the ends that are asked for then."""
    found = [each for each in play.do(LedgerAnswered(op, reply)) if isinstance(each, CallLedger)]
    return [each.op for each in found if isinstance(each.op, EndRequest)]


def test_a_record_that_the_ledger_has_again_is_ended_again() -> None:
    """The ledger went back: its record is live, at an epoch that only the answer tells. It ends as
    it had ended, within the time that `baton audit` allows."""
    play = gateway()
    end = run_one(play)
    play.do(LedgerAnswered(end, Done(1, S.COMPLETED, 1)))
    first = looks(play, 2.5, Owned(("r",)))[0]
    assert (first.epoch, first.outcome, first.by) == (0, end.outcome, ME)
    again = EndRequest("r", 3, end.outcome, ME)
    assert answered(play, first, Conflict(3, S.DECODING)) == [again]
    assert answered(play, again, Done(3, S.COMPLETED, 2)) == []
    assert answered(play, again, Conflict(4, S.PLACED)) == []


def test_from_a_state_before_the_answer_it_is_refused() -> None:
    """Nothing leads from there to a complete answer; whoever resumes it has it made again."""
    play = gateway()
    end = run_one(play)
    play.do(LedgerAnswered(end, Done(1, S.COMPLETED, 1)))
    first = looks(play, 2.5, Owned(("r",)))[0]
    second = EndRequest("r", 1, end.outcome, ME)
    third = EndRequest("r", 1, FORGOTTEN, ME)
    assert answered(play, first, Conflict(1, S.ADMITTED)) == [second]
    assert answered(play, second, Conflict(1, S.ADMITTED)) == [third]
    assert answered(play, third, Conflict(1, S.ADMITTED)) == []


def test_what_it_has_never_heard_of_is_refused() -> None:
    """An end that was remembered once, and forgotten for later ones."""
    ends = looks(gateway(), 2.5, Owned(("x", "y")))
    assert [(op.request_id, op.epoch, op.outcome) for op in ends] == [
        ("x", 0, FORGOTTEN),
        ("y", 0, FORGOTTEN),
    ]


def test_an_end_that_the_record_is_too_old_for_is_a_refusal_there() -> None:
    """The ledger went back before the answer was complete: its client has it all the same."""
    play = gateway()
    end = run_one(play)
    again = EndRequest("r", 1, FORGOTTEN, ME, end.turn)
    said = play.do(LedgerAnswered(end, Conflict(1, S.ADMITTED)))
    assert [each for each in said if isinstance(each, End)] == [End("r", end.outcome)]
    assert [each.op for each in said if isinstance(each, CallLedger)] == [again]
    assert play.do(LedgerAnswered(again, Done(1, S.REFUSED))) == []
    assert not play.machine.state.endings.waiting


def test_what_runs_or_is_about_to_end_is_left_alone() -> None:
    """Its session knows it; so does an end that the ledger has not confirmed."""
    play = gateway()
    play.feed(Submitted(request(gateway=ME, max_tokens=9)), sent(R, SubmitRequest))
    assert looks(play, 9.0, Owned(("r",))) == []
    play = gateway()
    run_one(play)
    assert looks(play, 9.0, Owned(("r",))) == []


def test_one_that_was_resumed_here_meanwhile_is_left_alone() -> None:
    """The answer comes when it runs again."""
    play = gateway()
    first = looks(play, 2.5, Owned(("r",)))[0]
    play.feed(Submitted(request(gateway=ME, max_tokens=9)), sent(R, SubmitRequest))
    assert answered(play, first, Conflict(1, S.PLACED)) == []


def test_without_a_ledger_nobody_looks() -> None:
    """It begins anew when the lease is held again; no answer means no end."""
    play = gateway()
    play.feed(LeaseChanged(LeaseState.SUSPECT))
    assert looks(play, 9.0, Owned(("x",))) == []
    play.feed(LeaseChanged(LeaseState.HELD))
    assert looks(play, 9.0, Unavailable("down")) == []
    assert looks(play, 2.5, Owned(("x",)))
