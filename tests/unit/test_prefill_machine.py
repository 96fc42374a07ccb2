"""Conversations with the prefill machine. Numbers in brackets are entries of the failure list."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton.core.events import DrainRequested, LeaseChanged, RestartRequested, RoleLeft, TimePassed
from baton.core.ids import Peer
from baton.core.lifecycles import LeaseState
from baton.core.outcomes import Ending, Outcome, Reason
from baton.ports.driving import EXIT_RESTART, EXIT_ROLE, Exit, Note, RecordStep, Send
from baton.ports.engine import Sampled
from baton.prefill.io import ChunkFinished, ChunkResult, RunChunk
from baton.wire.handover import (
    ChunkAnnounced,
    PrefillCommitted,
    PrefillFailed,
    Ticket,
    TicketRevoked,
    WriterStopped,
)
from baton.wire.messages import (
    AttemptId,
    CancelWork,
    RequestEnded,
    WorkerStatus,
    WorkFailed,
    WorkRefused,
)
from support.machine_playbook import Like, ids, sent
from support.prefill_parts import CHUNK, STARTED, D, E, G, Prefill, R, arena, spec, ticket

# --- one prompt ---------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_announced_and_committed() -> None:
    """Blocks are announced as they fill, the partly filled last one too, while the first token is
    chosen; the commit brings that."""
    play = Prefill()
    play.start(spec(tokens=14))
    play.returned(CHUNK)
    assert [each.logical for each in play.messages(ChunkAnnounced)[0].sums] == [0, 1]
    play.stored()
    last = play.messages(ChunkAnnounced)[1].sums
    assert [(each.logical, each.tokens) for each in last] == [(2, 4), (3, 2)]
    play.returned(sent(D, PrefillCommitted, first_id=50, last_write_ns=1, ended_ns=2))
    assert not play.machine.state.jobs


def test_only_what_a_chunk_stored_is_announced() -> None:
    """(8) A row whose fence did not hold, or that failed, is not; its neighbour is."""
    play = Prefill(prefill_chunk_tokens=16)
    play.assign(spec("x", tokens=6))
    play.ticket("x", 6, STARTED, CHUNK)
    for name in ("a", "b"):
        play.assign(spec(name, tokens=6))
        play.ticket(name, 6)
    play.returned(Like(Send), STARTED, STARTED, CHUNK)
    play.stored(but="a")
    failed = ChunkResult(failed="NaN")
    both = sent(D, PrefillFailed, request_id="a"), sent(R, WorkFailed, request_id="a")
    finished = ChunkFinished(2, (failed, ChunkResult(sampled=Sampled(50))), 0.01, 2)
    play.feed(finished, *both, sent(D, PrefillCommitted, request_id="b"))


@pytest.mark.parametrize("way", ["cancelled", "ended", "revoked"])
def test_whoever_stops_a_stored_chunk_hears_of_it_when_it_returned(way: str) -> None:
    """(9, 14) It is announced, and its first token is not wanted any more."""
    play = Prefill()
    play.start(spec())
    play.stored()
    play.hear(*_stop(way))
    play.returned(Send(D, WriterStopped("r", 1)))
    assert not play.machine.state.jobs and not play.machine.state.flying


def test_no_client_sees_a_token_that_decode_has_not_verified() -> None:
    """(24) The first token was sampled from blocks that nobody has checked yet: decode gets it."""
    play = Prefill()
    play.start(spec())
    play.returned(sent(D, PrefillCommitted, first_id=50))  # and nothing to the gateway


def test_nothing_is_computed_without_a_ticket() -> None:
    """An assignment alone waits, for a bounded time, and is given back."""
    play = Prefill()
    play.assign(spec())
    assert play.wait(4.9) == []
    said = play.wait(1.0)
    assert len(said) == 1 and sent(R, WorkFailed, reason=Reason.FENCED).matches(said[0])
    assert not play.machine.state.jobs


def test_a_ticket_may_overtake_its_assignment() -> None:
    """They come over different links, in any order; without an assignment it is given back."""
    play = Prefill()
    play.ticket("r", 6)
    play.assign(spec(), STARTED, CHUNK)
    play.returned(sent(D, PrefillCommitted))
    play.ticket("x", 6)
    said = play.wait(6.0)
    assert len(said) == 1 and sent(D, PrefillFailed, request_id="x").matches(said[0])
    assert not play.machine.state.early


@pytest.mark.parametrize("early", [False, True])
def test_a_ticket_of_another_decode_worker_for_the_same_attempt_is_refused(early: bool) -> None:
    """A ledger that lost its last writes has the attempt placed twice. Whoever is not in the
    assignment hears so, and does not wait for a prompt that nobody computes for it."""
    play = Prefill()
    play.link(E)
    theirs = msgspec.structs.replace(ticket("r", 6), arena=arena(E))
    refused = sent(E, PrefillFailed, epoch=1, reason=Reason.STALE_EPOCH)
    if early:
        play.hear(E, theirs)
        play.assign(spec(), refused)
    else:
        play.assign(spec())
        play.hear(E, theirs, refused)
    play.ticket("r", 6, STARTED, CHUNK)


@pytest.mark.parametrize("first", ["assignment", "ticket"])
def test_a_ticket_without_blocks_says_that_there_is_nothing_to_do(first: str) -> None:
    """Decode computes the little that it has not cached; whichever message comes first."""
    play = Prefill()
    nothing = Ticket("r", 1, arena(D), ())
    if first == "assignment":
        play.assign(spec())
        play.hear(D, nothing)
    else:
        play.hear(D, nothing)
        play.assign(spec())
    assert not play.machine.state.jobs and not play.machine.state.early
    assert play.wait(10.0) == []


def test_blocks_are_found_by_their_logical_number() -> None:
    """(27) With two cached blocks only the rest is stored, into the blocks the pairs name."""
    play = Prefill()
    play.assign(spec(tokens=14))
    play.ticket("r", 14, STARTED, CHUNK, cached=2)
    row = play.last(RunChunk).rows[0]
    assert row.row.start == 8 and row.row.blocks.tolist() == [40, 39, 38, 37]
    assert [(each.logical, each.block) for each in row.targets] == [(2, 38), (3, 37)]
    play.returned(sent(D, PrefillCommitted))


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": ticket("r", 6).blocks[1:]},
        {"cached_tokens": 4},
        {"prefix": ticket("r", 6).blocks, "blocks": (), "cached_tokens": 8},
        {"arena": arena(E)},
    ],
)
def test_a_ticket_that_does_not_fit_is_refused_before_the_first_store(wrong: Any) -> None:
    """(27) Missing pairs, a wrong count or an arena that is not mapped: both sides are told."""
    play = Prefill()
    play.assign(spec())
    good = ticket("r", 6)
    values = {name: getattr(good, name) for name in good.__struct_fields__}
    failed = sent(R, WorkFailed, reason=Reason.FENCED)
    play.hear(D, Ticket(**{**values, **wrong}), sent(D, PrefillFailed), failed)
    assert not play.machine.state.jobs


def test_chunks_end_at_block_borders_and_never_touch_an_announced_block() -> None:
    """Each chunk's targets begin where the announced blocks end."""
    play = Prefill(prefill_chunk_tokens=7)
    play.start(spec(tokens=11))
    touched = []
    for _ in range(3):
        row = play.last(RunChunk).rows[0]
        touched += [pair.logical for pair in row.targets]
        last = row.row.sample is not None
        play.returned(*((Like(Send),) if last else (CHUNK,)))
        if last:
            break
    assert touched == [0, 1, 2]


def test_short_prompts_share_a_chunk() -> None:
    """First come, first served, packed into one budget."""
    play = Prefill(prefill_chunk_tokens=16)
    play.start(spec("a", tokens=6))
    play.assign(spec("b", tokens=6))
    play.ticket("b", 6)
    play.assign(spec("c", tokens=6))
    play.ticket("c", 6)
    play.returned(Like(Send), STARTED, STARTED, CHUNK)
    assert [row.row.request_id for row in play.last(RunChunk).rows] == ["b", "c"]


def test_a_suspect_shares_its_chunks_with_nobody() -> None:
    """(9) Should it end this worker, the record names it alone."""
    play = Prefill(prefill_chunk_tokens=16)
    play.start(spec("a", tokens=6))
    for name, alone in (("b", False), ("s", True), ("c", False)):
        play.assign(spec(name, tokens=6), alone=alone)
        play.ticket(name, 6)
    for names in ("b", "s", "c"):
        play.returned(Like(Send), STARTED, CHUNK)
        assert "".join(row.row.request_id for row in play.last(RunChunk).rows) == names
        assert play.last(RecordStep).attempts == tuple(AttemptId(name, 1) for name in names)
    play.returned(Like(Send))
    assert play.last(RecordStep).attempts == ()


def test_a_chunk_that_took_too_long_is_followed_by_a_shorter_one() -> None:
    """A step stays below a quarter of the lease; how, ``chunk_size.py`` decides."""
    play = Prefill(prefill_chunk_tokens=256)
    play.start(spec(tokens=400))
    first = len(play.last(RunChunk).rows[0].row.token_ids)
    play.returned(CHUNK, seconds=1.0)
    assert len(play.last(RunChunk).rows[0].row.token_ids) == first // 2


# --- ends of generation ---------------------------------------------------------------------------


def test_the_clients_parameters_travel_unchanged() -> None:
    """(33) No stage limit is put in the place of the client's."""
    play = Prefill()
    wanted = spec(min_tokens=5, max_tokens=7)
    play.start(wanted)
    sample = play.last(RunChunk).rows[0].row.sample
    assert sample is not None and sample.params == wanted.sampling
    play.returned(sent(D, PrefillCommitted))


def test_forced_ids_are_computed_like_the_prompt_and_the_index_goes_on() -> None:
    """A later attempt samples the token behind what the client has."""
    play = Prefill(prefill_chunk_tokens=16)
    play.start(spec(tokens=3, max_tokens=3), epoch=2, output=ids(50, 51))
    row = play.last(RunChunk).rows[0].row
    assert row.token_ids.tolist() == [1, 2, 3, 50, 51]
    assert row.sample is not None and row.sample.index == 2
    committed = sent(D, PrefillCommitted, epoch=2)
    play.returned(committed)


# --- cancel, revoke, fail -------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cancelled", "ended", "revoked"])
@pytest.mark.parametrize("chunk", ["first", "last"])
def test_whoever_stops_a_running_chunk_hears_of_it_when_it_returned(way: str, chunk: str) -> None:
    """(14) Its result is dropped, its blocks are not forgotten: the writer says that it stopped."""
    play = Prefill()
    play.start(spec(tokens=14))
    if chunk == "last":
        play.returned(CHUNK)
    play.hear(*_stop(way))
    play.hear(*_stop(way))
    assert play.machine.state.jobs
    play.returned(Send(D, WriterStopped("r", 1)))
    assert not play.machine.state.jobs and not play.machine.state.flying


def _stop(way: str) -> tuple[Peer, Any]:
    outcome = Outcome(Ending.CANCELLED, reason=Reason.CLIENT_CANCELLED)
    return {
        "cancelled": (R, CancelWork("r", 1, Reason.CLIENT_CANCELLED)),
        "ended": (G, RequestEnded("r", 1, outcome)),
        "revoked": (D, TicketRevoked("r", 1)),
    }[way]


@pytest.mark.parametrize("way", ["cancelled", "ended", "revoked"])
def test_a_waiting_prompt_is_stopped_at_once(way: str) -> None:
    """(14, 62) Between chunks, or before the first: no computation for the dead."""
    play = Prefill()
    play.start(spec("a", tokens=14))
    play.assign(spec("r"))
    play.ticket("r", 6)
    play.hear(*_stop(way), Send(D, WriterStopped("r", 1)))
    assert list(play.machine.state.jobs) == ["a"]


def test_the_queue_shrinks_with_every_cancel() -> None:
    """(62) Fifteen of twenty leave: the queue is told as five."""
    play = Prefill()
    play.start(spec("a", tokens=14))
    for number in range(20):
        play.assign(spec(f"r{number}"))
    for number in range(15):
        play.hear(R, CancelWork(f"r{number}", 1, Reason.CLIENT_DISCONNECTED))
    play.wait(0.3)
    assert play.messages(WorkerStatus)[-1].waiting == 6


def test_it_tells_how_long_its_chunks_take() -> None:
    """By their tokens, from the start of a chunk until its result is here."""
    play = Prefill()
    play.start(spec("a", tokens=14))
    play.now += 0.2
    play.returned(CHUNK)
    play.now += 0.15
    play.returned(sent(D, PrefillCommitted))
    play.wait(0.6)
    curve = play.messages(WorkerStatus)[-1].curve
    assert curve.tokens == (6, 8)
    assert abs(curve.seconds(8) - 0.2) < 0.001


def test_a_prompt_that_came_and_went_between_two_statuses_is_told() -> None:
    """The router counts it as waiting until the next status, which must not wait for the beat."""
    play = Prefill()
    for request_id in ("a", "b"):
        told = len(play.messages(WorkerStatus))
        play.start(spec(request_id, tokens=6))
        play.returned(sent(D, PrefillCommitted))
        play.wait(0.06)
        assert len(play.messages(WorkerStatus)) > told
        assert play.messages(WorkerStatus)[-1].waiting == 0


def test_the_note_of_a_cancelled_prompt_has_the_cancels_reason() -> None:
    """A placement that decode refused is no client's cancel, and the log must not say so."""
    play = Prefill()
    play.assign(spec())
    play.hear(R, CancelWork("r", 1, Reason.NO_LINK))
    notes = [one for one in play.all if isinstance(one, Note) and one.event == "cancelled"]
    assert [note.fields["reason"] for note in notes] == [Reason.NO_LINK]


def test_a_revocation_of_what_is_over_is_answered() -> None:
    """(9) Committed, unknown or not yet assigned: decode must not wait for ever."""
    play = Prefill()
    play.start(spec())
    play.returned(Like(Send))
    stopped = Send(D, WriterStopped("r", 1))
    play.hear(D, TicketRevoked("r", 1), stopped)
    play.hear(D, TicketRevoked("r", 1), stopped)
    play.ticket("b", 6)
    play.hear(D, TicketRevoked("b", 1), Send(D, WriterStopped("b", 1)))
    play.assign(spec("b"))
    assert play.machine.chunks.step == 1, "a revoked ticket is not used by a late assignment"


def test_a_fence_that_does_not_hold_ends_the_attempt() -> None:
    """(8) Blocks that were taken back are not stored into; everybody is told."""
    play = Prefill()
    play.start(spec(tokens=14))
    failed = (sent(D, PrefillFailed, reason=Reason.FENCED), sent(R, WorkFailed))
    play.returned(*failed, fenced=True)
    assert not play.machine.state.jobs


@pytest.mark.parametrize("retryable", [True, False])
def test_an_engine_failure_is_told_to_decode_and_router(retryable: bool) -> None:
    """(5) With the reason, and whether another worker may succeed."""
    play = Prefill()
    play.start(spec(tokens=14))
    error = {"reason": Reason.PREFILL_ERROR, "retryable": retryable}
    both = (sent(D, PrefillFailed, **error), sent(R, WorkFailed, **error))
    play.returned(*both, failed="NaN", retryable=retryable)


def test_a_failed_row_leaves_the_others_of_its_chunk_alone() -> None:
    """(5) Only the blamed one ends."""
    play = Prefill(prefill_chunk_tokens=16)
    play.assign(spec("a"))
    play.assign(spec("b"))
    play.ticket("a", 6, STARTED, CHUNK)
    play.ticket("b", 6)
    play.returned(Like(Send), Like(Send), STARTED, CHUNK, failed="NaN")
    play.returned(sent(D, PrefillCommitted, request_id="b"))


# --- epochs and bounds --------------------------------------------------------------------------


def test_a_lower_epoch_is_refused_and_a_higher_one_replaces() -> None:
    """An attempt is never started twice, nor moved back; an old ticket is given back."""
    play = Prefill()
    play.assign(spec(), epoch=2)
    play.assign(spec(), epoch=2)
    play.assign(spec(), sent(R, WorkRefused, reason=Reason.STALE_EPOCH), epoch=1)
    play.ticket("r", 6, sent(D, PrefillFailed, epoch=1, reason=Reason.STALE_EPOCH), epoch=1)
    play.hear(R, CancelWork("r", 1, Reason.SUPERSEDED))
    play.assign(spec(), epoch=3)
    assert play.machine.state.jobs["r"].epoch == 3
    play.ticket("r", 6, STARTED, CHUNK, epoch=3)
    play.assign(spec(), sent(R, WorkRefused, reason=Reason.QUEUE_FULL), epoch=4)
    play.returned(Send(D, WriterStopped("r", 3)))
    play.assign(spec(), epoch=5)


def test_the_queue_is_bounded() -> None:
    """(63) More assignments are refused; more early tickets are given back."""
    play = Prefill(prefill_queue_max=2)
    play.assign(spec("a"))
    play.assign(spec("b"))
    play.assign(spec("c"), sent(R, WorkRefused, reason=Reason.QUEUE_FULL))
    play.ticket("x", 6)
    play.ticket("y", 6)
    play.ticket("z", 6, sent(D, PrefillFailed, reason=Reason.QUEUE_FULL))


def test_a_suspect_or_draining_worker_takes_nothing_new() -> None:
    """It goes on with what it has."""
    play = Prefill()
    play.start(spec(tokens=14))
    play.feed(LeaseChanged(LeaseState.SUSPECT))
    play.assign(spec("b"), sent(R, WorkRefused, reason=Reason.SUSPECT))
    play.feed(LeaseChanged(LeaseState.HELD))
    play.feed(DrainRequested())
    play.assign(spec("b"), sent(R, WorkRefused, reason=Reason.DRAINING))
    play.returned(CHUNK)
    play.returned(sent(D, PrefillCommitted), Exit(0, "drained"))
    play.feed(DrainRequested())


def test_a_restart_is_a_drain_that_asks_for_a_successor() -> None:
    """What runs is finished; the exit code tells the two apart."""
    play = Prefill()
    play.start(spec(tokens=14))
    play.feed(RestartRequested())
    play.assign(spec("b"), sent(R, WorkRefused, reason=Reason.DRAINING))
    play.returned(CHUNK)
    play.returned(sent(D, PrefillCommitted), Exit(EXIT_RESTART, "drained"))


def test_leaving_the_role_is_a_drain_that_asks_for_another_machine() -> None:
    """What runs is finished; a stop that comes meanwhile makes it a stop."""
    play = Prefill()
    play.start(spec(tokens=14))
    play.feed(RoleLeft())
    play.assign(spec("b"), sent(R, WorkRefused, reason=Reason.DRAINING))
    play.returned(CHUNK)
    play.returned(sent(D, PrefillCommitted), Exit(EXIT_ROLE, "drained"))
    play = Prefill()
    play.start(spec(tokens=6))
    play.feed(RoleLeft())
    play.feed(DrainRequested())
    play.returned(sent(D, PrefillCommitted), Exit(0, "drained"))


@pytest.mark.parametrize("state", ["no ticket", "waiting", "running"])
def test_a_drain_ends_in_time_in_every_state(state: str) -> None:
    """What is not done at ``drain_ms`` is given back as draining, and the process exits."""
    play = Prefill(drain_ms=1_000)
    if state == "running":
        play.start(spec())
    else:
        play.start(spec("a", tokens=6))
        play.assign(spec("r"))
        if state == "waiting":
            play.ticket("r", 6)
    play.feed(DrainRequested())
    assert play.wait(0.9) == []
    said = play.wait(0.2)
    failed = sent(R, WorkFailed, request_id="r", reason=Reason.DRAINING)
    assert any(failed.matches(each) for each in said)
    stores_no_more = any(sent(D, PrefillFailed, request_id="r").matches(each) for each in said)
    assert stores_no_more == (state != "running")
    assert said[-1] == Exit(0, "drained")


def test_no_link_to_decode_means_no_work() -> None:
    """The ticket could not come."""
    play = Prefill()
    play.assign(spec(), sent(R, WorkRefused, reason=Reason.NO_LINK), decode=E)


def test_a_hung_chunk_ends_the_process() -> None:
    """An engine that does not return cannot be helped from inside."""
    play = Prefill()
    play.start(spec())
    play.now += 31.0
    play.feed(TimePassed(), Like(Exit, code=75))


def test_a_message_that_fits_nothing_is_counted_and_dropped() -> None:
    """(12) Unknown ids and foreign messages change nothing."""
    play = Prefill()
    play.hear(R, WorkRefused("x", 1, Reason.INTERNAL))
    assert play.measured("stale_messages_total", kind="unknown") == 1
    play.hear(R, CancelWork("x", 1, Reason.INTERNAL))
    play.hear(D, TicketRevoked("x", 1), Send(D, WriterStopped("x", 1)))
