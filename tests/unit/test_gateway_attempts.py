"""Conversations with the gateway's machine about its routers, and about workers that are lost."""

from __future__ import annotations

import pytest

from baton.core.ids import Peer, Role
from baton.core.outcomes import Ending, FinishReason, Reason
from baton.gateway.errors import of_outcome
from baton.gateway.vocabulary import End
from baton.ports.transport import PeerLost
from baton.wire.messages import (
    FenceRequest,
    PoolStatus,
    RequestPlaced,
    RequestRefused,
    SubmitRequest,
)
from support.gateway_talk import D0, D1, P0, R0, R1, Talk, only, sent, up

# --- routers ------------------------------------------------------------------------------------


def test_routers_take_turns() -> None:
    """Requests go to the routers in turn."""
    talk = Talk(peers=(R0, R1, P0, D0))
    peers = [sent(talk.submit(f"r{i}"), SubmitRequest)[0][0] for i in range(4)]
    assert sorted(peers) == [R0, R0, R1, R1]


def test_lost_router_before_placement_means_another_router() -> None:
    """The same id goes to another router; a placed request goes on without its router."""
    talk = Talk(peers=(R0, R1, P0, D0))
    first = sent(talk.submit(), SubmitRequest)[0][0]
    other = R1 if first == R0 else R0
    ((peer, again),) = sent(talk.feed(PeerLost(first, "died")), SubmitRequest)
    assert peer == other
    assert again.spec.request_id == "r"
    talk.hear(other, RequestPlaced(request_id="r", epoch=1, decode=D0))
    assert not talk.feed(PeerLost(other, "died"))
    talk.tokens(D0, 0, [1])
    assert talk.delivered == [1]


def test_lost_router_is_waited_for() -> None:
    """With no other router the request waits for the restarted one, up to the queue's limit."""
    talk = Talk()
    talk.submit()
    talk.feed(PeerLost(R0, "died"))
    talk.pass_time(5)
    assert not talk.ends
    assert sent(talk.feed(up(R1)), SubmitRequest)
    talk.feed(PeerLost(R1, "died"))
    talk.pass_time(120)
    assert talk.ends[0].outcome.reason is Reason.NO_ROUTER


def test_what_was_begun_is_offered_to_a_router_that_goes_away() -> None:
    """With no other one there: it may be that router's, which sees it through. One that does not
    have it is asked once; what is new is not given to it at all."""
    talk = Talk(peers=(R0, P0, D0))
    talk.submit()
    talk.place()
    talk.feed(up(R1))
    talk.hear(R1, PoolStatus(False, Reason.DRAINING, "going"))
    out = talk.feed(PeerLost(R0, "died"))
    assert [peer for peer, _ in sent(out, SubmitRequest)] == [R1]
    assert not sent(talk.submit("new"), SubmitRequest)
    out = talk.hear(R1, RequestRefused("r", Reason.DRAINING, "going"))
    assert not sent(out, SubmitRequest) and not talk.ends
    third = Peer("router-2", 9)
    out = talk.feed(up(third, Role.ROUTER))
    assert [peer for peer, _ in sent(out, SubmitRequest)] == [third, third]


def test_no_router_at_all_is_refused_soon() -> None:
    """A gateway that never saw a router refuses within the lease's time."""
    talk = Talk(peers=(P0, D0))
    talk.submit()
    assert not talk.ends
    talk.pass_time(talk.limits.lease_ttl_ms / 1000 + 0.1)
    assert talk.ends[0].outcome.reason is Reason.NO_ROUTER
    assert talk.ends[0].outcome.ending is Ending.REFUSED


def test_refusal_reaches_the_client_with_its_retry_time() -> None:
    """What the router refuses is refused to the client at once."""
    talk = Talk()
    talk.submit()
    out = talk.hear(
        R0,
        RequestRefused(
            request_id="r", reason=Reason.OVERLOADED, message="full", retry_after_ms=700
        ),
    )
    end = only(out, End)
    assert end.outcome.reason is Reason.OVERLOADED
    assert end.retry_after_ms == 700


def test_what_was_placed_and_never_taken_in_is_refused_with_its_retry_time() -> None:
    """Its router says up to which attempt; the client may come again, as if it had only waited."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.hear(R0, FenceRequest("r", 2))
    out = talk.hear(R0, RequestRefused("r", Reason.OVERLOADED, "full", 700, 2))
    end = only(out, End)
    assert (end.outcome.ending, end.outcome.reason) == (Ending.REFUSED, Reason.OVERLOADED)
    assert end.retry_after_ms == 700
    assert of_outcome(end.outcome, end.retry_after_ms).status == 429


@pytest.mark.parametrize("seen", ["a later attempt", "an id"])
def test_what_its_router_knows_too_little_of_is_not_refused(seen: str) -> None:
    """An attempt that the router has not heard of, or an id at the client, is worth more than its
    word: it is submitted once more, as one that has begun."""
    talk = Talk()
    talk.submit()
    talk.place(epoch=2 if seen == "a later attempt" else 1)
    if seen == "an id":
        talk.tokens(D0, 0, [1])
    out = talk.hear(R0, RequestRefused("r", Reason.OVERLOADED, "full", 700, 1))
    assert not talk.ends
    ((_, again),) = sent(out, SubmitRequest)
    assert again.begun and again.held == len(talk.delivered)


def test_refusal_after_a_resubmission_by_the_wrong_router_is_ignored() -> None:
    """Only the router that has the request may refuse it."""
    talk = Talk(peers=(R0, R1, P0, D0))
    first = sent(talk.submit(), SubmitRequest)[0][0]
    other = R1 if first == R0 else R0
    talk.hear(other, RequestRefused(request_id="r", reason=Reason.OVERLOADED, message=""))
    assert not talk.ends


# --- losses -------------------------------------------------------------------------------------


def test_lost_decode_is_waited_for_then_fails() -> None:
    """Nobody takes over: a clear failure within the recovery limit, never silence."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1, 2])
    talk.feed(PeerLost(D0, "died"))
    talk.pass_time(talk.limits.recovery_ms / 1000 - 0.1)
    assert not talk.ends
    talk.pass_time(0.2)
    assert talk.ends[0].outcome.reason is Reason.WORKER_LOST
    assert talk.ends[0].outcome.completion_tokens == 2


def test_lost_decode_with_a_take_over_goes_on() -> None:
    """A fence and a placement after the loss continue the same answer."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1])
    talk.feed(PeerLost(D0, "died"))
    talk.pass_time(5)
    talk.hear(R0, FenceRequest(request_id="r", epoch=2))
    talk.pass_time(5)
    talk.place(epoch=2, decode=D1)
    talk.pass_time(60)
    assert not talk.ends
    talk.tokens(D1, 0, [1, 2], epoch=2)
    assert talk.delivered == [1, 2]


def test_lost_decode_after_its_router_goes_to_another_router() -> None:
    """Whatever the order of the two losses, a router that lives is asked to take over, once."""
    for losses in ((R0, D0), (D0, R0)):
        talk = Talk()
        talk.submit()
        talk.place()
        talk.tokens(D0, 0, [1])
        for peer in losses:
            talk.feed(PeerLost(peer, "died"))
        assert [p for p, _ in sent(talk.feed(up(R1)), SubmitRequest)] == [R1]
        assert not sent(talk.feed(up(Peer("router-9", 9), Role.ROUTER)), SubmitRequest)
        talk.hear(R1, FenceRequest(request_id="r", epoch=2))
        placed = RequestPlaced(request_id="r", epoch=2, decode=D1)
        talk.hear(R1, placed)
        talk.tokens(D1, 1, [2], epoch=2, finish=FinishReason.STOP)
        assert talk.delivered == [1, 2]


def test_lost_prefill_matters_only_before_decode_spoke() -> None:
    """Prefill's death after the hand-over changes nothing."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1])
    talk.feed(PeerLost(P0, "died"))
    talk.pass_time(60)
    assert not talk.ends
    late = Talk()
    late.submit()
    late.place()
    late.feed(PeerLost(P0, "died"))
    late.pass_time(60)
    assert late.ends[0].outcome.reason is Reason.WORKER_LOST


def test_placement_on_a_worker_that_never_appears_fails() -> None:
    """A placement names a worker without a link: it turns up in time, or the request fails."""
    talk = Talk(peers=(R0, P0))
    talk.submit()
    talk.place()
    talk.pass_time(60)
    assert talk.ends[0].outcome.reason is Reason.WORKER_LOST
    talk = Talk(peers=(R0, P0))
    talk.submit()
    talk.place()
    talk.feed(up(D0))
    talk.pass_time(60)
    assert not talk.ends


def test_deadline_expires() -> None:
    """A request older than its deadline ends as expired."""
    talk = Talk()
    talk.submit(deadline_ms=30_000)
    talk.place()
    talk.tokens(D0, 0, [1])
    talk.pass_time(31)
    assert talk.ends[0].outcome.ending is Ending.EXPIRED


def test_unplaced_request_is_refused_after_the_queue_limit() -> None:
    """A router that never places is not waited for without end."""
    talk = Talk()
    talk.submit()
    talk.pass_time(62)
    assert talk.ends[0].outcome.reason is Reason.OVERLOADED
