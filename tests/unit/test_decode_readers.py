"""Conversations with a decode worker whose sequences lose their gateway, and get another one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from baton.core.events import DrainRequested
from baton.core.ids import Member, Peer, Role
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.decode.io import RunStep, StepFinished
from baton.decode.sequence import Sequence, Stage
from baton.ports.driving import CallLedger, Exit
from baton.ports.engine import Sampled
from baton.ports.ledger import EndRequest
from baton.ports.transport import PeerUp, Received
from baton.wire import codec
from baton.wire.fields import TokenLogprob
from baton.wire.frames import HEADER_BYTES
from baton.wire.messages import (
    DecodeReserved,
    RequestEnded,
    RequestResumed,
    RequestSpec,
    ReserveDecode,
    TokenChunk,
    TokenRun,
    TokensBounded,
    WorkAdopted,
    WorkAsked,
    WorkFailed,
)
from support.decode_parts import CANCELLED, STEP, Decode, G, R, spec
from support.machine_playbook import ids, sent

G2 = Peer("gateway-1", 33)
WINDOW_MS = 20_000


def lasting(**fields: Any) -> RequestSpec:
    """A request that outlives its gateway."""
    return replace(spec(**fields), resume_ms=WINDOW_MS)


def streaming(tokens: int = 3, request: RequestSpec | None = None, **limits: Any) -> Decode:
    """A worker that has sent ``tokens`` ids of request ``r`` to its gateway."""
    play = Decode(**limits)
    play.local(request or lasting(max_tokens=20))
    step(play, tokens)
    return play


def step(play: Decode, count: int = 1) -> None:
    """Let the worker finish as many steps as it starts, at most ``count``."""
    for _ in range(count):
        before = len(sequence(play).output)
        rows = play.last(RunStep).rows
        tokens = tuple(100 + before if row.sample is not None else None for row in rows)
        asked = play.last(RunStep)
        checksums = tuple((7,) * len(checks) for checks in asked.seals)
        results = tuple(None if token is None else Sampled(token) for token in tokens)
        play.do(StepFinished(asked.step, results, checksums, 0.01))


def sequence(play: Decode) -> Sequence:
    found: Sequence = play.machine.state.sequences["r"]
    return found


def told(play: Decode, gateway: Peer) -> list[int]:
    """All ids sent to ``gateway``, each where it belongs."""
    found: dict[int, int] = {}
    for chunk in play.messages(TokenChunk, gateway):
        for run in chunk.runs:
            found.update(enumerate(run.ids, run.index))
    assert sorted(found) == list(range(len(found))), "a gap"
    return [found[index] for index in sorted(found)]


def adopt(play: Decode, gateway: Peer = G2, turn: int = 1 << 16, held: int = 0) -> list[Any]:
    """The router says who reads it now."""
    return play.do(Received(R, WorkAdopted("r", 1, turn, gateway, held)))


def ends(play: Decode) -> list[Outcome]:
    calls = [command.op for command in play.all if isinstance(command, CallLedger)]
    return [op.outcome for op in calls if isinstance(op, EndRequest)]


def test_a_resumable_request_goes_on_without_its_gateway() -> None:
    """It is stepped as before; another gateway gets all of it, and what follows."""
    play = streaming()
    play.lose(G, gone=True)
    step(play, 2)
    play.up(G2, Role.GATEWAY)
    adopt(play)
    assert told(play, G2) == [100, 101, 102, 103, 104]
    step(play)
    assert told(play, G2)[-1] == 105
    assert not ends(play)


def test_every_other_request_ends_with_its_gateway() -> None:
    """Nobody asked that it goes on."""
    play = streaming(request=spec(max_tokens=20))
    end = EndRequest("r", 1, gone(3), play.machine.state.me, turn=1)
    play.lose(G, CallLedger(end), gone=True)
    assert "r" not in play.machine.state.sequences


def gone(tokens: int) -> Outcome:
    return Outcome(Ending.CANCELLED, reason=Reason.GATEWAY_LOST, completion_tokens=tokens)


def test_nobody_comes_within_the_window() -> None:
    """Then the worker ends it in its gateway's place, and nothing of it is left."""
    play = streaming()
    play.lose(G, gone=True)
    play.wait(WINDOW_MS / 1000 - 1)
    assert "r" in play.machine.state.sequences
    play.wait(2)
    assert [outcome.reason for outcome in ends(play)] == [Reason.GATEWAY_LOST]
    assert "r" not in play.machine.state.sequences


def test_a_complete_answer_waits_for_somebody_to_read_it() -> None:
    """Without blocks, for its window, whatever ``terminal_ttl_ms`` is."""
    play = streaming(2, lasting(max_tokens=4), terminal_ttl_ms=1_000)
    play.lose(G, gone=True)
    step(play, 2)
    assert sequence(play).stage is Stage.FINISHED
    play.wait(10)
    play.up(G2, Role.GATEWAY)
    adopt(play)
    assert told(play, G2) == [100, 101, 102, 103]
    assert play.messages(TokenChunk, G2)[-1].runs[0].finish is not None


def test_a_gateway_that_is_not_linked_yet_gets_it_when_it_is() -> None:
    """What it missed meanwhile is sent with the link."""
    play = streaming()
    play.lose(G, gone=True)
    adopt(play)
    step(play, 2)
    play.up(G2, Role.GATEWAY, sent(G2, TokenChunk))
    assert told(play, G2) == [100, 101, 102, 103, 104]


@pytest.mark.parametrize("logprobs", [-1, 0, 20])
def test_what_is_sent_again_fits_the_frames(logprobs: int) -> None:
    """A gateway that comes back gets the answers of all its clients at once: however much that is,
    each message is one that the transport takes, and nothing of it is missing."""
    most, names = 8_192, ("r" * 200, "s", "t")
    play = Decode(blocks=64, frame_bytes_max=most)
    for number, name in enumerate(names):
        request = lasting(request_id=name, max_tokens=60, logprobs=logprobs, first=100 * number)
        play.do(Received(R, ReserveDecode(request, 1)))
    play.lose(G, gone=True)
    for index in range(70):
        asked = play.last(RunStep)
        top = tuple((2**31 - 1, -1.5) for _ in range(logprobs))
        token = Sampled(70_000 + index, TokenLogprob(9, -2.5, top) if logprobs >= 0 else None)
        results = tuple(None if row.sample is None else token for row in asked.rows)
        sums = tuple((7,) * len(checks) for checks in asked.seals)
        play.do(StepFinished(asked.step, results, sums, 0.01))
        if all(seq.stage is Stage.FINISHED for seq in play.machine.state.sequences.values()):
            break
    for name in names:
        play.do(Received(R, WorkAdopted(name, 1, 7, G2, 0)))
    play.do(PeerUp(Member(peer=G2, role=Role.GATEWAY, endpoint="", pid=1, boot_id="b")))
    runs: dict[str, list[TokenRun]] = {name: [] for name in names}
    for chunk in play.messages(TokenChunk, G2):
        assert len(codec.encode(chunk)) <= most - HEADER_BYTES
        for run in chunk.runs:
            runs[run.request_id].append(run)
    for name, found in runs.items():
        seq = play.machine.state.sequences[name]
        assert [token for run in found for token in run.ids] == seq.output
        assert [each for run in found for each in run.logprobs] == seq.logprobs
        assert [run.finish for run in found] == [None] * (len(found) - 1) + [FinishReason.LENGTH]
    assert len(play.messages(TokenChunk, G2)) > 1 or logprobs < 0


def test_a_live_gateway_that_loses_its_reader_is_told() -> None:
    """It is sent nothing more, and what it says of the request has no effect."""
    play = streaming()
    play.up(G2, Role.GATEWAY)
    adopt(play, turn=5 << 16)
    assert play.messages(RequestResumed, G) == [RequestResumed("r", 5 << 16)]
    before = len(play.messages(TokenChunk, G))
    step(play)
    assert len(play.messages(TokenChunk, G)) == before
    play.hear(G, RequestEnded("r", 1, CANCELLED))
    play.hear(G, TokensBounded("r", 1, 1))
    assert "r" in play.machine.state.sequences
    assert sequence(play).upto is None
    play.hear(G2, RequestEnded("r", 1, CANCELLED))
    assert "r" not in play.machine.state.sequences


def test_the_same_gateway_is_sent_what_it_lacks() -> None:
    """A session that began anew there has nothing; one that lost its router has almost all."""
    play = streaming()
    adopt(play, gateway=G, turn=2, held=2)
    assert play.messages(TokenChunk, G)[-1].runs[0].index == 2
    adopt(play, gateway=G, turn=3)
    assert play.messages(TokenChunk, G)[-1].runs[0].index == 0


@pytest.mark.parametrize("away", [True, False])
def test_it_goes_only_so_far_while_nobody_reads(away: bool) -> None:
    """At the bound it pauses without memory; somebody who reads makes it go on."""
    play = streaming(resume_tokens_max=4)
    if away:
        play.lose(G, gone=True)
    else:
        play.hear(G, TokensBounded("r", 1, 7))
    step(play, 4)
    assert sequence(play).stage is Stage.PAUSED
    assert play.used() == 0
    play.wait(5)
    assert sequence(play).stage is Stage.PAUSED
    if away:
        play.up(G2, Role.GATEWAY)
        adopt(play)
    else:
        play.hear(G, TokensBounded("r", 1, 20), STEP)
    step(play, 2)
    assert len(told(play, G2 if away else G)) == len(sequence(play).output) > 7


def test_log_probabilities_that_are_nowhere_are_computed_again() -> None:
    """Those of ids that came with the reservation are not here: the attempt is given back."""
    play = Decode()
    play.local(lasting(max_tokens=20, logprobs=2), output=ids(50, 51))
    play.up(G2, Role.GATEWAY)
    adopt(play)
    (failed,) = play.messages(WorkFailed, R)
    assert failed.reason is Reason.UNKNOWN_ATTEMPT
    assert "r" not in play.machine.state.sequences


def test_it_may_begin_while_its_gateway_is_away() -> None:
    """A resumable request is taken in without a link; every other one is refused."""
    play = Decode()
    play.lose(G, gone=True)
    play.reserve(lasting(), None, sent(R, DecodeReserved), STEP)
    assert sequence(play).away_since is not None


def test_a_second_placement_of_the_same_attempt_is_an_adoption() -> None:
    """The ledger had lost where it was: the sequence that is here goes on, for its new gateway."""
    play = streaming()
    play.lose(G, gone=True)
    play.up(G2, Role.GATEWAY)
    again = replace(lasting(max_tokens=20), gateway=G2)
    play.reserve(again, None, sent(R, DecodeReserved), sent(G2, TokenChunk), turn=1 << 16)
    assert told(play, G2) == [100, 101, 102]


def test_a_worker_that_shuts_down_does_not_wait_for_readers() -> None:
    """What is complete, or paused, can be made again for whoever comes."""
    play = streaming(2, lasting(max_tokens=4))
    play.lose(G, gone=True)
    step(play, 2)
    assert any(isinstance(command, Exit) for command in play.do(DrainRequested()))


def test_a_router_that_asks_hears_what_is_not_here() -> None:
    """What is here goes on, and nothing of it changes; another epoch or another router's is not
    what was asked for."""
    play = streaming()
    play.hear(R, WorkAsked("r", 1, 1))
    assert sequence(play).router == R
    unknown = sent(R, WorkFailed, request_id="r", reason=Reason.UNKNOWN_ATTEMPT)
    play.hear(R, WorkAsked("r", 2, 1), unknown)
    adopt(play, G, turn=2)
    play.hear(R, WorkAsked("r", 1, 1), unknown)
    play.hear(G, RequestEnded("r", 1, CANCELLED))
    play.hear(R, WorkAsked("r", 1, 2), unknown)
