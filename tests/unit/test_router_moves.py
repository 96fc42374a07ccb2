"""Conversations with the router machine about KV that outlives its owner's work on it.

Numbers in brackets are entries of the failure list.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.ids import Peer
from baton.core.outcomes import Reason
from baton.ports.driving import CallLedger, LedgerAnswered, Send
from baton.ports.ledger import Done, EndRequest, PlaceRequest, RetryRequest
from baton.wire.messages import (
    CancelWork,
    DecodeReserved,
    FenceRequest,
    MoveOffered,
    RequestEnded,
    RequestFenced,
    RequestPlaced,
    ReserveDecode,
    WorkRefused,
)
from support.machine_playbook import Like, ids, sent
from support.router_playbook import (
    COMPLETED,
    D1,
    D_AGAIN,
    FENCE,
    D,
    G,
    P,
    R,
    Router,
    call,
    cancels,
    spec,
)

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


def test_without_a_row_in_anothers_steps_it_runs_on_where_it_is() -> None:
    """There its client would wait until somebody else's answer ends."""
    play = moving(batch_sequences_max=2)
    play.ready(D1, running=2)
    play.ready(D1, MOVED, *cancels(P), FENCE, running=1)


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
