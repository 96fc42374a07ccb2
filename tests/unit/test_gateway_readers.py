"""Readers of one resumable request: several at once, those who never come, and making it again."""

from __future__ import annotations

import pytest

from baton.core.events import DrainRequested
from baton.core.lifecycles import RequestState
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.gateway.vocabulary import (
    CancelWanted,
    Deliver,
    End,
    ReaderBack,
    ReaderGone,
    Ready,
    Submitted,
)
from baton.ports.driving import CallLedger, LedgerAnswered
from baton.ports.ledger import (
    ClaimResumable,
    CloseResumable,
    Closing,
    Denial,
    Denied,
    Done,
    EndRequest,
)
from baton.ports.transport import Received
from baton.wire.messages import (
    RequestFailed,
    RequestPlaced,
    RequestResumed,
    RequestSpec,
    SubmitRequest,
    TokensBounded,
)
from support.machine_playbook import Like, sent
from support.resumable_talk import (
    CLAIM,
    WINDOW_MS,
    D,
    Gateway,
    R,
    call,
    closing,
    given,
    kept_answer,
    replace_claim,
    spec,
    wanted,
)


def test_ids_that_are_nowhere_are_made_again() -> None:
    """The old gateway died with the complete answer: the same request runs under another name."""
    play = Gateway()
    play.claimed(turn=1)
    completed = Outcome(Ending.COMPLETED, finish=FinishReason.STOP, completion_tokens=2)
    failed = RequestFailed("c", 1, completed)
    play.hear(R, failed, call(ClaimResumable, again=True, token="t"))
    submitted = sent(R, SubmitRequest, spec=Like(RequestSpec, request_id="c~2"), turn=1)
    play.answered(given(2, again=2), submitted)
    play.hear(R, RequestPlaced("c~2", 1, D))
    play.tokens(0, 50, 51, name="c~2", finish=FinishReason.STOP)
    assert play.last(Deliver).request_id == "c"
    close = closing(play)
    play.answered(given(2, again=2, answer=close.answer), kind=CloseResumable)
    assert not play.machine.state.names


@pytest.mark.parametrize("how", ["cancelled", "window"])
def test_what_is_over_before_it_could_be_made_again_is_not_made_again(how: str) -> None:
    """Its ids were nowhere and the ledger was asked; its client did not wait for the answer."""
    play = Gateway(ledger_wait_ms=30_000)
    play.claimed()
    play.do(Received(R, RequestFailed("c", 1, Outcome(Ending.COMPLETED))))
    again = play.op(ClaimResumable)
    if how == "cancelled":
        play.do(CancelWanted("c"))
    else:
        play.do(ReaderGone("c"))
        play.wait(WINDOW_MS / 1000 + 1)
    closed = closing(play)
    play.feed(
        LedgerAnswered(again, given(5, again=5)), call(CloseResumable, turn=5, closed=Closing.OVER)
    )
    play.feed(LedgerAnswered(closed, Denied(Denial.CLAIMED)))
    play.answered(given(5), kind=CloseResumable)
    assert not play.machine.state.kept
    assert not play.machine.state.sessions


def test_what_is_over_and_waits_for_a_reader_is_not_made_again_either() -> None:
    """The ledger has confirmed the end, and answers the older question after that."""
    play = Gateway()
    play.claimed()
    play.do(replace_claim("n2"))
    play.answered(given(4), Like(Ready, claim="n2", submit=False))
    play.do(Received(R, RequestFailed("c", 1, Outcome(Ending.COMPLETED))))
    again = play.op(ClaimResumable)
    play.do(CancelWanted("c"))
    play.answered(Denied(Denial.CLAIMED), kind=CloseResumable)
    play.feed(LedgerAnswered(again, given(5, again=5)))
    play.feed(ReaderBack("c", ("c",)), Like(End, request_id="c"))
    assert not play.machine.state.sessions


def test_an_older_end_is_not_told_to_who_reads_what_is_made_again() -> None:
    """It was complete, and the ledger had not said so when the request was begun anew: its reader
    would take it for an answer without a word."""
    play = Gateway()
    play.opened()
    play.tokens(0, 50, finish=FinishReason.STOP)
    ending = play.op(EndRequest)
    play.answered(given(0), kind=CloseResumable)
    play.do(CLAIM)
    play.answered(given(2, again=2), Like(Ready, submit=True))
    play.do(Submitted(spec(), "c"))
    play.feed(LedgerAnswered(ending, Done(1, RequestState.COMPLETED)))
    play.tokens(0, 50, 51, name="c~2", finish=FinishReason.STOP)
    assert play.last(Deliver).ids == (50, 51)


def test_a_choice_that_is_complete_is_not_told_twice_when_another_is_lost() -> None:
    """Its reader has all of it: that one comes back, and begins from what it has."""
    play = Gateway()
    play.do(CLAIM)
    play.answered(given(3, requests=("c-0", "c-1")), Like(Ready, submit=True))
    for name in ("c-0", "c-1"):
        play.do(Submitted(spec(name), "c"))
    play.tokens(0, 50, name="c-1", finish=FinishReason.STOP)
    router = play.machine.state.sessions["c-0"].router
    play.do(Received(router, RequestFailed("c-0", 1, Outcome(Ending.COMPLETED))))
    assert [end.outcome.reason for end in play.ends()] == [Reason.SUPERSEDED] * 2
    assert not play.machine.state.kept


def test_what_is_claimed_and_never_read_is_left_to_the_next_claim() -> None:
    """Its client left while the ledger was asked."""
    play = Gateway()
    play.feed(CLAIM, call(ClaimResumable))
    play.answered(given(1), Like(Ready, submit=True))
    play.feed(ReaderGone("c"), Like(End))
    assert not play.machine.state.kept
    play.feed(replace_claim("n2"), call(ClaimResumable))
    play.answered(given(2), Like(Ready, submit=True))


def test_each_of_two_readers_that_come_at_once_is_told_the_answer() -> None:
    """Both were given it before the first of them read; when all have read it is forgotten."""
    play = Gateway()
    answer = kept_answer()
    play.do(CLAIM)
    first = play.op(ClaimResumable)
    play.do(replace_claim("n2"))
    play.feed(LedgerAnswered(first, given(1, answer=answer)), Like(Ready, claim="n1"))
    play.answered(given(2, answer=answer), Like(Ready, claim="n2", submit=False))
    told = Like(Deliver, index=0, ids=(50, 51)), Like(End, request_id="c")
    play.feed(ReaderBack("c", ("c",)), *told)
    play.feed(ReaderBack("c", ("c",)), *told)
    assert not play.machine.state.kept
    assert play.machine.resuming.deadline() is None


@pytest.mark.parametrize("reads", [True, False])
def test_a_reader_that_does_not_come_after_all_leaves_the_other_one_its_answer(
    reads: bool,
) -> None:
    """It is not waited for longer than the window either."""
    play = Gateway()
    answer = kept_answer()
    play.do(CLAIM)
    first = play.op(ClaimResumable)
    play.do(replace_claim("n2"))
    play.do(LedgerAnswered(first, given(1, answer=answer)))
    play.answered(given(2, answer=answer), Like(Ready, claim="n2", submit=False))
    play.feed(ReaderGone("c"))
    if reads:
        play.feed(ReaderBack("c", ("c",)), Like(Deliver, ids=(50, 51)), Like(End))
    else:
        play.wait(WINDOW_MS / 1000 + 1)
    assert not play.machine.state.kept


@pytest.mark.parametrize("drains", [True, False])
def test_a_reader_that_was_given_what_has_left_meanwhile_hears_it(drains: bool) -> None:
    """Between the ledger's answer and its reading another gateway has claimed it, or this one
    drains: it must not wait for an answer that nobody has."""
    play = Gateway()
    play.opened()
    play.tokens(0, 50)
    play.do(ReaderGone("c"))
    play.do(CLAIM)
    play.answered(given(1), Like(Ready, submit=False))
    play.do(DrainRequested() if drains else Received(R, RequestResumed("c", 2 << 16)))
    reason = Reason.DRAINING if drains else Reason.SUPERSEDED
    play.feed(
        ReaderBack("c", ("c",)), Like(End, request_id="c", outcome=Like(Outcome, reason=reason))
    )


def test_what_is_submitted_after_it_was_left_or_cancelled_has_an_end() -> None:
    """Its reader was given it to submit, and somebody else was quicker."""
    for event in (ReaderGone("c"), CancelWanted("c")):
        play = Gateway()
        play.do(CLAIM)
        play.answered(given(1), Like(Ready, submit=True))
        play.do(event)
        play.feed(Submitted(spec(), "c"), Like(End, request_id="c"))
        assert not play.machine.state.sessions


def test_what_is_submitted_after_its_answer_came_is_told_it() -> None:
    """It was given to be made here, and in the same turn the ledger had the answer for another
    reader: both are told all of it, nothing is made."""
    play = Gateway()
    answer = kept_answer()
    play.do(CLAIM)
    first = play.op(ClaimResumable)
    play.do(replace_claim("n2"))
    play.feed(LedgerAnswered(first, given(1)), Like(Ready, claim="n1", submit=True))
    given_too = Like(Ready, claim="n2", submit=False)
    play.answered(given(2, answer=answer), Like(End), given_too)
    told = Like(Deliver, index=0, ids=(50, 51)), Like(End, request_id="c")
    play.feed(Submitted(spec(), "c"), *told)
    play.feed(ReaderBack("c", ("c",)), *told)
    assert not play.machine.state.sessions


@pytest.mark.parametrize("cancels", [True, False])
def test_readers_of_what_was_never_submitted_hear_that_it_left(cancels: bool) -> None:
    """Who was to submit it has left, or somebody cancels it."""
    play = Gateway()
    play.do(CLAIM)
    play.answered(given(1), Like(Ready, submit=True))
    for turn in (2, 3):
        play.do(replace_claim(f"n{turn}"))
        play.answered(given(turn), Like(Ready, submit=False))
    play.do(CancelWanted("c") if cancels else ReaderGone("c"))
    if cancels:
        play.answered(given(3), kind=CloseResumable)
        play.feed(Submitted(spec(), "c"), Like(End, request_id="c"))
    for _ in range(2):
        play.feed(ReaderBack("c", ("c",)), Like(End, request_id="c"))
    assert not play.machine.state.sessions
    assert not play.machine.state.kept


def test_what_two_are_to_submit_is_begun_once() -> None:
    """It was given anew after another gateway had it: the second one reads what the first began,
    also if that one has left."""
    play = Gateway()
    play.do(wanted())
    play.answered(given(0), Like(Ready, claim="c", submit=True))
    play.do(CLAIM)
    play.answered(given(2), Like(End), Like(Ready, claim="n1", submit=True), kind=ClaimResumable)
    play.do(Submitted(spec(), "c"))
    play.hear(R, RequestPlaced("c", 1, D))
    play.tokens(0, 50, 51)
    play.do(ReaderGone("c"))
    lifted = sent(D, TokensBounded, upto=9)
    play.feed(Submitted(spec(), "c"), Like(Deliver, index=0, ids=(50, 51)), lifted)
    assert len(play.messages(SubmitRequest)) == 1
    play.wait(WINDOW_MS / 1000 + 1)
    assert list(play.machine.state.sessions) == ["c"]


def test_who_submits_late_hears_why_the_request_failed() -> None:
    """One choice failed and ended the other: whichever the reader submits first, it is told the
    cause, not that there is one."""
    play = Gateway()
    names = ("c-0", "c-1")
    play.do(wanted(choices=names))
    play.answered(given(0, requests=names), Like(Ready, claim="c", submit=True))
    play.do(CLAIM)
    play.do(LedgerAnswered(play.op(ClaimResumable), given(2, requests=names)))
    for name in names:
        play.do(Submitted(spec(name), "c"))
    router = play.machine.state.sessions["c-1"].router
    lost = Outcome(Ending.FAILED, reason=Reason.WORKER_LOST, message="decode is gone")
    play.do(Received(router, RequestFailed("c-1", 1, lost)))
    for name in names:
        play.feed(Submitted(spec(name), "c"), End(name, lost))


@pytest.mark.parametrize("turn", [0, 1])
def test_what_is_never_submitted_is_gone_after_its_window(turn: int) -> None:
    """Nobody said that its client had left; an opened one is over, a claimed one may be claimed."""
    play = Gateway()
    play.do(CLAIM if turn else wanted())
    play.answered(given(turn), Like(Ready, submit=True))
    play.wait(WINDOW_MS / 1000 - 1)
    assert play.machine.state.kept
    play.wait(2)
    closes = [each.op for each in play.all if isinstance(each, CallLedger)]
    assert any(isinstance(op, CloseResumable) for op in closes) == (turn == 0)
    if not turn:
        play.answered(given(0), kind=CloseResumable)
    assert not play.machine.state.kept


def test_a_reader_does_not_wait_for_what_somebody_else_is_to_submit() -> None:
    """That one was given it later, and may not come."""
    play = Gateway()
    play.do(CLAIM)
    play.answered(given(1), Like(Ready, submit=True))
    play.feed(ReaderBack("c", ("c",)), Like(End, request_id="c"))


def test_a_reader_that_comes_while_it_is_to_be_made_again_does_not_hinder_that() -> None:
    """Its claim is a turn of its own; what the ledger was asked before holds all the same."""
    play = Gateway()
    play.claimed()
    play.do(replace_claim("n2"))
    second = play.op(ClaimResumable)
    play.do(Received(R, RequestFailed("c", 1, Outcome(Ending.COMPLETED))))
    again = play.op(ClaimResumable)
    play.feed(LedgerAnswered(second, given(4)), Like(Ready, claim="n2", submit=False))
    play.do(LedgerAnswered(again, given(5, again=5)))
    assert list(play.machine.state.sessions) == ["c~5"]
    play.do(ReaderBack("c", ("c",)))
    play.tokens(0, 50, 51, name="c~5", finish=FinishReason.STOP)
    assert play.last(Deliver).ids == (50, 51)


def test_the_window_of_who_is_about_to_read_does_not_end() -> None:
    """It was claimed in time, however short the time between that and the reading."""
    play = Gateway()
    play.opened()
    play.tokens(0, 50)
    play.do(ReaderGone("c"))
    play.wait(WINDOW_MS / 1000 - 0.001)
    play.do(CLAIM)
    play.answered(given(1), Like(Ready, submit=False))
    play.wait(0.002)
    play.feed(ReaderBack("c", ("c",)), Like(Deliver, ids=(50,)), sent(D, TokensBounded))
    assert play.machine.state.sessions
