"""What becomes of a request at the gateway when its router, or a link, is lost."""

from __future__ import annotations

from baton.core.events import LeaseChanged
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, Reason
from baton.gateway.machine import GatewayMachine
from baton.gateway.vocabulary import ClientGone, Deliver, End, Submitted
from baton.ports.driving import CallLedger
from baton.wire.messages import (
    FenceRequest,
    RequestEnded,
    RequestFenced,
    RequestPlaced,
    RequestRefused,
    SubmitRequest,
    TokenChunk,
    TokenRun,
)
from support.machine_playbook import Like, Playbook, request, sent

ME, R, R1 = Peer("gateway-0", 1), Peer("router-0", 2), Peer("router-1", 3)
P, D = Peer("prefill-0", 4), Peer("decode-0", 5)
PLACED = RequestPlaced("r", 1, D, P)


def placed(*others: Peer) -> Playbook:
    """A gateway with request ``r`` placed by router R."""
    play = Playbook(GatewayMachine(ME, Limits()))
    play.feed(LeaseChanged(LeaseState.HELD))
    play.up(R, Role.ROUTER)
    play.up(P, Role.PREFILL)
    play.up(D, Role.DECODE)
    play.feed(Submitted(request(gateway=ME)), sent(R, SubmitRequest))
    for other in others:
        play.up(other, Role.ROUTER)
    play.hear(R, PLACED)
    return play


def token(index: int) -> TokenChunk:
    return TokenChunk((TokenRun("r", 1, index, (50 + index,)),))


def test_a_request_without_a_token_is_given_to_another_router_at_once() -> None:
    """What the dead router had placed may never have been sent."""
    play = placed(R1)
    play.lose(R, sent(R1, SubmitRequest), gone=True)
    play.hear(R1, FenceRequest("r", 2), sent(R1, RequestFenced, epoch=2))


def test_a_request_that_decode_works_on_needs_no_router() -> None:
    """Its stream goes on undisturbed, and a router that comes up later leaves it alone."""
    play = placed()
    play.hear(D, token(0), Like(Deliver))
    play.lose(R, gone=True)
    play.hear(D, token(1), Like(Deliver))
    play.up(R1, Role.ROUTER)
    assert play.wait(60.0) == []


def test_a_request_whose_router_is_lost_and_whose_decode_is_silent_fails_in_time() -> None:
    """Its failure may have died with the router: a clear error, never silence."""
    play = placed()
    play.hear(D, token(0), Like(Deliver))
    play.lose(R, gone=True)
    ends = [each for each in play.wait(10.0) if isinstance(each, End)]
    assert len(ends) == 1 and ends[0].outcome.reason is Reason.WORKER_LOST


def test_a_worker_that_is_back_makes_nothing_good_without_a_router() -> None:
    """What its lost link took along is asked for by a router, or it is a failure."""
    play = placed()
    play.lose(R, gone=True)
    play.lose(D)
    play.up(D, Role.DECODE)
    ends = [each for each in play.wait(10.0) if isinstance(each, End)]
    assert len(ends) == 1 and ends[0].outcome.ending is Ending.FAILED


def test_a_fenced_request_may_wait_for_memory_as_long_as_its_router_lives() -> None:
    """(63) The router bounds the wait; the gateway only watches the router."""
    play = placed()
    play.hear(R, FenceRequest("r", 2), sent(R, RequestFenced))
    assert play.wait(60.0) == []
    play.lose(R, gone=True)
    assert any(isinstance(each, End) for each in play.wait(10.0))


def test_a_router_that_will_not_take_over_is_not_waited_for() -> None:
    """Its refusal is not the request's end: another may, or the time runs out."""
    play = placed(R1)
    play.lose(R, sent(R1, SubmitRequest), gone=True)
    play.hear(R1, RequestRefused("r", Reason.OVERLOADED, "full"))
    play.up(Peer("router-2", 9), Role.ROUTER, Like(object))
    play = placed(R1)
    play.lose(R, sent(R1, SubmitRequest), gone=True)
    play.hear(R1, RequestRefused("r", Reason.OVERLOADED, "full"))
    assert any(isinstance(each, End) for each in play.wait(10.0))


def test_an_end_that_a_lost_link_took_along_is_said_again() -> None:
    """Whoever still works on it after the next link is open hears of it, once."""
    play = placed()
    told = [sent(peer, RequestEnded) for peer in (D, P, R)]
    gone = ClientGone("r", Reason.CLIENT_DISCONNECTED)
    play.feed(gone, *told, Like(End), Like(CallLedger))
    play.lose(R)
    play.up(R, Role.ROUTER)
    play.hear(R, PLACED, sent(R, RequestEnded))
    play.hear(R, PLACED)
