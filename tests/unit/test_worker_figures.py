"""What workers and gateways tell routers about speed, in conversations with their machines."""

from __future__ import annotations

import msgspec
import pytest

from baton.core.events import LeaseChanged
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, Outcome, Reason
from baton.decode.io import BlocksVerified, VerifyBlocks
from baton.gateway.machine import GatewayMachine
from baton.gateway.vocabulary import ClientGone, Deliver, Submitted
from baton.ports.driving import Measure
from baton.wire.handover import ChunkAnnounced, PrefillCommitted
from baton.wire.messages import (
    RequestEnded,
    RequestPlaced,
    SubmitRequest,
    TokenChunk,
    TokenRun,
    WorkerStatus,
)
from support.decode_parts import EOS, STEP, Decode, G, P, commit, spec, sums
from support.machine_playbook import Like, Playbook, request, sent
from support.prefill_parts import CHUNK, D, Prefill
from support.prefill_parts import spec as prompt


def _told(play: Playbook) -> WorkerStatus:
    """The status after the next beat."""
    play.wait(0.6)
    return play.messages(WorkerStatus)[-1]


def test_a_decode_worker_tells_how_long_its_steps_take() -> None:
    """By their tokens: from the start of a step until its result is here."""
    play = Decode(blocks=8, local_prefill_chunk_tokens=8)
    play.local(spec("r", tokens=8, max_tokens=4))
    play.now += 0.08
    play.stepped((50,), Like(object), STEP, sent(G, TokenChunk))
    play.now += 0.02
    play.stepped((51,), STEP, sent(G, TokenChunk))
    status = _told(play)
    assert status.curve.seconds(8) == pytest.approx(0.08, rel=0.01)
    assert status.curve.seconds(1) == pytest.approx(0.02, rel=0.01)
    assert (status.chunk_tokens, status.running, status.context_tokens) == (8, 1, 10)


def _borrowed_s(play: Playbook, kind: str) -> float:
    """What was added to the counter of the time with borrowed cores."""
    return sum(
        one.value
        for one in play.all
        if isinstance(one, Measure)
        and (one.name, one.labels) == ("engine_borrowed_seconds_total", {"kind": kind})
    )


def test_a_decode_worker_tells_its_steps_with_borrowed_cores_apart() -> None:
    """And counts the time in which it had them, whatever share of a step that was."""
    play = Decode(blocks=8)
    play.local(spec("r", tokens=8, max_tokens=5))
    play.stepped((50,), Like(object), STEP, sent(G, TokenChunk))
    for seconds, borrowed in ((0.02, 0.0), (0.5, 0.5), (0.012, 1.0)):
        play.now += seconds
        play.stepped((51,), STEP, sent(G, TokenChunk), borrowed=borrowed)
    status = _told(play)
    assert status.curve.seconds(1) == pytest.approx(0.02, rel=0.01)
    assert status.curve_borrowed.seconds(1) == pytest.approx(0.012, rel=0.01)
    assert _borrowed_s(play, "decode") == pytest.approx(0.015)


def test_a_prefill_worker_tells_its_chunks_with_borrowed_cores_apart() -> None:
    """The same way."""
    play = Prefill()
    play.start(prompt("a", tokens=14))
    play.now += 0.1
    play.returned(CHUNK, borrowed=0.95)
    play.now += 0.15
    play.returned(sent(D, PrefillCommitted))
    status = _told(play)
    assert status.curve_borrowed.seconds(8) == pytest.approx(0.1, rel=0.01)
    assert status.curve.seconds(6) == pytest.approx(0.15, rel=0.01)
    assert _borrowed_s(play, "prefill") == pytest.approx(0.0095)


def test_a_decode_worker_tells_how_long_a_hand_over_takes() -> None:
    """From the end of prefill's last step to the sequence that runs."""
    play = Decode()
    ticket = play.remote(spec("r", tokens=6))
    announced = ChunkAnnounced("r", 1, sums(ticket, 6))
    play.hear(P, announced, Like(VerifyBlocks))
    play.hear(P, msgspec.structs.replace(commit(ticket), ended_ns=99_990_000_000))
    asked = play.last(VerifyBlocks)
    play.do(BlocksVerified(asked.request_id, asked.epoch, asked.checks, (), 0.001))
    assert _told(play).handover_us == 10_000


@pytest.mark.parametrize(("ended_ns", "told_us"), [(0, 0), (1, 10_000_000), (2**62, 0)])
def test_a_clock_that_is_wrong_at_prefill_spoils_no_figure(ended_ns: int, told_us: int) -> None:
    """A time that is missing is not learned, one of long ago no more than a slow hand-over."""
    play = Decode()
    ticket = play.remote(spec("r", tokens=6))
    play.hear(P, ChunkAnnounced("r", 1, sums(ticket, 6)), Like(VerifyBlocks))
    play.hear(P, msgspec.structs.replace(commit(ticket), ended_ns=ended_ns))
    asked = play.last(VerifyBlocks)
    play.do(BlocksVerified(asked.request_id, asked.epoch, asked.checks, (), 0.001))
    assert _told(play).handover_us == told_us


def test_a_decode_worker_tells_how_much_its_answers_will_grow() -> None:
    """As far as asked for, before any answer is known; then as far as answers went lately."""
    play = Decode(blocks=32, growth_tokens=8)
    play.local(spec("a", tokens=4, max_tokens=100))
    assert _told(play).growth_blocks == 2
    play.now += 0.01
    play.stepped((50,), Like(object), STEP, sent(G, TokenChunk))
    play.stepped((EOS,), sent(G, TokenChunk))
    play.hear(G, RequestEnded("a", 1, Outcome(Ending.COMPLETED)))
    play.local(spec("b", tokens=4, max_tokens=100))
    assert _told(play).growth_blocks == 1  # two tokens more, or a block at least


def test_a_gateway_tells_when_the_first_token_came() -> None:
    """Since the request was submitted; and nothing if there was none."""
    me, router = Peer("gateway-0", 1), Peer("router-0", 2)
    decode = Peer("decode-0", 5)
    play = Playbook(GatewayMachine(me, Limits()))
    play.feed(LeaseChanged(LeaseState.HELD))
    play.up(router, Role.ROUTER)
    play.up(decode, Role.DECODE)
    for name in ("a", "b"):
        play.feed(Submitted(request(name, gateway=me)), sent(router, SubmitRequest))
        play.hear(router, RequestPlaced(name, 1, decode))
    play.now += 0.25
    play.hear(decode, TokenChunk((TokenRun("a", 1, 0, (50,)),)), Like(Deliver))
    play.now += 1.0
    for name in ("a", "b"):
        play.do(ClientGone(name, Reason.CLIENT_DISCONNECTED))
    told = {message.request_id: message for message in play.messages(RequestEnded, router)}
    assert told["a"].ttft_ms == pytest.approx(250)
    assert told["b"].ttft_ms is None
