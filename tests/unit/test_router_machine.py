"""Conversations with the router machine. Numbers in brackets are entries of the failure list."""

from __future__ import annotations

import pytest

from baton.core.events import DrainRequested, LeaseChanged, RestartRequested
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.outcomes import Reason
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
from baton.wire.messages import (
    CancelWork,
    DecodeReserved,
    FenceRequest,
    PoolStatus,
    RequestEnded,
    RequestFailed,
    RequestMoved,
    RequestPlaced,
    RequestRefused,
    WorkAsked,
    WorkRefused,
)
from support.machine_playbook import Like, sent
from support.router_playbook import (
    CANCELLED,
    COMPLETED,
    D1,
    FENCE,
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


def test_a_new_request_waits_here_for_a_row_in_decodes_steps() -> None:
    """There it would have its first token, and the second one when somebody else is over. One whose
    attempt was lost does not if its client waits in the middle of the answer."""
    play = Router(workers=(D,), batch_sequences_max=2, blocks=1_000)
    play.ready(D, running=1, blocks=1_000)
    play.place(spec("r", tokens=1), prefill=None)
    play.admit(spec("b", tokens=1))
    play.failed(D, Reason.DECODE_ERROR, *cancels(D), FENCE)
    play.ready(D, running=2, blocks=1_000)
    play.wait(0.5)
    play.retried(call(PlaceRequest, request_id="r", epoch=2), output=b"\x07\0\0\0")
    play.ready(D, call(PlaceRequest, request_id="b"), running=0, blocks=1_000)


def test_a_lost_attempt_without_a_token_waits_here_for_a_row_as_well() -> None:
    """Its client has nothing yet: placed without a row it would have one token, and then none for
    as long as others' answers last. A prefill worker that changes its role leaves such requests."""
    play = Router(workers=(D,), batch_sequences_max=2, blocks=1_000)
    play.ready(D, running=1, blocks=1_000)
    play.place(spec("r", tokens=1), prefill=None)
    play.failed(D, Reason.DECODE_ERROR, *cancels(D), FENCE)
    play.ready(D, running=2, blocks=1_000)
    play.wait(0.5)
    play.retried()
    play.ready(D, call(PlaceRequest, request_id="r", epoch=2), running=1, blocks=1_000)


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


def test_a_drain_leaves_what_waits_for_its_next_attempt_to_another_router() -> None:
    """It ran, and was put back for want of memory: whoever takes it over goes on with it."""
    play = Router(workers=(D,))
    play.place(spec("r"), prefill=None)
    play.hear(D, DecodeReserved("r", 1, 0))
    play.failed(D, Reason.NO_BLOCKS, *cancels(D), FENCE)
    play.ready(D, free=0)
    play.retried()
    refused = sent(G, RequestRefused, request_id="r", reason=Reason.DRAINING, epoch=2)
    play.feed(DrainRequested(), refused)
    play.hear(G, RequestMoved("r", 2), Exit(0, "drained"))


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


def test_a_message_that_fits_nothing_is_counted_and_dropped() -> None:
    """(12) What is no router's to hear, and what belongs to nothing here, changes nothing."""
    play = Router()
    play.hear(D, CancelWork("x", 1, Reason.INTERNAL))
    assert play.measured("stale_messages_total", kind="unknown") == 1
    play.hear(D, WorkRefused("x", 1, Reason.INTERNAL))
    play.hear(D, DecodeReserved("x", 1, 0))
    assert not play.machine.state.entries
