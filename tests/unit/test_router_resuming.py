"""Conversations with a router whose requests lose their gateway and are resumed at another one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from baton.core.events import DrainRequested
from baton.core.ids import Peer, Role
from baton.core.lifecycles import RequestState
from baton.core.outcomes import Reason
from baton.ports.driving import CallLedger, Exit
from baton.ports.ledger import (
    Adopted,
    AdoptRequest,
    Conflict,
    Done,
    EndRequest,
    PlaceRequest,
    RetryRequest,
)
from baton.wire.messages import (
    CancelWork,
    FenceRequest,
    RequestEnded,
    RequestFenced,
    RequestLeft,
    RequestMoved,
    RequestPlaced,
    RequestResumed,
    RequestSpec,
    SubmitRequest,
    WorkAdopted,
    WorkAsked,
)
from support.machine_playbook import sent
from support.router_playbook import CANCELLED, FENCE, D, G, P, Router, call, cancels, spec

G2 = Peer("gateway-1", 42)
TURN = 1 << 16
WINDOW_MS = 20_000


def lasting(gateway: Peer = G) -> RequestSpec:
    return replace(spec(), resume_ms=WINDOW_MS, gateway=gateway)


def placed(request: RequestSpec | None = None) -> Router:
    """A router that has placed a resumable request of gateway G."""
    play = Router()
    play.place(request or lasting())
    return play


def ended(play: Router) -> list[Any]:
    ops = [command.op for command in play.all if isinstance(command, CallLedger)]
    return [op for op in ops if isinstance(op, EndRequest)]


def claim(play: Router, turn: int = TURN) -> SubmitRequest:
    """Another gateway is linked, and what it submits."""
    if G2 not in play.machine.state.gateways:
        play.up(G2, Role.GATEWAY)
    return SubmitRequest(lasting(G2), turn=turn)


def test_a_claim_moves_the_request_to_its_new_gateway() -> None:
    """The record first; then decode hears whom to send to, and the old gateway that it lost it."""
    play = placed()
    resumed = sent(G, RequestResumed, request_id="r", turn=TURN)
    play.hear(G2, claim(play), resumed, call(AdoptRequest, turn=TURN, epoch=1))
    told = [sent(worker, WorkAdopted, turn=TURN, gateway=G2, held=0) for worker in (D, P)]
    adopted = Adopted(1, RequestState.DECODING, 1, 0, D, P)
    play.answered(adopted, *told, sent(G2, RequestPlaced, epoch=1, decode=D))
    play.hear(G, RequestEnded("r", 1, CANCELLED))
    assert "r" in play.machine.state.entries, "a gateway that lost it has no say"
    play.hear(G2, RequestEnded("r", 1, CANCELLED), *cancels(D, P))
    assert not play.machine.state.entries


def test_a_draining_router_sees_through_what_it_has_whoever_reads_it() -> None:
    """Its client has come back at another gateway, and no other router may be there."""
    play = placed()
    play.feed(DrainRequested())
    resumed = sent(G, RequestResumed, request_id="r", turn=TURN)
    play.hear(G2, claim(play), resumed, call(AdoptRequest, turn=TURN, epoch=1))
    told = [sent(worker, WorkAdopted, turn=TURN, gateway=G2, held=0) for worker in (D, P)]
    adopted = Adopted(1, RequestState.DECODING, 1, 0, D, P)
    play.answered(adopted, *told, sent(G2, RequestPlaced, epoch=1, decode=D))
    play.hear(G2, RequestEnded("r", 1, CANCELLED), *cancels(D, P), Exit(0, "drained"))


def test_a_draining_router_waits_for_no_client_that_is_away() -> None:
    """It runs, and has its window at whatever gateway and router: its own need not stay."""
    play = placed()
    play.feed(DrainRequested())
    assert not play.machine.exited
    play.lose(G, Exit(0, "drained"), gone=True)
    play = placed()
    play.lose(G, gone=True)
    assert not play.machine.exited
    play.feed(DrainRequested(), Exit(0, "drained"))


def test_what_its_former_gateway_holds_counts_no_more() -> None:
    """Both were asked for the same epoch: its client reads at the new one, which may hold less."""
    play = placed()
    play.failed(D, Reason.INTEGRITY, *cancels(D, P), FENCE)
    resumed = sent(G, RequestResumed, request_id="r", turn=TURN)
    play.hear(G2, replace(claim(play), begun=True), resumed, call(AdoptRequest, turn=TURN, epoch=1))
    adopted = Adopted(1, RequestState.ADMITTED, 1, 0, None, None)
    play.answered(adopted, sent(G2, FenceRequest, epoch=2))
    play.hear(G, RequestFenced("r", 2, b"\x01\0\0\0"))
    play.hear(G2, RequestFenced("r", 2, b""), call(RetryRequest, epoch=1))
    play.answered(Done(2, RequestState.ADMITTED), call(PlaceRequest, epoch=2))
    assert play.machine.state.entries["r"].output == b""


def test_a_router_that_lost_it_with_its_gateway_tells_that_one() -> None:
    """Another gateway has it at another router, and says so here: who was frozen, or whose client
    hangs, would wait for its answer until the deadline."""
    play = placed()
    play.up(G2, Role.GATEWAY)
    told = sent(G, RequestResumed, request_id="r", turn=TURN)
    play.hear(G2, RequestMoved("r", TURN), told)
    assert not play.machine.state.entries
    play = placed()
    play.hear(G, RequestMoved("r", TURN))
    assert not play.machine.state.entries


def test_a_gateway_with_a_lower_turn_is_told_so() -> None:
    """It was frozen, or slow: nothing of the request changes, nor does who is waited for."""
    play = placed()
    play.hear(G2, claim(play), sent(G, RequestResumed), call(AdoptRequest))
    adopted = Adopted(1, RequestState.DECODING, 1, 0, D, None)
    play.answered(adopted, sent(D, WorkAdopted), sent(G2, RequestPlaced))
    play.lose(G2, gone=True)
    told = sent(G, RequestResumed, request_id="r", turn=TURN)
    play.hear(G, SubmitRequest(lasting(), turn=2), told)
    assert play.machine.state.entries["r"].gateway_gone


def test_the_request_waits_for_its_window_and_no_longer() -> None:
    """With its gateway dead; every other request ends at once."""
    play = placed()
    play.lose(G, gone=True)
    play.wait(WINDOW_MS / 1000 - 1)
    assert not ended(play)
    play.wait(2)
    (end,) = ended(play)
    assert end.outcome.reason is Reason.GATEWAY_LOST
    assert len(play.messages(CancelWork)) == 2
    plain = placed(spec())
    plain.lose(G, *cancels(D, P), call(EndRequest), gone=True)


def test_whom_the_ledger_gave_to_another_one_tells_its_gateway() -> None:
    """The record has a higher turn: another gateway claimed it through another router."""
    play = placed()
    play.failed(D, Reason.NO_BLOCKS, *cancels(D, P), FENCE)
    play.fenced(call(RetryRequest, epoch=1))
    conflict = Conflict(2, RequestState.PLACED, turn=TURN)
    play.answered(conflict, sent(G, RequestResumed, request_id="r", turn=TURN))
    assert not play.machine.state.entries


@pytest.mark.parametrize("request_", [spec(), lasting()], ids=["plain", "resumable"])
def test_who_ended_out_of_sight_leaves_no_entry_behind(request_: RequestSpec) -> None:
    """The link to its gateway ends while both live, the gateway ends the request at decode and
    dies: nobody is left to say so. Decode is asked, again and again, and what it does not have is
    over."""
    play = placed(request_)
    play.lose(G)
    patience_s = max(request_.resume_ms, play.machine.state.limits.recovery_ms) / 1000
    play.wait(patience_s)
    assert not play.messages(WorkAsked), "its gateway may come back"
    play.wait(5)
    asked = play.messages(WorkAsked, D)
    assert 2 <= len(asked) <= 3
    assert asked[0] == WorkAsked("r", 1, 1)
    assert "r" in play.machine.state.entries, "decode has it: it goes on"
    play.failed(D, Reason.UNKNOWN_ATTEMPT, *cancels(D, P))
    play.wait(0.1)
    (end,) = ended(play)
    assert end.outcome.reason is Reason.GATEWAY_LOST
    assert not play.machine.state.entries


def test_nobody_is_asked_once_the_gateway_is_back() -> None:
    """It says itself what has become of it."""
    play = placed()
    play.lose(G)
    play.wait(WINDOW_MS / 1000 - 1)
    play.up(G, Role.GATEWAY, sent(G, RequestPlaced, epoch=1))
    play.wait(10)
    assert not play.messages(WorkAsked)


def test_a_gateway_that_leaves_a_request_is_gone_for_it() -> None:
    """It was refused its place, and nobody answers the fence: it ends with its window, which begins
    now, not when that gateway's drain is over. Of another gateway's word nothing changes."""
    play = placed()
    play.failed(D, Reason.NO_BLOCKS, *cancels(D, P), FENCE)
    play.up(G2, Role.GATEWAY)
    play.hear(G2, RequestLeft("r"))
    assert play.machine.state.entries["r"].gateway_lost_at is None
    play.hear(G, RequestLeft("r"))
    play.wait(WINDOW_MS / 2000)
    play.hear(G, RequestLeft("r"))
    assert not ended(play)
    play.wait(WINDOW_MS / 2000 + 1.0)
    assert [op.outcome.reason for op in ended(play)] == [Reason.GATEWAY_LOST]
