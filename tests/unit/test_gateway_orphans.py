"""What becomes of a request at the gateway when its router, or a link, is lost.

Numbers in brackets are entries of the failure list.
"""

from __future__ import annotations

from baton.core.events import LeaseChanged
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, Outcome, Reason
from baton.gateway.machine import GatewayMachine
from baton.gateway.vocabulary import ClientGone, Deliver, End, Submitted
from baton.ports.driving import CallLedger
from baton.wire.messages import (
    FenceRequest,
    RequestEnded,
    RequestFailed,
    RequestFenced,
    RequestMoved,
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
    play.feed(Submitted(request(gateway=ME, max_tokens=100)), sent(R, SubmitRequest))
    for other in others:
        play.up(other, Role.ROUTER)
    play.hear(R, PLACED)
    return play


def token(index: int) -> TokenChunk:
    return TokenChunk((TokenRun("r", 1, index, (50 + index,)),))


def test_a_request_without_a_token_is_given_to_another_router_at_once() -> None:
    """What the dead router had placed may never have been sent."""
    play = placed(R1)
    play.lose(R, sent(R1, SubmitRequest, turn=2, begun=True, decode=D), gone=True)
    play.hear(R1, FenceRequest("r", 2), sent(R1, RequestFenced, epoch=2))


def test_a_stream_goes_on_while_its_router_is_away() -> None:
    """It does not even pause; the next router is told how it stands, and answers for it."""
    play = placed()
    play.hear(D, token(0), Like(Deliver))
    play.lose(R, gone=True)
    for index in range(1, 31):
        assert play.wait(1.0) == []
        play.hear(D, token(index), Like(Deliver))
    given = sent(R1, SubmitRequest, turn=2, begun=True, epoch=1, decode=D, decode_lost=False)
    play.up(R1, Role.ROUTER, given)
    play.hear(R1, PLACED)
    play.hear(D, token(31), Like(Deliver))
    assert play.wait(60.0) == []


def test_a_router_that_comes_back_is_told_again_with_its_own_turn() -> None:
    """It was out of reach, not gone: for it nothing has changed, and nobody else had it."""
    play = placed()
    play.lose(R)
    play.up(R, Role.ROUTER, sent(R, SubmitRequest, turn=1, begun=True))


def test_a_superseded_router_has_no_say() -> None:
    """(44) It thaws: whatever it says of the request is not heard, and it is told whose it is."""
    play = placed(R1)
    play.hear(D, token(0), Like(Deliver))
    play.lose(R, sent(R1, SubmitRequest, turn=2))
    play.up(R, Role.ROUTER)
    moved = sent(R, RequestMoved, request_id="r", turn=2)
    failed = Outcome(Ending.FAILED, reason=Reason.WORKER_LOST)
    for message in (
        RequestPlaced("r", 1, Peer("decode-9", 9)),
        FenceRequest("r", 2),
        RequestFailed("r", 1, failed),
        RequestRefused("r", Reason.OVERLOADED, "full"),
    ):
        play.hear(R, message, moved)
    play.hear(R1, PLACED)
    play.hear(D, token(1), Like(Deliver))


def test_a_request_whose_router_is_lost_and_whose_decode_is_silent_fails_in_time() -> None:
    """Its failure may have died with the router, and none comes: a clear error, never silence."""
    play = placed()
    play.lose(R, gone=True)
    play.hear(D, token(0), Like(Deliver))
    assert play.wait(9.0) == []
    play.hear(D, token(1), Like(Deliver))
    assert play.wait(9.0) == []
    ends = [each for each in play.wait(1.0) if isinstance(each, End)]
    assert len(ends) == 1 and ends[0].outcome.reason is Reason.NO_ROUTER


def test_a_new_request_waits_for_the_restart_of_its_router_and_is_refused_in_time() -> None:
    """One that was there comes back; if it does not, the client may try again."""
    play = placed()
    play.lose(R, gone=True)
    play.feed(Submitted(request("s", gateway=ME)))
    assert [each for each in play.wait(9.0) if isinstance(each, End)] == []
    ends = [each for each in play.wait(1.0) if isinstance(each, End)]
    assert {(each.request_id, each.outcome.reason) for each in ends} == {
        ("r", Reason.NO_ROUTER),
        ("s", Reason.NO_ROUTER),
    }
    assert {each.outcome.ending for each in ends} == {Ending.FAILED, Ending.REFUSED}


def test_what_a_leaving_router_will_not_take_goes_to_another() -> None:
    """SIGTERM to a router refuses nobody while there is another one; without one the request waits
    for its successor. The leaving one forgets it."""
    play = placed(R1)
    play.feed(Submitted(request("s", gateway=ME)), sent(R, SubmitRequest, turn=1))
    refused = RequestRefused("s", Reason.DRAINING, "going")
    moved = sent(R, RequestMoved, request_id="s", turn=2)
    play.hear(R, refused, moved, sent(R1, SubmitRequest, turn=2))
    play.hear(R1, refused, sent(R1, RequestMoved, request_id="s", turn=3))
    later = Peer("router-1", 9)
    play.up(later, Role.ROUTER, sent(later, SubmitRequest, turn=3, begun=False))


def test_a_worker_that_goes_on_with_an_attempt_that_is_over_is_told_so_once() -> None:
    """A late reservation may have reached it after everybody else went on."""
    play = placed()
    play.hear(R, FenceRequest("r", 2), sent(R, RequestFenced))
    over = Like(Outcome, reason=Reason.SUPERSEDED)
    play.hear(D, token(0), sent(D, RequestEnded, epoch=1, outcome=over))
    play.hear(D, token(1))


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
