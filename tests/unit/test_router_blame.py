"""Whom a router blames for what ends without a result, and when it gives a request up.

Numbers in brackets are entries of the failure list.
"""

from __future__ import annotations

from baton.core.ids import Peer
from baton.core.outcomes import Ending, Outcome, Reason
from baton.ports.driving import CallLedger, LedgerAnswered, Send
from baton.ports.ledger import Done, PlaceRequest, RetryRequest
from baton.wire.messages import (
    AssignPrefill,
    AttemptId,
    FenceRequest,
    LastStep,
    RequestFailed,
    RequestFenced,
    ReserveDecode,
    WorkerStatus,
    WorkFailed,
)
from support.machine_playbook import Like, ids, sent
from support.router_playbook import D1, D_AGAIN, SIZE, D, G, P, R, Router, call, spec

EXHAUSTED = Like(Outcome, ending=Ending.FAILED, reason=Reason.ATTEMPTS_EXHAUSTED)


def fence(epoch: int) -> Like:
    return sent(G, FenceRequest, epoch=epoch)


def fail(play: Router, epoch: int, reason: Reason = Reason.INTEGRITY, name: str = "r") -> None:
    """The attempt of ``epoch`` fails on decode; its gateway is asked for a fence."""
    over = [Like(Send), Like(Send), sent(G, FenceRequest, request_id=name, epoch=epoch + 1)]
    play.do_hear(P, WorkerStatus(accepting=True, block_size=SIZE))
    play.hear(D, WorkFailed(name, epoch, reason), *over)


def retried(play: Router, epoch: int, output: bytes = b"", name: str = "r") -> None:
    """Gateway and ledger have the next epoch."""
    play.hear(G, RequestFenced(name, epoch, output), call(RetryRequest, epoch=epoch - 1))
    play.do(LedgerAnswered(play.last(CallLedger).op, Done(epoch, R.ADMITTED)))


def placed(play: Router, epoch: int, name: str = "r") -> float:
    """Wait until it is placed; return how long that took."""
    began = play.now
    while not isinstance(play.last(CallLedger).op, PlaceRequest):
        play.wait(0.05)
        assert play.now < began + 20.0
    place = play.last(CallLedger).op
    assert isinstance(place, PlaceRequest) and place.epoch == epoch
    play.do(LedgerAnswered(place, Done(epoch, R.PLACED)))
    return play.now - began


def test_attempts_are_bounded_and_the_error_says_so() -> None:
    """(51) After ``attempts_max`` failures in a row, at the epoch the gateway was fenced to."""
    play = Router(attempts_max=2)
    play.place(spec())
    fail(play, 1)
    play.failed(P, Reason.FENCED)
    retried(play, 2)
    placed(play, 2)
    fail(play, 2)
    play.fenced(sent(G, RequestFailed, epoch=3, outcome=EXHAUSTED), epoch=3)
    message = play.messages(RequestFailed)[-1].outcome.message
    assert message.startswith("2 attempts in a row failed, the last one: integrity")


def test_new_tokens_clear_a_request_of_older_failures() -> None:
    """A long answer may meet any number of faults, as long as it goes on in between."""
    play = Router(attempts_max=2)
    play.place(spec())
    for epoch in range(1, 6):
        fail(play, epoch)
        retried(play, epoch + 1, ids(*range(epoch)))
        placed(play, epoch + 1)
        assert len(play.machine.state.entries["r"].blames) == 1


def test_a_request_that_fails_twice_without_progress_runs_alone() -> None:
    """Its reservation and its assignment say so; after the next token they do not any more."""
    play = Router(attempts_max=5)
    play.place(spec())
    alone = []
    for epoch, output in ((1, b""), (2, b""), (3, ids(50))):
        fail(play, epoch)
        retried(play, epoch + 1, output)
        placed(play, epoch + 1)
        alone.append(play.messages(ReserveDecode)[-1].alone)
        assert play.messages(AssignPrefill)[-1].alone == alone[-1]
    assert alone == [False, True, False]


def test_failures_of_its_own_slow_the_next_attempt_down() -> None:
    """Each waits twice as long as the one before, and not all requests equally long."""
    waits: dict[str, list[float]] = {}
    for name in ("r", "s"):
        play = Router(attempts_max=9)
        play.place(spec(name))
        waits[name] = []
        for epoch in range(1, 6):
            fail(play, epoch, name=name)
            retried(play, epoch + 1, name=name)
            waits[name].append(placed(play, epoch + 1, name))
    for first, *others in waits.values():
        assert first == 0.0
        assert 0.125 <= others[0] <= 0.3
        assert others[3] > 3 * others[1] > 3 * others[0]
    assert waits["r"] != waits["s"]


def test_only_who_was_in_the_step_is_blamed_for_a_workers_death() -> None:
    """(9) The successor says who was; from all others the blame is taken back."""
    play = Router((P, D))
    for name in ("a", "b"):
        play.place(spec(name))
    play.ready(D1)
    play.do_lose(D)
    entries = play.machine.state.entries
    assert [len(entries[name].blames) for name in ("a", "b")] == [1, 1]
    play.ready(D_AGAIN)
    play.do_hear(D_AGAIN, LastStep(D, (AttemptId("a", 1), AttemptId("b", 7))))
    assert [len(entries[name].blames) for name in ("a", "b")] == [1, 0]


def test_a_prefill_that_dies_is_a_workers_death_too() -> None:
    """Decode reports it; the prompts that waited behind the one in work are not to blame."""
    play = Router()
    play.place(spec())
    fail(play, 1, Reason.WORKER_LOST)
    assert play.machine.state.entries["r"].blames[0].lost == {P}
    play.hear(D, LastStep(P, ()))
    assert play.machine.state.entries["r"].blames == []


def test_a_blame_is_open_until_the_successors_of_all_that_ended_have_spoken() -> None:
    """Prefill and decode of one attempt end in one moment; only prefill's end was its doing."""
    play = Router((P, D, D1))
    play.place(spec())
    play.do_lose(D)
    play.do_lose(P)
    entry = play.machine.state.entries["r"]
    play.ready(D_AGAIN)
    play.do_hear(D_AGAIN, LastStep(D, ()))
    assert [blame.lost for blame in entry.blames] == [{P}]
    play.do_hear(D_AGAIN, LastStep(P, (AttemptId("r", 1),)))
    assert [blame.lost for blame in entry.blames] == [set()]


def test_an_attempt_that_was_over_counts_if_it_ended_another_worker_too() -> None:
    """Once, whichever successor speaks first and however often; unless new tokens came since."""
    over = LastStep(P, (AttemptId("r", 1),))
    for first, second in ((over, LastStep(D, ())), (LastStep(D, ()), over)):
        play = Router((P, D, D1))
        play.place(spec())
        play.do_lose(D)
        retried(play, 2)
        entry = play.machine.state.entries["r"]
        play.ready(D_AGAIN)
        play.do_hear(D_AGAIN, first)
        play.do_hear(D_AGAIN, second)
        play.do_hear(D_AGAIN, over)
        assert [(blame.epoch, blame.lost) for blame in entry.blames] == [(1, set())]
        entry.progress = 2
        entry.blames.clear()
        play.do_hear(D_AGAIN, over)
        assert not entry.blames


def test_nobody_is_given_up_for_deaths_that_nobody_has_spoken_of_yet() -> None:
    """It waits for the successors' words, at most as long as a restart may take."""
    for verdict in ("guilty", "innocent", "silence"):
        play = Router((P, D, D1), attempts_max=2)
        play.place(spec())
        play.do_lose(D)
        retried(play, 2)
        placed(play, 2)
        play.do_lose(D1)
        retried(play, 3)
        play.ready(D_AGAIN)
        assert not play.messages(RequestFailed) and not play.wait(5.0), "on trial"
        failed = sent(G, RequestFailed, epoch=3, outcome=EXHAUSTED)
        if verdict == "guilty":
            play.hear(D_AGAIN, LastStep(D, (AttemptId("r", 1),)))
            play.hear(D_AGAIN, LastStep(D1, (AttemptId("r", 2),)), failed)
        elif verdict == "innocent":
            play.hear(D_AGAIN, LastStep(D, ()), call(PlaceRequest, decode=D_AGAIN))
        else:
            said = play.wait(6.0)
            assert len(said) == 1 and failed.matches(said[0])


def test_deaths_in_a_row_do_not_slow_a_request_down() -> None:
    """They are not its own fault as far as anybody knows: its stream stalls as little as it can."""
    play = Router((P, D, D1))
    play.place(spec())
    play.do_lose(D)
    retried(play, 2)
    assert placed(play, 2) == 0.0
    play.do_lose(D1)
    play.ready(D_AGAIN)
    retried(play, 3)
    assert placed(play, 3) == 0.0


def test_what_cannot_be_reached_is_no_failure_of_the_request() -> None:
    """A link between decode and the gateway that is cut blames nobody."""
    play = Router()
    play.place(spec())
    fail(play, 1, Reason.NO_LINK)
    assert play.machine.state.entries["r"].blames == []


def test_failures_are_kept_in_the_ledger() -> None:
    """Whoever adopts the request later goes on counting."""
    play = Router(attempts_max=5)
    play.place(spec())
    for epoch in (1, 2):
        fail(play, epoch)
        retried(play, epoch + 1)
        op = next(
            c.op
            for c in reversed(play.all)
            if isinstance(c, CallLedger) and isinstance(c.op, RetryRequest)
        )
        assert op.failures == epoch
        placed(play, epoch + 1)


def test_a_superseded_workers_word_is_not_taken_for_anothers() -> None:
    """Incarnations are told apart: an old death says nothing of a new one."""
    play = Router((P, D, D1))
    play.place(spec())
    play.do_lose(D)
    play.hear(D1, LastStep(Peer("decode-0", 1), ()))
    assert len(play.machine.state.entries["r"].blames) == 1
