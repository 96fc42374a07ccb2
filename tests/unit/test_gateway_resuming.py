"""Conversations with a gateway whose requests outlive their connections."""

from __future__ import annotations

import pytest

from baton.core.events import DrainRequested, LeaseChanged, RestartRequested, TimePassed
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.gateway.errors import of_outcome
from baton.gateway.vocabulary import (
    CancelWanted,
    Deliver,
    End,
    NotResumed,
    ReaderBack,
    ReaderGone,
    Ready,
    ResumeWanted,
    Submitted,
    Unresumable,
)
from baton.ports.driving import CallLedger, Exit, LedgerAnswered, Send
from baton.ports.ledger import (
    ClaimResumable,
    CloseResumable,
    Closing,
    Denial,
    Denied,
    Done,
    EndRequest,
    FindOwned,
    OpenResumable,
    Owned,
    Repeated,
    RestoreResumable,
    Unavailable,
)
from baton.ports.transport import Received
from baton.wire.messages import (
    FenceRequest,
    RequestEnded,
    RequestFailed,
    RequestLeft,
    RequestMoved,
    RequestPlaced,
    RequestRefused,
    RequestResumed,
    SubmitRequest,
    TokenChunk,
    TokenRun,
    TokensBounded,
)
from support.machine_playbook import Like, sent
from support.resumable_talk import (
    CLAIM,
    GONE,
    WINDOW_MS,
    D,
    Gateway,
    R,
    call,
    closing,
    given,
    spec,
    wanted,
)


def test_a_reader_that_comes_back_is_told_everything() -> None:
    """From the first id on, and then what follows; decode may go on without a bound again."""
    play = Gateway(resume_tokens_max=100)
    play.opened()
    play.tokens(0, 50, 51)
    play.feed(ReaderGone("c"), sent(D, TokensBounded, upto=9))
    play.tokens(2, 52)
    play.feed(CLAIM, call(ClaimResumable))
    play.answered(given(1), Like(Ready, submit=False))
    told = Like(Deliver, request_id="c", index=0, ids=(50, 51, 52))
    play.feed(ReaderBack("c", ("c",)), told, sent(D, TokensBounded, upto=9))
    assert play.wait(WINDOW_MS / 1000 + 1) == []


def test_decode_is_bounded_in_every_attempt_while_nobody_reads() -> None:
    """The worker of the next attempt hears it with its first token."""
    play = Gateway(resume_tokens_max=3)
    play.opened()
    play.tokens(0, 50)
    play.feed(ReaderGone("c"), sent(D, TokensBounded, epoch=1, upto=4))
    play.hear(R, RequestPlaced("c", 2, D))
    play.tokens(1, 51, epoch=2)
    assert play.messages(TokensBounded, D)[-1] == TokensBounded("c", 2, 4)


def test_nobody_comes_back() -> None:
    """The request is cancelled, and the ledger forgets it: its token is worth nothing."""
    play = Gateway()
    play.opened()
    play.tokens(0, 50)
    play.feed(ReaderGone("c"), sent(D, TokensBounded))
    play.wait(WINDOW_MS / 1000 + 1)
    assert [end.outcome.reason for end in play.ends()] == [Reason.CLIENT_DISCONNECTED]
    assert closing(play).closed is Closing.OVER
    play.answered(given(0), kind=CloseResumable)
    assert not play.machine.state.kept


def test_a_refusal_that_nobody_heard_is_no_end() -> None:
    """Its client was away: nothing was computed, and whoever comes back has it tried again."""
    play = Gateway()
    play.do(wanted())
    play.do(LedgerAnswered(play.op(OpenResumable), given(0)))
    play.do(Submitted(spec(), "c"))
    play.do(ReaderGone("c"))
    play.do(Received(R, RequestRefused("c", Reason.LEDGER_UNAVAILABLE, "away")))
    close = closing(play)
    assert (close.closed, close.answer) == (Closing.REFUSED, b"")
    play.do(LedgerAnswered(close, given(0)))
    assert not play.machine.state.kept
    play.feed(CLAIM, call(ClaimResumable, token="t", owner="k"))
    play.answered(given(1, again=1), Like(Ready, resumable_id="c", submit=True))


def test_what_is_too_long_is_over_whoever_asks_again() -> None:
    """A refusal for good that its client did not hear is told when it comes back, and ends it."""
    play = Gateway()
    play.claimed()
    play.do(ReaderBack("c", ("c",)))
    play.do(Received(R, RequestRefused("c", Reason.TOO_LONG, "380 of 320")))
    assert [end.outcome.reason for end in play.ends()] == [Reason.TOO_LONG]
    assert isinstance(play.op(CloseResumable), CloseResumable)


def test_an_answer_is_kept_by_the_ledger() -> None:
    """Complete, it is told again from there, at any gateway."""
    play = Gateway()
    play.opened()
    play.tokens(0, 50, 51, finish=FinishReason.STOP)
    close = closing(play)
    assert (close.closed, close.keep_ms, close.turn) == (Closing.KEPT, WINDOW_MS, 0)
    play.answered(given(0, answer=close.answer), kind=CloseResumable)
    assert not play.machine.state.kept
    other = Gateway()
    other.feed(CLAIM, call(ClaimResumable))
    other.answered(given(1, answer=close.answer), Like(Ready, submit=False))
    told = Like(Deliver, index=0, ids=(50, 51), finish=FinishReason.STOP)
    other.feed(ReaderBack("c", ("c",)), told, Like(End, request_id="c"))
    assert not other.machine.state.kept


def test_an_end_that_overtakes_its_reader_waits_for_it() -> None:
    """A client that comes back at the very end is told of it, whatever the ledger says first; one
    that never reads is not waited for longer than the window."""
    for reads in (True, False):
        play = Gateway()
        play.opened()
        play.do(ReaderGone("c"))
        play.do(CLAIM)
        claim = play.op(ClaimResumable)
        play.tokens(0, 50, 51, finish=FinishReason.STOP)
        play.feed(LedgerAnswered(claim, given(1)), Like(Ready, submit=False))
        play.answered(given(1), kind=CloseResumable)
        if reads:
            told = Like(Deliver, index=0, ids=(50, 51), finish=FinishReason.STOP)
            play.feed(ReaderBack("c", ("c",)), told, Like(End, request_id="c"))
        else:
            play.wait(WINDOW_MS / 1000 + 1)
        assert not play.machine.state.kept


def test_the_ledger_is_told_of_the_end_until_it_answers() -> None:
    """At most as long as the answer would be kept; meanwhile it is here."""
    play = Gateway()
    play.opened()
    play.tokens(0, 50, finish=FinishReason.STOP)
    for _ in range(3):
        play.answered(Unavailable("away"), kind=CloseResumable)
        assert any(isinstance(c, CallLedger) for c in play.wait(6))
    play.feed(CLAIM, call(ClaimResumable))
    play.answered(Unavailable("away"), Like(Ready, submit=False), kind=ClaimResumable)
    play.feed(ReaderBack("c", ("c",)), Like(Deliver, ids=(50,)), Like(End))
    play.answered(Unavailable("away"), kind=CloseResumable)
    play.wait(WINDOW_MS / 1000)
    play.answered(Unavailable("away"), kind=CloseResumable)
    assert not play.machine.state.kept


def test_another_gateways_claim_ends_it_here_quietly() -> None:
    """Its reader is told, its router too; the request goes on and the ledger hears nothing."""
    play = Gateway()
    play.opened()
    play.tokens(0, 50)
    turn = 1 << 16
    moved = sent(R, RequestMoved, request_id="c", turn=turn)
    superseded = Like(End, outcome=Like(Outcome, reason=Reason.SUPERSEDED))
    play.hear(D, RequestResumed("c", turn), moved, superseded)
    assert not play.machine.state.sessions
    late = TokenChunk((TokenRun("c", 1, 1, (51,)),))
    play.hear(D, late)
    assert not play.messages(RequestEnded), "its worker is another gateway's by now"
    play.hear(R, RequestPlaced("c", 1, D), sent(R, RequestMoved, turn=turn))


def test_an_old_word_about_another_gateway_changes_nothing() -> None:
    """It was claimed back since."""
    play = Gateway()
    play.claimed(turn=3)
    play.hear(R, RequestResumed("c", 2 << 16))
    assert play.machine.state.sessions


def test_tokens_may_come_before_anybody_says_in_which_epoch() -> None:
    """The router told decode first; what it sends is the answer from the start."""
    play = Gateway()
    play.claimed()
    play.tokens(0, 50, 51, epoch=4)
    assert play.last(Deliver).ids == (50, 51)
    play.hear(R, RequestPlaced("c", 4, D))
    play.tokens(2, 52, epoch=3)
    assert play.last(Deliver).ids == (50, 51), "a lower epoch is refused as ever"
    play.tokens(2, 52, epoch=4)
    assert play.last(Deliver).ids == (52,)


def test_every_other_router_hears_that_it_moved() -> None:
    """The one that had it may have lost its gateway, and would see to it for the whole window."""
    play, other, third = Gateway(), Peer("router-1", 3), Peer("router-2", 4)
    play.claimed()
    play.up(other, Role.ROUTER)
    moved = (3 << 16) + 1
    play.hear(R, RequestPlaced("c", 1, D), sent(other, RequestMoved, turn=moved))
    play.up(third, Role.ROUTER, sent(third, RequestMoved, turn=moved))
    own = Gateway()
    own.opened()
    own.up(other, Role.ROUTER)
    own.hear(R, RequestPlaced("c", 1, D))
    said = [e.message for e in own.all if isinstance(e, Send)]
    assert not [e for e in said if isinstance(e, RequestMoved)], "nobody else can have it"


def test_what_ended_for_want_of_a_client_is_over() -> None:
    """Its window passed while nobody was there: the late client is told so."""
    play = Gateway()
    play.claimed()
    play.do(Received(R, RequestFailed("c", 1, GONE)))
    assert play.ends()[-1].outcome == GONE
    assert closing(play).closed is Closing.OVER


def test_a_claim_that_cannot_be_served_now_may_be_made_again() -> None:
    """No router has a place: nothing is ended that runs elsewhere."""
    play = Gateway(queue_deadline_ms=1_000)
    play.claimed()
    play.wait(3)
    assert [end.outcome.ending for end in play.ends()] == [Ending.REFUSED]
    assert not [c for c in play.all if isinstance(c, CallLedger) and "End" in type(c.op).__name__]
    assert not play.machine.state.kept


def test_an_idempotency_key_joins_what_it_names() -> None:
    """Or begins anew if that is gone; with another body it is refused."""
    play = Gateway()
    play.feed(wanted(repeat="i", body="b"), call(OpenResumable, repeat="i"))
    claim = call(ClaimResumable, resumable_id="first", repeat="i", new_token="t")
    play.answered(Repeated("first", same=True), claim)
    anew = call(OpenResumable, resumable_id="c", anew=True)
    play.answered(Denied(Denial.OVER), anew)
    play.answered(Repeated("x", same=False), Like(NotResumed, why=Unresumable.DIFFERS))


def test_a_denial_is_told() -> None:
    """Each in its own word."""
    for denial in (Denial.UNKNOWN, Denial.FOREIGN, Denial.OVER):
        play = Gateway()
        play.feed(CLAIM, call(ClaimResumable))
        play.answered(Denied(denial), Like(NotResumed, claim="n1", why=Unresumable(denial.value)))


def test_an_emptied_ledger_does_not_part_a_client_from_what_runs_here() -> None:
    """With the right token and key; a wrong one is as unknown as ever."""
    play = Gateway()
    play.opened()
    play.feed(ReaderGone("c"), sent(D, TokensBounded))
    play.feed(CLAIM, call(ClaimResumable))
    play.answered(Denied(Denial.UNKNOWN), Like(Ready, submit=False))
    for wrong in (ResumeWanted("n2", "c", "x", "k"), ResumeWanted("n3", "c", "t", "other")):
        play.feed(wrong, call(ClaimResumable))
        play.answered(Denied(Denial.UNKNOWN), Like(NotResumed, why=Unresumable.UNKNOWN))


def test_the_ledger_is_asked_again_and_not_for_ever() -> None:
    """A claim waits for it as long as an admission would."""
    play = Gateway()
    play.feed(CLAIM, call(ClaimResumable))
    play.answered(Unavailable("away"))
    asked = [each for each in play.wait(0.3) if isinstance(each, CallLedger)]
    assert len(asked) == 1
    play.now += 10
    refused = Like(NotResumed, why=Unresumable.REFUSED, reason=Reason.LEDGER_UNAVAILABLE)
    play.answered(Unavailable("away"), refused)


def test_a_client_may_cancel() -> None:
    """At once, and for good."""
    play = Gateway()
    play.opened()
    play.do(CancelWanted("c"))
    assert [end.outcome.reason for end in play.ends()] == [Reason.CLIENT_CANCELLED]
    assert closing(play).closed is Closing.OVER


def test_what_was_left_to_others_is_not_ended_from_here() -> None:
    """Its record may name this gateway still: whether it runs elsewhere is not known here."""
    play = Gateway()
    play.opened()
    play.feed(ReaderGone("c"), sent(D, TokensBounded))
    play.do(Received(R, RequestResumed("c", 1 << 16)))
    assert not play.machine.state.sessions
    until = play.now + 900.0
    while play.now < until:
        play.now += 1.0
        for command in play.do(TimePassed()):
            if isinstance(command, CallLedger) and isinstance(command.op, FindOwned):
                found = play.do(LedgerAnswered(command.op, Owned(("c",))))
                assert not [each for each in found if isinstance(each, CallLedger)]
                play.machine.state.endings.recent.pop("c", None)  # forgotten for later ones


def test_what_was_moved_here_is_ended_once_more_a_moment_later() -> None:
    """A ledger that was failed over just then has lost the move with the end, and its record names
    a gateway that does not know: the one with the higher turn is believed."""
    play = Gateway()
    play.claimed()
    play.hear(R, RequestPlaced("c", 1, D))
    play.tokens(0, *range(50, 59), finish=FinishReason.LENGTH)
    end = play.op(EndRequest)
    play.do(LedgerAnswered(end, Done(1, RequestState.COMPLETED)))
    assert not play.machine.state.endings.waiting
    said = [each.op for each in play.wait(3.5) if isinstance(each, CallLedger)]
    assert [op for op in said if isinstance(op, EndRequest)] == [end] and end.turn > 1 << 16
    play.do(LedgerAnswered(end, Done(1, RequestState.COMPLETED)))
    later = [each.op for each in play.wait(30.0) if isinstance(each, CallLedger)]
    assert not [op for op in later if isinstance(op, EndRequest)]
    assert len(play.ends()) == 1


def test_an_emptied_ledger_learns_what_is_served_here() -> None:
    """The lease was lost with everything else: whoever shows the token is given it again."""
    play = Gateway()
    play.feed(wanted(repeat="i", body="b"), call(OpenResumable, window_ms=WINDOW_MS, repeat="i"))
    play.answered(given(0, repeat="i", body="b"), Like(Ready, submit=True))
    play.feed(Submitted(spec(), "c"), sent(R, SubmitRequest, turn=1))
    play.feed(LeaseChanged(LeaseState.LOST))
    values = {"token": "t", "owner": "k", "repeat": "i", "body": "b", "window_ms": WINDOW_MS}
    restore = call(RestoreResumable, resumable_id="c", turn=0, **values)
    play.feed(LeaseChanged(LeaseState.HELD), restore)
    play.answered(given(0, repeat="i", body="b"), kind=RestoreResumable)
    play.feed(LeaseChanged(LeaseState.SUSPECT))
    play.feed(LeaseChanged(LeaseState.HELD))


def test_an_answer_that_the_ledger_has_not_confirmed_is_told_again_with_its_record() -> None:
    """Claimed from elsewhere, complete, and then the ledger was emptied."""
    play = Gateway()
    play.claimed()
    play.hear(R, RequestPlaced("c", 1, D))
    play.tokens(0, *range(50, 59), finish=FinishReason.LENGTH)
    close = closing(play)
    play.feed(LeaseChanged(LeaseState.LOST))
    play.feed(
        LeaseChanged(LeaseState.HELD),
        call(RestoreResumable, resumable_id="c", turn=3),
        CallLedger(close),
    )


def test_a_gateway_that_goes_away_leaves_its_resumables_to_others() -> None:
    """Those that nobody reads at once, the others when time is up: none of them is ended."""
    play = Gateway(drain_ms=5_000)
    play.opened()
    play.tokens(0, 50)
    play.feed(DrainRequested())
    assert play.machine.state.sessions
    said = play.wait(6)
    assert [end.outcome.ending for end in play.ends()] == [Ending.REFUSED]
    assert any(isinstance(command, Exit) for command in said)
    assert not [c for c in said if isinstance(c, CallLedger)]
    away = Gateway()
    away.opened()
    away.feed(ReaderGone("c"), sent(D, TokensBounded))
    assert any(isinstance(command, Exit) for command in away.do(DrainRequested()))


def test_a_router_that_waits_for_a_gateway_which_left_hears_that_it_did() -> None:
    """As often as it asks: else it would wait until that gateway's drain is over. Workers hear
    nothing: they go on."""
    play = Gateway()
    play.opened()
    play.feed(ReaderGone("c"), sent(D, TokensBounded))
    play.do(DrainRequested())
    for _ in range(2):
        play.hear(R, FenceRequest("c", 2), sent(R, RequestLeft, request_id="c"))
    play.hear(D, TokenChunk((TokenRun("c", 1, 0, (50,)),)))


def test_a_gateway_that_is_started_anew_leaves_its_resumables_at_the_limit() -> None:
    """Its client hears that another gateway goes on; the request itself is not ended."""
    play = Gateway(restart_ms=60_000)
    play.opened()
    play.tokens(0, 50)
    play.do(RestartRequested())
    assert not [c for c in play.wait(59) if isinstance(c, End | Exit)]
    said = play.wait(2)
    (end,) = play.ends()
    assert (end.outcome.ending, end.outcome.reason) == (Ending.REFUSED, Reason.DRAINING)
    assert any(isinstance(command, Exit) for command in said)
    assert not [c for c in said if isinstance(c, CallLedger)]


def test_requests_that_come_to_be_resumed_are_bounded_too() -> None:
    """The clients of a gateway that died all come here: twice as many as new ones are served."""
    play = Gateway(resumables_max=2)
    for number in range(4):
        play.do(ResumeWanted(f"claim{number}", f"other{number}", "t", "k"))
    refused = Like(NotResumed, claim="last", why=Unresumable.REFUSED, reason=Reason.OVERLOADED)
    play.feed(ResumeWanted("last", "other", "t", "k"), refused)
    assert len(play.machine.resuming._asking) == 4


@pytest.mark.parametrize("how", ["unplaced", "recovery", "deadline"])
def test_choices_whose_time_is_up_together_end_together(how: str) -> None:
    """What one of them ends with is the others' end too, though their own time came in the same
    turn."""
    play = Gateway()
    play.do(wanted(choices=("c-0", "c-1", "c-2")))
    play.answered(given(0, requests=("c-0", "c-1", "c-2")), Like(Ready, submit=True))
    names = "c-0", "c-1", "c-2"
    for name in names:
        play.do(Submitted(spec(name), "c"))
        if how != "unplaced":
            play.do(Received(R, RequestPlaced(name, 1, D)))
    if how == "recovery":
        play.do_lose(D)
    play.wait(700)
    assert sorted(end.request_id for end in play.ends()) == sorted(names)
    assert not play.machine.state.sessions


def test_a_failure_is_told_again_of_all_that_it_ended() -> None:
    """The second choice failed and took the first along: whoever comes back hears the reason of
    either, after all the ids that there are."""
    play = Gateway()
    play.do(wanted(choices=("c-0", "c-1")))
    play.answered(given(0, requests=("c-0", "c-1")), Like(Ready, submit=True))
    for name in ("c-0", "c-1"):
        play.do(Submitted(spec(name), "c"))
        play.do(Received(R, RequestPlaced(name, 1, D)))
        play.tokens(0, 50, name=name)
    failed = Outcome(Ending.FAILED, reason=Reason.WORKER_LOST)
    play.do(Received(R, RequestFailed("c-1", 1, failed)))
    first = [(end.request_id, end.outcome.reason) for end in play.ends()]
    assert first == [("c-1", Reason.WORKER_LOST), ("c-0", Reason.INTERNAL)]
    told = play.do(ReaderBack("c", ("c-0", "c-1")))
    kinds = [type(each) for each in told if isinstance(each, Deliver | End)]
    assert kinds == [Deliver, Deliver, End, End]
    again = [(end.request_id, end.outcome.reason) for end in told if isinstance(end, End)]
    assert again == [("c-0", Reason.WORKER_LOST), ("c-1", Reason.WORKER_LOST)]


def test_who_comes_back_to_what_was_cancelled_may_ask_anew() -> None:
    """It is no error of the server."""
    play = Gateway()
    play.opened()
    play.do(CancelWanted("c"))
    play.answered(Unavailable("away"), kind=CloseResumable)
    play.do(CLAIM)
    play.answered(Unavailable("away"), Like(Ready, submit=False), kind=ClaimResumable)
    play.do(ReaderBack("c", ("c",)))
    assert of_outcome(play.ends()[-1].outcome).status == 410
