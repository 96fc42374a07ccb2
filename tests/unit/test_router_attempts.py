"""Conversations with the router machine about attempts that end, and what comes after them.

Numbers in brackets are entries of the failure list.
"""

from __future__ import annotations

import pytest

from baton.core.ids import Member, Peer, Role
from baton.core.outcomes import Ending, Outcome, Reason
from baton.ports.driving import CallLedger, LedgerAnswered, Send
from baton.ports.ledger import Done, PlaceRequest, RetryRequest, Unavailable
from baton.ports.transport import PeerLost, PeerUp, Received
from baton.wire.messages import (
    AssignPrefill,
    DecodeReserved,
    RequestEnded,
    RequestFailed,
    RequestFenced,
    RequestRefused,
    ReserveDecode,
    WorkerStatus,
    WorkFailed,
    WorkRefused,
)
from support.machine_playbook import Like, ids, request, sent
from support.router_playbook import (
    COMPLETED,
    D1,
    D_AGAIN,
    FENCE,
    P1,
    PLACED_AGAIN,
    D,
    G,
    P,
    R,
    Router,
    call,
    cancels,
    spec,
)


def test_a_lost_decode_is_recovered_from_with_the_ids_the_client_has() -> None:
    """First the gateway refuses the old epoch; the next attempt is forced to its ids."""
    play = Router(workers=(P, D, D1))
    play.place(spec())
    play.lose(D, *cancels(P), FENCE)
    play.retried(call(PlaceRequest, epoch=2, decode=D1), output=ids(50, 51))
    play.counted("r", D1, epoch=2)
    assert play.messages(ReserveDecode)[-1].output == ids(50, 51)
    assert play.messages(AssignPrefill)[-1].output == ids(50, 51)


def test_a_refused_placement_is_no_failure() -> None:
    """It is placed again, with the next epoch, after a moment."""
    play = Router()
    play.place(spec())
    refused = WorkRefused("r", 1, Reason.NO_BLOCKS)
    play.hear(D, refused, *cancels(D, P), FENCE)
    play.retried()
    assert play.machine.state.entries["r"].blames == []
    assert [PLACED_AGAIN.matches(each) for each in play.wait(0.2)] == [True]


def test_placements_that_are_refused_again_and_again_slow_down() -> None:
    """Each costs an epoch: a worker that refuses for a minute gets tens of them, not hundreds."""
    play = Router(workers=(D,), queue_deadline_ms=90_000)
    play.place(spec(), prefill=None)
    began, epoch = play.now, 1
    while play.now < began + 60.0:
        play.hear(
            D, WorkRefused("r", epoch, Reason.NO_BLOCKS), *cancels(D, epoch=epoch), Like(Send)
        )
        epoch += 1
        play.retried(epoch=epoch)
        play.ready(D)
        said = play.wait(0.9)
        assert len(said) == 1 and call(PlaceRequest, epoch=epoch).matches(said[0])
        play.counted("r", prefill=None, epoch=epoch)
    assert epoch < 100


def refused_for(play: Router, seconds: float, reason: Reason = Reason.NO_BLOCKS) -> int:
    """Let decode refuse each placement of ``r`` for so long; return the epoch of the next one,
    which waits to be placed."""
    until, epoch = play.now + seconds, 1
    while True:
        play.do_hear(D, WorkRefused("r", epoch, reason))
        epoch += 1
        play.retried(epoch=epoch)
        play.ready(D)
        if play.now + 0.9 > until:
            return epoch
        play.wait(0.9)
        play.counted("r", prefill=None, epoch=epoch)


def test_what_no_worker_takes_in_is_refused_in_time() -> None:
    """Decode has the last word on memory: who is placed again and again has no more than who
    waits, and its client may come again just as soon."""
    play = Router(workers=(D,), queue_deadline_ms=10_000)
    play.place(spec(), prefill=None)
    epoch = refused_for(play, 9.5)
    play.ready(D, free=0)
    said = play.wait(3.0)
    assert len(said) == 1
    refused = sent(G, RequestRefused, reason=Reason.OVERLOADED, epoch=epoch)
    assert refused.matches(said[0])
    assert play.messages(RequestRefused)[-1].retry_after_ms >= 1_000


def test_what_a_worker_may_still_take_in_is_not_refused() -> None:
    """Its answer, or what the gateway holds, is waited for; then the time counts again."""
    play = Router(workers=(D,), queue_deadline_ms=10_000)
    play.place(spec(), prefill=None)
    assert play.wait(11.0) == []
    play.hear(D, WorkRefused("r", 1, Reason.NO_BLOCKS), *cancels(D), FENCE)
    assert play.wait(1.0) == []
    play.fenced(call(RetryRequest, epoch=1))
    said = play.wait(0.1)
    assert len(said) == 1 and sent(G, RequestRefused, reason=Reason.OVERLOADED, epoch=2).matches(
        said[0]
    )


@pytest.mark.parametrize("how", ["reserved", "tokens"])
def test_what_a_worker_had_taken_in_waits_for_memory_as_long_as_it_may(how: str) -> None:
    """Something of it was computed: it is put back for older ones, and refused to nobody."""
    play = Router(workers=(D,), queue_deadline_ms=10_000)
    play.place(spec(), prefill=None)
    if how == "reserved":
        play.hear(D, DecodeReserved("r", 1, 0))
    play.failed(D, Reason.NO_BLOCKS, *cancels(D), FENCE)
    play.ready(D, free=0)
    play.retried(output=ids(50) if how == "tokens" else b"")
    assert play.wait(60.0) == []


def test_a_worker_that_refuses_is_left_alone_while_there_is_another() -> None:
    """Without a link to the gateway it would refuse again."""
    play = Router(workers=(D, D1))
    play.place(spec(), prefill=None)
    play.hear(D, WorkRefused("r", 1, Reason.NO_LINK), *cancels(D), FENCE)
    play.retried()
    said = play.wait(0.2)
    assert len(said) == 1 and call(PlaceRequest, epoch=2, decode=D1).matches(said[0])


def test_a_worker_that_fails_everything_is_tried_ever_more_rarely() -> None:
    """(51) Forty requests in a row: a handful of tries, then one a while; healed, it works."""
    play = Router(workers=(P, P1, D))
    broken, began = 0, play.now
    for number in range(40):
        play.admit(spec(f"r{number}"), Like(CallLedger))
        place = play.last(CallLedger).op
        play.counted(f"r{number}", prefill=place.prefill)
        epoch = 1
        if place.prefill == P:
            broken += 1
            play.do(Received(P, WorkFailed(f"r{number}", 1, Reason.PREFILL_ERROR)))
            play.do(Received(G, RequestFenced(f"r{number}", 2, b"")))
            play.answered(Done(2, R.ADMITTED), call(PlaceRequest, epoch=2, prefill=P1))
            play.counted(f"r{number}", prefill=P1, epoch=2)
            epoch = 2
        play.hear(G, RequestEnded(f"r{number}", epoch, COMPLETED))
        for worker in (P, P1, D):
            play.ready(worker)
        play.wait(0.2)
    assert broken <= 6, f"tried {broken} times in {play.now - began:.0f} s"
    play.wait(10.0)
    play.place(spec("healed"))
    play.hear(G, RequestEnded("healed", 1, COMPLETED))
    assert play.machine.state.placement.workers[P].health.failures == 0


def test_a_worker_that_dies_of_all_it_gets_is_tried_ever_more_rarely() -> None:
    """(51) It is back within a fraction of a second each time, as a new process under its name: a
    router that forgot would send it every other request. What it only reserved speaks not for it;
    an answer that is complete does."""
    play = Router(workers=(P, D, D1))
    broken, frail, began = 0, D, play.now
    for number in range(40):
        name = f"r{number}"
        prompt = tuple(range(100 * number, 100 * number + 20))
        play.admit(request(name, prompt, gateway=G), Like(CallLedger))
        op = play.last(CallLedger).op
        play.do(LedgerAnswered(op, Done(1, R.PLACED)))
        epoch = 1
        if op.decode.worker_id == D.worker_id:
            broken += 1
            play.do(Received(frail, DecodeReserved(name, 1, 2)))
            play.do(PeerLost(frail, "died", gone=True))
            frail = Peer(D.worker_id, 100 + number)
            play.do(PeerUp(Member(frail, Role.DECODE, "", 1, "b")))
            play.do(Received(G, RequestFenced(name, 2, b"")))
            play.do(LedgerAnswered(play.last(CallLedger).op, Done(2, R.ADMITTED)))
            again = play.last(CallLedger).op
            assert again.decode == D1
            play.do(LedgerAnswered(again, Done(2, R.PLACED)))
            epoch = 2
        play.do(Received(G, RequestEnded(name, epoch, COMPLETED)))
        play.wait(0.2)
        for worker, free in ((frail, 64), (D1, 32)):
            values = {"blocks_total": 64, "blocks_free": free, "block_size": 16}
            play.do(Received(worker, WorkerStatus(accepting=True, writers=(P,), **values)))
        play.ready(P)
    assert 3 <= broken <= 9, f"tried {broken} times in {play.now - began:.0f} s"


def test_who_was_asked_to_end_is_no_worse_for_it() -> None:
    """A rolling restart: it said that it takes no more before it went."""
    play = Router(workers=(P, D))
    play.ready(D, accepting=False)
    play.do(PeerLost(D, "left", gone=True))
    play.ready(D_AGAIN)
    assert play.machine.state.placement.workers[D_AGAIN].health.failures == 0
    play.do(PeerLost(D_AGAIN, "died", gone=True))
    play.ready(D)
    assert play.machine.state.placement.workers[D].health.failures == 1


@pytest.mark.parametrize("reason", [Reason.NO_BLOCKS, Reason.DRAINING])
def test_giving_way_is_no_failure(reason: Reason) -> None:
    """(17) Pre-empted, or on a worker that shuts down: nobody is to blame."""
    play = Router()
    play.place(spec())
    play.failed(D, reason, *cancels(D, P), FENCE)
    assert play.machine.state.entries["r"].blames == []
    play.failed(D, reason)


def test_a_hopeless_request_fails_at_once() -> None:
    """(5) What the worker calls not retryable is not tried elsewhere."""
    play = Router()
    play.place(spec())
    given_up = sent(G, RequestFailed, outcome=Like(Outcome, reason=Reason.PREFILL_ERROR))
    play.failed(P, Reason.PREFILL_ERROR, *cancels(D, P), given_up, retryable=False)


def test_reports_of_strangers_and_older_epochs_change_nothing() -> None:
    """(12) Only the attempt's own workers say how it goes."""
    play = Router(workers=(P, D))
    play.place(spec())
    play.ready(D1)
    play.failed(D1, Reason.INTEGRITY)
    play.hear(D1, WorkRefused("r", 1, Reason.NO_BLOCKS))
    play.failed(D, Reason.INTEGRITY, epoch=0)
    play.hear(G, DecodeReserved("r", 1, 0))
    play.hear(D, DecodeReserved("x", 1, 0))
    play.hear(D, RequestFenced("x", 1, b""))
    play.hear(D, WorkerStatus(accepting=True))
    play.hear(G, WorkerStatus(accepting=True))
    assert play.machine.state.entries["r"].epoch == 1


def test_a_request_that_nobody_takes_over_fails_in_time() -> None:
    """Within ``recovery_ms``, at the epoch the gateway was fenced to: else it would not count."""
    play = Router(workers=(D,))
    play.place(spec(), prefill=None)
    play.lose(D, FENCE)
    play.retried()
    said = play.wait(10.0)
    outcome = Like(Outcome, ending=Ending.FAILED, reason=Reason.WORKER_LOST)
    assert len(said) == 1 and sent(G, RequestFailed, epoch=2, outcome=outcome).matches(said[0])


@pytest.mark.parametrize("phase", ["fencing", "retrying"])
def test_a_verdict_counts_at_a_gateway_that_was_fenced(phase: str) -> None:
    """The gateway refuses what is below its fence, verdicts too: they carry the fence's epoch."""
    play = Router(workers=(D,))
    play.place(spec(), prefill=None)
    play.lose(D, FENCE)
    if phase == "retrying":
        play.fenced(call(RetryRequest))
        play.answered(Unavailable("down"))
    said = [each for each in play.wait(10.0) if isinstance(each, Send)]
    assert len(said) == 1 and sent(G, RequestFailed, epoch=2).matches(said[0])


def test_what_ran_before_is_failed_and_not_refused() -> None:
    """A refusal says that nothing was computed, and its client has a part of the answer."""
    play = Router(workers=(D,))
    play.place(spec(), prefill=None)
    play.failed(D, Reason.NO_BLOCKS, *cancels(D), FENCE)
    play.retried(PLACED_AGAIN, output=ids(50))
    play.counted("r", prefill=None, epoch=2)
    outcome = Like(Outcome, ending=Ending.FAILED, reason=Reason.TOO_LONG)
    refused = WorkRefused("r", 2, Reason.TOO_LONG, "arena")
    failed = sent(G, RequestFailed, epoch=2, outcome=outcome)
    play.hear(D, refused, *cancels(D, epoch=2), failed)


def test_a_request_decode_calls_too_long_ends_with_that_reason() -> None:
    """It is not tried elsewhere for ever; nothing was computed, so it is refused."""
    play = Router()
    play.place(spec())
    refused = WorkRefused("r", 1, Reason.TOO_LONG, "arena")
    told = sent(G, RequestRefused, epoch=1, reason=Reason.TOO_LONG, retry_after_ms=0)
    play.hear(D, refused, *cancels(D, P), told)


def test_a_request_expires() -> None:
    """Its deadline counts from its arrival, in every phase."""
    play = Router()
    play.place(spec(deadline_ms=5_000))
    said = play.wait(6.0)
    outcome = Like(Outcome, ending=Ending.EXPIRED, reason=Reason.DEADLINE)
    wanted = [*cancels(D, P), sent(G, RequestFailed, outcome=outcome)]
    assert len(said) == 3 and all(w.matches(s) for w, s in zip(wanted, said, strict=True))
