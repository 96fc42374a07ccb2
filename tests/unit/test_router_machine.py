"""Conversations with the router machine. Numbers in brackets are entries of the failure list."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.events import DrainRequested, LeaseChanged, RestartRequested
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.outcomes import Ending, Outcome, Reason
from baton.ports.driving import EXIT_RESTART, CallLedger, Exit, LedgerAnswered, Send
from baton.ports.ledger import (
    AdmitRequest,
    Adopted,
    AdoptRequest,
    Conflict,
    Done,
    EndRequest,
    PlaceRequest,
    RetryRequest,
    Unavailable,
)
from baton.ports.transport import PeerLost, PeerUp, Received
from baton.wire.messages import (
    AssignPrefill,
    CancelWork,
    DecodeReserved,
    FenceRequest,
    MoveOffered,
    PoolStatus,
    RequestEnded,
    RequestFailed,
    RequestFenced,
    RequestPlaced,
    RequestRefused,
    ReserveDecode,
    WorkAsked,
    WorkerStatus,
    WorkFailed,
    WorkRefused,
)
from support.machine_playbook import Like, ids, request, sent
from support.router_playbook import (
    CANCELLED,
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

# --- admission ----------------------------------------------------------------------------------


def test_a_request_is_admitted_counted_and_placed() -> None:
    """The ledger has it before it is placed, and the attempt is counted before work starts."""
    play = Router()
    play.place(spec())
    play.hear(D, DecodeReserved("r", 1, 0))
    play.hear(G, RequestEnded("r", 1, COMPLETED))
    assert not play.machine.state.entries


def test_no_decode_worker_is_told_from_overload() -> None:
    """(69) An empty registry and full queues have different codes, both at once, both with a
    time to come back."""
    play = Router(workers=(P,))
    play.wait(2.0)
    refused = sent(G, RequestRefused, reason=Reason.NO_DECODE_WORKER)
    play.submit(spec("a"), refused)
    play.ready(D, blocks=2, free=0)
    play = Router(workers=(D,), queue_requests_max=1)
    play.ready(D, free=0)
    play.admit(spec("a"))
    play.submit(spec("b"), sent(G, RequestRefused, reason=Reason.OVERLOADED))
    assert play.messages(RequestRefused)[-1].retry_after_ms >= 1_000


def test_the_queue_is_bounded_by_prompt_tokens_from_the_first_moment() -> None:
    """(63) Requests that the ledger has not answered for count as well."""
    play = Router(queue_tokens_max=50)
    play.submit(spec("a"), call(AdmitRequest))
    play.submit(spec("b"), call(AdmitRequest))
    play.submit(spec("c"), sent(G, RequestRefused, reason=Reason.OVERLOADED))


def test_what_no_arena_holds_is_refused_at_once() -> None:
    """(60) The head always fits, or it was never admitted; an open end is cut to what fits."""
    play = Router(blocks=2)
    play.submit(spec("a", max_tokens=13), sent(G, RequestRefused, reason=Reason.TOO_LONG))
    play.submit(spec("b", max_tokens=13, open_ended=True), call(AdmitRequest))
    assert play.last(CallLedger).op.spec.max_tokens == 12


def test_a_suspect_router_admits_when_it_has_its_lease_again_or_refuses_in_time() -> None:
    """(44) A lease permits transitions; a short silence of the ledger costs a wait, no refusal."""
    play = Router()
    play.feed(LeaseChanged(LeaseState.SUSPECT))
    play.submit(spec("a"))
    assert play.wait(2.5) == []
    play.feed(LeaseChanged(LeaseState.HELD))
    assert [call(AdmitRequest).matches(each) for each in play.wait(0.3)] == [True]
    play.feed(LeaseChanged(LeaseState.SUSPECT))
    play.submit(spec("b"))
    (said,) = [each for each in play.wait(3.3) if isinstance(each, Send)]
    assert sent(G, RequestRefused, reason=Reason.LEDGER_UNAVAILABLE).matches(said)


def test_a_draining_router_admits_nothing() -> None:
    """A process on its way out takes nothing new."""
    play = Router()
    play.feed(DrainRequested(), Exit(0, "drained"))
    play.submit(spec("a"), sent(G, RequestRefused, reason=Reason.DRAINING))


def test_a_repeated_submission_starts_nothing() -> None:
    """Create-or-return: the gateway is told again what it may have missed."""
    play = Router()
    play.submit(spec(), call(AdmitRequest))
    play.submit(spec())
    play.answered(Done(1, R.ADMITTED), call(PlaceRequest))
    play.counted("r")
    play.submit(spec(), sent(G, RequestPlaced, epoch=1))


def test_a_silent_ledger_is_asked_again_and_refused_in_time() -> None:
    """An admission waits for the ledger, not for ever."""
    play = Router()
    play.submit(spec(), call(AdmitRequest))
    play.answered(Unavailable("down"))
    assert [call(AdmitRequest).matches(each) for each in play.wait(0.3)] == [True]
    play.now += 3.0
    refused = sent(G, RequestRefused, reason=Reason.LEDGER_UNAVAILABLE)
    play.answered(Unavailable("down"), refused)
    play.hear(G, RequestEnded("r", 1, CANCELLED))
    assert not play.machine.state.entries


def test_time_is_looked_at_however_busy_the_router_is() -> None:
    """(63) Events that come faster than the tick do not put it off."""
    play = Router()
    play.submit(spec(), call(AdmitRequest))
    play.answered(Unavailable("down"))
    due = play.machine.deadline()
    for _ in range(10):
        play.now += 0.01
        play.ready(D)
    due_now = play.machine.deadline()
    assert due is not None and due_now == due <= play.now


# --- placement ----------------------------------------------------------------------------------


def test_a_request_waits_for_memory_and_is_refused_in_time() -> None:
    """(63) Accepted ones keep their place until the queue's deadline."""
    play = Router(queue_deadline_ms=10_000)
    play.ready(D, free=1)
    play.admit(spec())
    assert play.wait(10.0) == []
    said = play.wait(2.0)
    assert len(said) == 1
    assert sent(G, RequestRefused, reason=Reason.OVERLOADED).matches(said[0])


def test_small_requests_pass_a_big_one_a_bounded_number_of_times() -> None:
    """(60) Then it is next, and everybody waits for it."""
    play = Router(workers=(D,), bypass_max=2)
    play.ready(D, free=10)
    play.admit(spec("big", tokens=400))
    for number in range(2):
        play.place(spec(f"s{number}", tokens=1), prefill=None)
        play.ready(D, free=10)
    play.admit(spec("s2", tokens=1))
    play.ready(D, call(PlaceRequest, request_id="big"), call(PlaceRequest, request_id="s2"))


def test_prompts_wait_here_rather_than_at_prefill() -> None:
    """(62) A prefill worker gets a few at a time; the others cost nothing when cancelled."""
    play = Router(prefill_ahead_max=1)
    play.place(spec("a"))
    play.admit(spec("b"))
    play.hear(G, RequestEnded("b", 1, CANCELLED))
    play.ready(P, waiting=0)
    assert list(play.machine.state.entries) == ["a"]


def test_a_request_goes_where_all_of_it_fits() -> None:
    """Of arenas of different size, one that holds prompt and answer."""
    play = Router(workers=())
    play.ready(D, blocks=2)
    play.ready(D1, blocks=64, free=10)
    play.admit(spec(max_tokens=100), call(PlaceRequest, decode=D1))


def test_a_worker_that_is_gone_when_the_ledger_answers_gets_nothing() -> None:
    """(4) The attempt is counted, and over: the next one goes elsewhere."""
    play = Router(workers=(D,))
    play.admit(spec(), call(PlaceRequest, decode=D))
    place = play.last(CallLedger).op
    play.lose(D)
    play.feed(LedgerAnswered(place, Done(1, R.PLACED)), FENCE)
    play.retried()
    play.ready(D1, call(PlaceRequest, epoch=2, decode=D1))


# --- attempts that end ----------------------------------------------------------------------------


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
    play = Router(workers=(D,))
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


def test_what_was_placed_before_is_failed_and_not_refused() -> None:
    """A refusal says that nothing was computed: the gateway does not take it for a running one."""
    play = Router(workers=(D,))
    play.place(spec(), prefill=None)
    play.failed(D, Reason.NO_BLOCKS, *cancels(D), FENCE)
    play.ready(D, free=0)
    play.retried(output=ids(50))
    outcome = Like(Outcome, ending=Ending.FAILED, reason=Reason.DRAINING)
    play.feed(DrainRequested(), sent(G, RequestFailed, epoch=2, outcome=outcome))
    play.hear(G, RequestEnded("r", 2, Outcome(Ending.FAILED)), Exit(0, "drained"))


def test_a_request_decode_calls_too_long_ends_with_that_reason() -> None:
    """It is placed already, so it fails; it is not tried elsewhere for ever."""
    play = Router()
    play.place(spec())
    outcome = Like(Outcome, ending=Ending.FAILED, reason=Reason.TOO_LONG)
    refused = WorkRefused("r", 1, Reason.TOO_LONG, "arena")
    play.hear(D, refused, *cancels(D, P), sent(G, RequestFailed, epoch=1, outcome=outcome))


def test_a_request_expires() -> None:
    """Its deadline counts from its arrival, in every phase."""
    play = Router()
    play.place(spec(deadline_ms=5_000))
    said = play.wait(6.0)
    outcome = Like(Outcome, ending=Ending.EXPIRED, reason=Reason.DEADLINE)
    wanted = [*cancels(D, P), sent(G, RequestFailed, outcome=outcome)]
    assert len(said) == 3 and all(w.matches(s) for w, s in zip(wanted, said, strict=True))


# --- other owners ---------------------------------------------------------------------------------


def test_a_request_of_another_router_is_not_admitted_again() -> None:
    """The gateway has given it to that one since: nothing is said, and nothing done."""
    play = Router()
    play.submit(spec(), call(AdmitRequest))
    play.answered(Conflict(3, R.DECODING, turn=9))
    assert not play.machine.state.entries


def test_a_request_that_ended_before_is_told_to_its_gateway() -> None:
    """Somebody ended it while its gateway was away: no silence, and the entry goes with the end."""
    play = Router()
    play.submit(spec(), call(AdmitRequest))
    told = sent(G, RequestFailed, epoch=3, outcome=CANCELLED)
    play.answered(Conflict(3, R.CANCELLED, CANCELLED), told)
    play.hear(G, RequestEnded("r", 3, CANCELLED))
    assert not play.machine.state.entries


@pytest.mark.parametrize("op", ["place", "retry"])
def test_a_request_that_another_router_took_over_is_let_go(op: str) -> None:
    """Whoever has the newer epoch answers for it: a verdict from here would end a healthy one."""
    play = Router()
    play.admit(spec(), call(PlaceRequest))
    if op == "retry":
        play.counted("r")
        play.failed(D, Reason.INTEGRITY, *cancels(D, P), FENCE)
        play.fenced(call(RetryRequest))
    play.answered(Conflict(2, R.PLACED, turn=9))
    assert not play.machine.state.entries


def test_a_fence_that_is_answered_with_a_later_epoch_goes_on_from_there() -> None:
    """Somebody had fenced it whose retry the ledger never saw: no epoch is used twice."""
    play = Router()
    play.place(spec())
    play.failed(D, Reason.INTEGRITY, *cancels(D, P), FENCE)
    play.fenced(call(RetryRequest, epoch=4), epoch=5)
    play.answered(Conflict(1, R.PLACED), call(AdoptRequest, epoch=4, decode=None))
    play.answered(Adopted(4, R.ADMITTED, 1, 0, None, None), call(RetryRequest, epoch=4))
    play.answered(Done(5, R.ADMITTED), call(PlaceRequest, epoch=5))


def test_late_answers_of_the_ledger_change_nothing() -> None:
    """An answer counts only in the phase and epoch that asked for it."""
    play = Router()
    play.admit(spec(), call(PlaceRequest))
    place = play.last(CallLedger).op
    play.counted("r")
    play.feed(LedgerAnswered(place, Done(1, R.PLACED)))
    play.failed(D, Reason.INTEGRITY, *cancels(D, P), FENCE)
    play.feed(LedgerAnswered(place, Conflict(9, R.PLACED)))
    play.retried(PLACED_AGAIN)
    play.feed(LedgerAnswered(place, Done(1, R.PLACED)))
    assert play.machine.state.entries["r"].epoch == 2


# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phase", ["admitting", "queued", "placing", "placed", "fencing", "retrying", "closing"]
)
def test_a_cancel_has_effect_in_every_phase(phase: str) -> None:
    """(4, 19) Workers that may hold something are told; what is pending ends without effect."""
    play = Router()
    reached = _drive(play, phase)
    told = cancels(D, P) if reached == "placed" else []
    pending = play.last(CallLedger).op
    play.hear(G, RequestEnded("r", 1, CANCELLED), *told)
    assert not play.machine.state.entries and len(play.machine.state.queue) == 0
    # A record that is made after the end is ended too.
    late = (
        [call(EndRequest, epoch=1, outcome=CANCELLED)] if isinstance(pending, AdmitRequest) else []
    )
    play.feed(LedgerAnswered(pending, Done(1, R.ADMITTED)), *late)
    play.fenced()
    play.ready(D)
    assert not play.machine.state.entries


def test_an_end_that_came_before_the_record_is_the_routers_to_make() -> None:
    """The gateway had heard of no attempt, so its own end may have found no record."""
    play = Router()
    play.ready(D, free=0)
    play.admit(spec())
    play.hear(G, RequestEnded("r", 1, CANCELLED, early=True), call(EndRequest, outcome=CANCELLED))


def _drive(play: Router, phase: str) -> str:
    """Bring request ``r`` to ``phase``."""
    if phase == "queued":
        play.ready(D, free=0)
    play.submit(spec(), call(AdmitRequest))
    if phase == "admitting":
        return phase
    play.answered(Done(1, R.ADMITTED), *([] if phase == "queued" else [call(PlaceRequest)]))
    if phase in ("queued", "placing"):
        return phase
    play.counted("r")
    if phase == "placed":
        return phase
    if phase == "closing":
        play.failed(D, Reason.DECODE_ERROR, *cancels(D, P), Like(Send), retryable=False)
        return phase
    play.failed(D, Reason.INTEGRITY, *cancels(D, P), FENCE)
    if phase == "retrying":
        play.fenced(call(RetryRequest))
    return phase


@pytest.mark.parametrize(
    "phase", ["admitting", "queued", "placing", "placed", "fencing", "retrying", "closing"]
)
def test_a_gateway_that_is_over_is_ended_for(phase: str) -> None:
    """Its requests are cancelled, in the ledger too, and nothing is kept."""
    play = Router()
    _drive(play, phase)
    told = cancels(D, P) if phase == "placed" else []
    play.lose(G, *told, call(EndRequest), gone=True)
    assert not play.machine.state.entries


def test_a_gateway_out_of_reach_is_told_again_when_it_is_back() -> None:
    """What the lost link took with it is said on the new one."""
    for phase, again in (
        ("placed", RequestPlaced),
        ("fencing", FenceRequest),
        ("closing", RequestFailed),
    ):
        play = Router()
        _drive(play, phase)
        play.lose(G)
        play.up(G, Role.GATEWAY, sent(G, again, request_id="r"))


def test_a_running_request_does_not_end_because_its_router_lost_the_gateway() -> None:
    """Its tokens go from decode to the gateway: the router is not on that path."""
    play = Router()
    play.place(spec())
    play.lose(G)
    said = play.wait(20.0)
    assert {type(command.message) for command in said} == {WorkAsked}
    assert play.machine.state.entries["r"].decode == D, "it is still placed there"
    play.up(G, Role.GATEWAY, sent(G, RequestPlaced))
    play.hear(G, RequestEnded("r", 1, COMPLETED))


def test_a_request_that_needs_its_gateway_ends_without_it_in_time() -> None:
    """Nobody can be fenced: after ``recovery_ms`` it is cancelled as its gateway is lost."""
    play = Router()
    _drive(play, "fencing")
    play.lose(G)
    assert [call(EndRequest).matches(each) for each in play.wait(10.0)] == [True]
    assert not play.machine.state.entries


def test_a_request_given_up_is_not_kept_for_ever() -> None:
    """A gateway that never says how it ended: the ledger's record answers a repetition."""
    play = Router()
    _drive(play, "closing")
    play.wait(59.0)
    assert play.machine.state.entries
    play.wait(2.0)
    assert not play.machine.state.entries


def test_a_drain_refuses_what_was_not_placed_and_waits_for_the_rest() -> None:
    """Nothing of it is silent."""
    play = Router()
    play.place(spec("r"))
    play.submit(spec("a"), call(AdmitRequest))
    play.feed(DrainRequested(), sent(G, RequestRefused, request_id="a", reason=Reason.DRAINING))
    play.answered(Done(1, R.ADMITTED))
    play.hear(G, RequestEnded("a", 1, CANCELLED))
    play.hear(G, RequestEnded("r", 1, COMPLETED), Exit(0, "drained"))
    play.feed(DrainRequested())


def test_a_drain_ends_in_time() -> None:
    """Running requests go on without their router: decode tells the gateway if one fails."""
    play = Router(drain_ms=1_000)
    play.place(spec("r"))
    play.feed(DrainRequested())
    assert play.wait(0.9) == []
    assert play.wait(0.2) == [Exit(0, "drained")]


def test_a_restart_ends_at_once() -> None:
    """What runs needs no router; gateways give the rest to the next one."""
    play = Router()
    play.place(spec("r"))
    play.feed(RestartRequested(), Exit(EXIT_RESTART, "restart"))
    play.feed(RestartRequested())


# --- what gateways are told of the pool -----------------------------------------------------------


def _pool(play: Router) -> PoolStatus:
    return play.messages(PoolStatus, G)[-1]


def test_the_pool_serves_when_a_pair_has_met() -> None:
    """Linked workers are not enough: prefill must have mapped the memory it is to write into."""
    play = Router(workers=())
    assert _pool(play) == PoolStatus(False, Reason.NO_DECODE_WORKER, "no decode worker is ready")
    play.ready(D, writers=())
    assert _pool(play).reason is Reason.NO_PREFILL_WORKER
    play.ready(P)
    assert _pool(play).reason is Reason.NO_PREFILL_WORKER
    play.ready(D, writers=(P,))
    assert _pool(play) == PoolStatus(True)
    play.lose(P)
    assert _pool(play).reason is Reason.NO_PREFILL_WORKER


def test_a_new_gateway_hears_of_the_pool_at_once() -> None:
    """It would refuse everybody until the next change."""
    play = Router()
    other = Peer("gateway-1", 9)
    play.up(other, Role.GATEWAY)
    assert play.messages(PoolStatus, other) == [PoolStatus(True)]


def test_nobody_is_placed_with_a_prefill_that_cannot_write_there() -> None:
    """It waits for the pair to meet; if that does not happen decode computes the prompt itself."""
    play = Router(workers=())
    play.ready(P)
    play.ready(D, writers=())
    play.admit(spec())
    said = play.wait(3.0)
    assert [each.op.prefill for each in said if isinstance(each, CallLedger)] == [None]
    play = Router(workers=())
    play.ready(P)
    play.ready(D, writers=())
    play.admit(spec())
    play.ready(D, call(PlaceRequest, prefill=P), writers=(P,))


# --- what a lost decode worker has left -----------------------------------------------------------


def lost_decode(*workers: Peer, reserved: bool = True, host: str = "b") -> Router:
    """A request runs on ``D``, which dies; ``workers`` are there then."""
    play = Router((P, D))
    play.place(spec(tokens=20))
    if reserved:
        play.hear(D, DecodeReserved("r", 1, 0))
    play.lose(D, *cancels(P), FENCE, gone=True)
    for worker in workers:
        play.ready(worker, host=host)
    return play


def test_another_decode_of_the_host_goes_on_from_the_lost_ones_arena() -> None:
    """It is told where the KV is, and needs no prefill."""
    play = lost_decode(D1)
    play.retried(call(PlaceRequest, decode=D1, prefill=None), output=ids(1, 2))
    play.counted("r", D1, None, epoch=2, source="decode-0")


def test_a_restarted_decode_goes_on_in_its_own_arena_before_another_copies_it() -> None:
    """Where it is in place nothing has to be copied."""
    play = lost_decode(D1, D_AGAIN)
    play.retried(call(PlaceRequest, decode=D_AGAIN, prefill=None))
    play.counted("r", D_AGAIN, None, epoch=2, source="decode-0")


def test_a_decode_on_another_host_cannot_read_the_arena() -> None:
    """There the prompt is prefilled again."""
    play = lost_decode(D1, host="elsewhere")
    play.retried(call(PlaceRequest, decode=D1, prefill=P))
    play.counted("r", D1, P, epoch=2)


def test_what_was_never_reserved_has_left_nothing() -> None:
    """Decode died before it took the request in: nobody looks into its arena."""
    play = lost_decode(D1, reserved=False)
    play.retried(call(PlaceRequest, decode=D1, prefill=P))
    play.counted("r", D1, P, epoch=2)


def test_kv_that_is_not_there_is_prefilled_again() -> None:
    """The next attempt looks for it no more, and its decode worker is not to blame."""
    play = lost_decode(D1)
    play.retried(call(PlaceRequest, decode=D1, prefill=None))
    play.counted("r", D1, None, epoch=2, source="decode-0")
    refused = WorkRefused("r", 2, Reason.KV_MISSING)
    play.hear(D1, refused, *cancels(D1, epoch=2), Send(G, FenceRequest("r", 3)))
    play.retried(epoch=3)
    assert play.machine.state.placement.workers[D1].health.avoid_until == 0
    play.now += 0.1
    play.ready(D1, call(PlaceRequest, decode=D1, prefill=P, epoch=3))
    play.counted("r", D1, P, epoch=3)


def test_what_one_loss_has_left_is_not_looked_for_after_the_next_place_has_it() -> None:
    """The source of an attempt is the worker that was lost last."""
    play = lost_decode(D1)
    play.retried(call(PlaceRequest, decode=D1, prefill=None))
    play.counted("r", D1, None, epoch=2, source="decode-0")
    play.hear(D1, DecodeReserved("r", 2, 16))
    play.lose(D1, Send(G, FenceRequest("r", 3)))
    play.ready(D_AGAIN)
    play.retried(call(PlaceRequest, decode=D_AGAIN, prefill=None), epoch=3)
    play.counted("r", D_AGAIN, None, epoch=3, source="decode-1")


# --- draining decode workers ----------------------------------------------------------------------

MOVED = sent(D, CancelWork, request_id="r", epoch=1, reason=Reason.MOVED)


def moving(*, tokens: int = 40, **limits: Any) -> Router:
    """``D`` drains and has offered ``r``, which it has let grow to ``tokens``; ``D1`` is there."""
    play = Router((P, D), **limits)
    play.place(spec(tokens=20, max_tokens=100))
    play.hear(D, DecodeReserved("r", 1, 0))
    play.ready(D, accepting=False, running=1)
    play.hear(D, MoveOffered("r", 1, tokens))
    return play


def test_a_request_is_taken_off_a_draining_decode_when_another_has_room() -> None:
    """It is stopped there, its blocks kept until the other one has them, then let go."""
    play = moving()
    fence = [*cancels(P), FENCE]
    play.ready(D1, MOVED, *fence)
    play.retried(call(PlaceRequest, decode=D1, prefill=None), output=ids(1, 2))
    play.counted("r", D1, None, epoch=2, source="decode-0")
    released = sent(D, CancelWork, request_id="r", epoch=2, reason=Reason.SUPERSEDED)
    play.hear(D1, DecodeReserved("r", 2, 32), released)
    entry = play.machine.state.entries["r"]
    assert (entry.blames, entry.source, entry.keeper) == ([], "", None)


def test_without_another_decode_it_runs_on_where_it_is() -> None:
    """Also with one on another host, which cannot read its blocks, or without room for it."""
    play = moving(tokens=40)
    play.ready(D1, host="elsewhere")
    play.wait(1.0)
    play.lose(D1)
    play.ready(D1, free=2)
    play.wait(1.0)
    assert play.machine.state.entries["r"].epoch == 1
    play.ready(D1, MOVED, *cancels(P), FENCE, free=8)


def test_one_request_at_a_time_is_on_its_way() -> None:
    """The room at its next place is counted before another one follows; a few are imported at a
    time."""
    play = Router((P, D), moves_max=2)
    for name in "abc":
        play.place(spec(name, max_tokens=100))
        play.hear(D, DecodeReserved(name, 1, 0))
        play.hear(D, MoveOffered(name, 1, 30))

    def leaves(name: str) -> list[Like]:
        stopped = [sent(peer, CancelWork, request_id=name) for peer in (D, P)]
        return [*stopped, sent(G, FenceRequest, request_id=name)]

    def arrives(name: str, *then: Like) -> None:
        play.hear(G, RequestFenced(name, 2, b""), call(RetryRequest))
        play.answered(Done(2, R.ADMITTED), call(PlaceRequest, decode=D1), *then)

    play.ready(D, accepting=False)
    play.ready(D1, *leaves("a"))
    arrives("a", *leaves("b"))
    placing = play.last(CallLedger)
    play.hear(G, RequestFenced("b", 2, b""), call(RetryRequest))
    retrying = play.last(CallLedger)
    told = [sent(D1, ReserveDecode), sent(G, RequestPlaced)]
    play.feed(LedgerAnswered(placing.op, Done(2, R.PLACED)), *told)
    play.feed(LedgerAnswered(retrying.op, Done(2, R.ADMITTED)), call(PlaceRequest, decode=D1))
    play.counted("b", D1, None, epoch=2, source="decode-0")
    released = sent(D, CancelWork, request_id="a", epoch=2)
    play.hear(D1, DecodeReserved("a", 2, 16), released, *leaves("c"))


@pytest.mark.parametrize("end", ["ended", "missing", "died", "gateway"])
def test_blocks_are_kept_for_nobody_longer_than_somebody_wants_them(end: str) -> None:
    """The request ended, the KV was not found, its keeper died, its gateway is over."""
    play = moving()
    play.ready(D1, MOVED, *cancels(P), FENCE)
    released = sent(D, CancelWork, request_id="r", reason=Reason.SUPERSEDED)
    if end == "ended":
        play.hear(G, RequestEnded("r", 2, COMPLETED), released)
    elif end == "gateway":
        play.lose(G, call(EndRequest), released, gone=True)
    elif end == "died":
        play.lose(D, gone=True)
        play.retried(call(PlaceRequest, decode=D1, prefill=None))
        play.counted("r", D1, None, epoch=2, source="decode-0")
        play.hear(D1, DecodeReserved("r", 2, 0))
    else:
        play.retried(call(PlaceRequest, decode=D1, prefill=None))
        play.counted("r", D1, None, epoch=2, source="decode-0")
        refused = WorkRefused("r", 2, Reason.KV_MISSING)
        play.hear(D1, refused, released, *cancels(D1, epoch=2), Send(G, FenceRequest("r", 3)))
    assert not play.machine.moves.keeping


def test_an_offer_of_an_attempt_that_is_over_is_forgotten() -> None:
    """Decode failed it meanwhile: it is placed like any other, and not taken off its new place."""
    play = moving()
    play.failed(D, Reason.NO_BLOCKS, *cancels(D, P), FENCE)
    play.ready(D1)
    play.retried(call(PlaceRequest, decode=D1, prefill=P))
    play.counted("r", D1, P, epoch=2)
    play.wait(0.5)
    assert play.machine.state.entries["r"].epoch == 2


def test_an_offer_from_somebody_else_is_dropped() -> None:
    """Only the worker that has it can give it away."""
    play = Router((P, D, D1))
    play.place(spec())
    play.hear(D1, MoveOffered("r", 1, 40))
    play.hear(D, MoveOffered("r", 2, 40))
    play.hear(D, MoveOffered("x", 1, 40))
    assert not play.machine.moves.offered
