"""Conversations with a router that takes over what another one had.

Numbers in brackets are entries of the failure list.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.events import DrainRequested, LeaseChanged
from baton.core.ids import Peer
from baton.core.lifecycles import LeaseState
from baton.core.outcomes import Outcome, Reason
from baton.ports.driving import CallLedger, LedgerAnswered, Send
from baton.ports.ledger import (
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
    RequestEnded,
    RequestFailed,
    RequestMoved,
    RequestPlaced,
    RequestRefused,
    SubmitRequest,
    WorkAdopted,
)
from support.machine_playbook import Like, ids, sent
from support.router_playbook import (
    CANCELLED,
    COMPLETED,
    D1,
    D_AGAIN,
    FENCE,
    PLACED_AGAIN,
    ROLES,
    SIZE,
    D,
    G,
    P,
    R,
    Router,
    call,
    cancels,
    spec,
)


def submission(turn: int = 2, **fields: Any) -> SubmitRequest:
    """What a gateway says whose request was placed by a router that is lost."""
    values = {"begun": True, "epoch": 1, "decode": D, "prefill": P, "age_ms": 3_000, **fields}
    return SubmitRequest(spec(), turn, **values)


WAITING = submission(begun=False, decode=None, prefill=None)
PLACED = Adopted(1, R.DECODING, 1, 0, D, P)
TOLD = [sent(worker, WorkAdopted, request_id="r", epoch=1, turn=2) for worker in (D, P)]
GATEWAY_TOLD = sent(G, RequestPlaced, epoch=1, decode=D, prefill=P)


def adopted(*workers: Peer, **limits: Any) -> Router:
    """A router that has adopted the placed request ``r``."""
    play = Router(workers or (P, D), **limits)
    op = call(AdoptRequest, turn=2, epoch=1, decode=D, prefill=P)
    play.hear(G, submission(), op)
    play.answered(PLACED, *TOLD, GATEWAY_TOLD)
    return play


def test_a_placed_request_is_adopted_as_it_is() -> None:
    """(104) No fence and no new epoch: its workers learn whom to report to, its gateway that it is
    taken care of."""
    play = adopted()
    play.hear(D, DecodeReserved("r", 1, 0))
    play.hear(G, RequestEnded("r", 1, COMPLETED))
    assert not play.machine.state.entries


def test_an_adopted_request_is_retried_like_any_other() -> None:
    """Its new router hears of the failure, and cancels with its own turn."""
    play = adopted()
    cancels = [Send(peer, CancelWork("r", 1, Reason.SUPERSEDED, 2)) for peer in (D, P)]
    play.failed(D, Reason.INTEGRITY, *cancels, FENCE)
    play.retried(call(PlaceRequest, epoch=2), output=ids(50))


def test_a_worker_without_the_attempt_is_nobodys_failure() -> None:
    """The dead router had not sent it yet: it is placed again."""
    play = adopted()
    play.failed(D, Reason.UNKNOWN_ATTEMPT, Like(Send), Like(Send), FENCE)
    assert play.machine.state.entries["r"].blames == []


@pytest.mark.parametrize("known", ["before", "after"])
def test_an_open_end_is_cut_to_the_arenas_by_each_router_that_has_it(known: str) -> None:
    """Its gateway has it as the client sent it, with all of the model's context: it would fit
    nowhere once its decode worker is lost. Whether the arenas are known at the adoption, or only
    later, to a router that has just started."""
    play = Router(workers=(P,))
    if known == "before":
        play.ready(D, blocks=4)
        play.wait(2.1)
    submitted = SubmitRequest(spec(max_tokens=5_000, open_ended=True), 2, begun=True, decode=D)
    play.hear(G, submitted, call(AdoptRequest))
    play.do(LedgerAnswered(play.last(CallLedger).op, Adopted(1, R.DECODING, 1, 0, D, None)))
    if known == "after":
        play.up(D, ROLES[D], sent(D, WorkAdopted))
        play.ready(D, blocks=4)
        play.wait(2.1)
    play.do_lose(D)
    play.fenced(call(RetryRequest, epoch=1), output=ids(50))
    play.ready(D_AGAIN, blocks=4)
    play.answered(Done(2, R.ADMITTED), call(PlaceRequest, epoch=2))
    assert play.machine.state.entries["r"].spec.max_tokens == 4 * SIZE - 20


def test_an_adopted_request_waits_for_an_arena_that_holds_it() -> None:
    """It ran in one: that one's owner will be back. Nothing is refused for its length."""
    play = Router(workers=(P,))
    submitted = SubmitRequest(spec(max_tokens=40), 2, begun=True, decode=D)
    play.hear(G, submitted, call(AdoptRequest))
    play.answered(Adopted(1, R.ADMITTED, 1, 0, None, None), FENCE)
    play.ready(D1, blocks=2)
    play.wait(2.1)
    play.retried(output=ids(50))
    play.ready(D_AGAIN, PLACED_AGAIN, blocks=4)


def test_failures_are_counted_across_routers() -> None:
    """The ledger keeps the count: a request does not get new chances from each router's death."""
    play = Router(attempts_max=3)
    play.hear(G, submission(epoch=3, base=2), call(AdoptRequest, epoch=3))
    play.answered(Adopted(3, R.PLACED, 3, 2, D, P), Like(Send), Like(Send), Like(Send))
    play.failed(D, Reason.INTEGRITY, Like(Send), Like(Send), Like(Send), epoch=3)
    exhausted = Like(Outcome, reason=Reason.ATTEMPTS_EXHAUSTED)
    given_up = sent(G, RequestFailed, epoch=4, outcome=exhausted)
    play.fenced(given_up, epoch=4, output=ids(50, 51))


def test_a_router_that_has_just_started_waits_for_the_worker_to_open_its_link() -> None:
    """The worker lives and works; it only has not seen this router yet."""
    play = Router(workers=())
    play.hear(G, submission(), call(AdoptRequest))
    play.answered(PLACED, GATEWAY_TOLD)
    assert play.wait(1.5) == []
    play.up(D, ROLES[D], TOLD[0])
    play.up(P, ROLES[P], TOLD[1])
    assert play.wait(60.0) == []


def test_a_worker_that_opens_no_link_in_a_lease_is_lost() -> None:
    """(105) Then it goes the usual way, to another one."""
    play = Router(workers=())
    play.ready(D1)
    play.hear(G, submission(), call(AdoptRequest))
    play.answered(PLACED, GATEWAY_TOLD)
    said = play.wait(2.1)
    assert len(said) == 1 and said[0] == FENCE


def test_a_worker_that_its_gateway_has_lost_too_is_not_waited_for() -> None:
    """Two that cannot reach it are enough."""
    play = Router(workers=(P,))
    play.hear(G, submission(decode_lost=True), call(AdoptRequest))
    play.answered(PLACED, sent(P, CancelWork, turn=2), FENCE)


def test_a_waiting_request_is_adopted_into_the_queue_and_keeps_its_deadline() -> None:
    """It was admitted once: neither a full queue nor workers that are not linked yet refuse it."""
    play = Router(workers=(), queue_requests_max=0, queue_deadline_ms=10_000)
    play.hear(G, WAITING, call(AdoptRequest, decode=None))
    play.answered(Adopted(1, R.ADMITTED, 0, 0, None, None))
    play.ready(D, free=0)
    said = play.wait(7.2)
    assert len(said) == 1 and sent(G, RequestRefused, reason=Reason.OVERLOADED).matches(said[0])


def test_an_adopted_waiting_request_is_placed_at_its_first_epoch() -> None:
    """Nothing was placed, so nothing needs a fence."""
    play = Router()
    play.hear(G, WAITING, call(AdoptRequest))
    play.answered(Adopted(1, R.ADMITTED, 0, 0, None, None), call(PlaceRequest, epoch=1))
    play.counted("r")


def test_a_request_between_two_attempts_goes_on_with_the_fence() -> None:
    """The dead router had the next epoch from the ledger, and had placed nothing."""
    play = Router()
    play.hear(G, submission(epoch=2, decode=None, prefill=None), call(AdoptRequest, epoch=2))
    play.answered(Adopted(2, R.ADMITTED, 1, 1, None, None), sent(G, FenceRequest, epoch=3))


def test_a_router_that_has_just_started_refuses_nobody_for_want_of_workers() -> None:
    """They are about to open their links; what no arena holds is told when they have."""
    play = Router(workers=())
    play.admit(spec("a"))
    play.admit(spec("b", tokens=40))
    play.ready(D, call(PlaceRequest, request_id="a"), blocks=3)
    said = play.wait(2.1)
    assert len(said) == 1 and sent(G, RequestRefused, reason=Reason.TOO_LONG).matches(said[0])


def test_who_comes_while_the_only_decode_worker_is_restarted_waits_for_its_successor() -> None:
    """For as long as the requests wait that it had; then there is nobody to wait for."""
    play = Router()
    play.lose(D)
    play.admit(spec("a"))
    play.ready(D_AGAIN, call(PlaceRequest, request_id="a"))
    play.lose(D_AGAIN)
    play.wait(play.machine.state.limits.recovery_ms / 1000 + 0.2)
    play.submit(spec("b"), sent(G, RequestRefused, reason=Reason.NO_DECODE_WORKER))


def test_a_router_that_was_frozen_asks_its_workers_and_disturbs_nobody() -> None:
    """(44) Decode ended the link because it heard nothing: it lives, and has the attempt or not."""
    play = Router()
    play.place(spec())
    play.lose(D, lives=True)
    play.up(D, ROLES[D], sent(D, WorkAdopted, request_id="r", epoch=1, turn=1))
    play.hear(D, DecodeReserved("r", 1, 0))
    play.lose(D, lives=True)
    said = play.wait(2.1)
    assert len(said) == 2 and cancels(P)[0].matches(said[0]) and said[1] == FENCE


def test_an_adoption_waits_for_the_ledger() -> None:
    """(44) It is not refused for want of a ledger: nobody else would take it."""
    play = Router()
    play.feed(LeaseChanged(LeaseState.SUSPECT))
    play.hear(G, submission())
    assert play.wait(20.0) == []
    play.feed(LeaseChanged(LeaseState.HELD))
    said = play.wait(0.3)
    assert len(said) == 1 and call(AdoptRequest).matches(said[0])
    play.answered(Unavailable("down"))
    said = play.wait(0.3)
    assert len(said) == 1 and call(AdoptRequest).matches(said[0])
    play.answered(PLACED, *TOLD, GATEWAY_TOLD)


def test_a_router_that_comes_too_late_lets_go() -> None:
    """The ledger has seen a higher turn: whoever has that answers for it."""
    play = Router()
    play.hear(G, submission(), call(AdoptRequest))
    play.answered(Conflict(1, R.DECODING, turn=9))
    assert not play.machine.state.entries


def test_an_adopted_request_that_ended_is_told_to_its_gateway() -> None:
    """Whoever found its gateway away ended it; the gateway is back and must not wait."""
    play = Router()
    play.hear(G, submission(epoch=2), call(AdoptRequest))
    play.answered(Conflict(1, R.CANCELLED, CANCELLED), sent(G, RequestFailed, epoch=2))


def test_a_superseded_router_forgets_quietly() -> None:
    """(44) Thawed: its gateway says whose it is, and it leaves the workers alone."""
    play = Router()
    play.place(spec())
    play.lose(G)
    play.up(G, ROLES[G], sent(G, RequestPlaced))
    play.hear(G, RequestMoved("r", 2))
    assert not play.machine.state.entries
    play.failed(D, Reason.INTEGRITY)


def test_a_router_that_gets_a_request_back_forgets_what_it_knew() -> None:
    """Another one had it meanwhile: the ledger says how it stands."""
    play = Router()
    play.place(spec())
    play.hear(G, submission(turn=3, epoch=2), call(AdoptRequest, turn=3, epoch=2))
    play.answered(Adopted(2, R.DECODING, 2, 0, D, P), Like(Send), Like(Send), Like(Send))
    assert play.messages(WorkAdopted)[-1].turn == 3
    play.hear(G, submission(turn=2, epoch=2), sent(G, RequestPlaced, epoch=2))


def test_a_draining_router_adopts_nothing() -> None:
    """Its gateway finds another, or waits for its successor."""
    play = adopted()
    play.feed(DrainRequested())
    play.hear(G, SubmitRequest(spec("s"), 2), sent(G, RequestRefused, reason=Reason.DRAINING))


@pytest.mark.parametrize("phase", ["placing", "retrying"])
def test_a_record_that_the_ledger_lost_is_made_again(phase: str) -> None:
    """(112) Emptied in the middle: the record gets what its router knows, and the pending
    transition follows."""
    play = Router()
    if phase == "placing":
        play.admit(spec(), call(PlaceRequest))
    else:
        play.place(spec())
        play.failed(D, Reason.INTEGRITY, Like(Send), Like(Send), FENCE)
        play.fenced(call(RetryRequest, epoch=1))
    play.answered(Conflict(0, None), call(AdoptRequest, turn=1, epoch=1, decode=None))
    pending = PlaceRequest if phase == "placing" else RetryRequest
    play.answered(Adopted(1, R.ADMITTED, 0, 0, None, None), call(pending, epoch=1))


def test_a_record_that_went_back_to_another_router_is_ours_again() -> None:
    """(DESIGN 4.10) The ledger has lost that it was moved: its turn says so. What that router has
    placed meanwhile, not knowing better, is left for the next epoch."""
    play = adopted()
    play.failed(D, Reason.INTEGRITY, Like(Send), Like(Send), FENCE)
    play.fenced(call(RetryRequest, epoch=1))
    play.answered(Conflict(1, R.ADMITTED, turn=1), call(AdoptRequest, turn=2, epoch=1))
    play.answered(Adopted(1, R.ADMITTED, 1, 0, None, None), call(RetryRequest, epoch=1))
    play.answered(Done(2, R.ADMITTED, 1), call(PlaceRequest, epoch=2))
    play.answered(Conflict(2, R.PLACED, turn=1), call(AdoptRequest, turn=2, epoch=2))
    play.answered(Adopted(2, R.PLACED, 2, 0, D, P), call(PlaceRequest, epoch=2))
    play.answered(Conflict(2, R.PLACED, turn=2), sent(G, FenceRequest, epoch=3))


def test_a_ledger_that_was_emptied_learns_what_stands() -> None:
    """(44) The lease was lost and is held again: every request is announced as it is; one that
    another router has is let go."""
    play = Router()
    play.place(spec())
    play.ready(D, free=0)
    play.admit(spec("w"))
    play.feed(LeaseChanged(LeaseState.LOST))
    placed = call(AdoptRequest, turn=1, epoch=1, decode=D, prefill=P)
    play.feed(LeaseChanged(LeaseState.HELD), placed, call(AdoptRequest, decode=None))
    ops = [each.op for each in play.all if isinstance(each, CallLedger)][-2:]
    play.feed(LedgerAnswered(ops[0], Adopted(1, R.PLACED, 1, 0, D, P)))
    play.feed(LedgerAnswered(ops[1], Conflict(1, R.ADMITTED, turn=9)))
    assert list(play.machine.state.entries) == ["r"]


def test_without_a_lease_no_transition_is_made() -> None:
    """A suspect router waits; what was pending is asked for when the lease is held again."""
    play = Router()
    play.place(spec())
    play.feed(LeaseChanged(LeaseState.SUSPECT))
    play.failed(D, Reason.INTEGRITY, Like(Send), Like(Send), FENCE)
    play.fenced()
    assert play.wait(30.0) == []
    play.feed(LeaseChanged(LeaseState.HELD))
    said = play.wait(0.3)
    assert len(said) == 1 and call(RetryRequest).matches(said[0])
    play.answered(Done(2, R.ADMITTED), call(PlaceRequest, epoch=2))


def test_workers_that_are_suspect_for_want_of_the_ledger_are_not_missing() -> None:
    """(44) A frozen ledger makes everybody suspect: nothing is given up for that."""
    play = Router()
    play.ready(D, free=0)
    play.admit(spec())
    play.feed(LeaseChanged(LeaseState.SUSPECT))
    play.ready(D, accepting=False)
    assert play.wait(15.0) == []
    play.feed(LeaseChanged(LeaseState.HELD))
    assert play.wait(1.0) == []
    play.ready(D, call(PlaceRequest))


def test_a_superseded_router_ends_nothing_in_the_ledger_either() -> None:
    """Its gateway stays out of reach: it tries to end what it thinks is its own, and is told."""
    play = Router()
    play.ready(D, free=0)
    play.admit(spec())
    play.lose(G)
    said = play.wait(10.0)
    assert len(said) == 1 and call(EndRequest, by=Peer("router-0", 1)).matches(said[0])
    play.answered(Conflict(1, R.DECODING, turn=9))
    assert not play.machine.state.entries


def test_a_record_that_was_restored_after_the_end_is_ended_again() -> None:
    """The gateway ended it in a ledger that was emptied since: nobody else would."""
    play = Router()
    play.place(spec())
    play.feed(LeaseChanged(LeaseState.LOST))
    play.feed(LeaseChanged(LeaseState.HELD), call(AdoptRequest, turn=1, epoch=1))
    ended = call(EndRequest, request_id="r", outcome=COMPLETED)
    play.hear(G, RequestEnded("r", 1, COMPLETED), ended)
