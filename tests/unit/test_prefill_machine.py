"""Conversations with the prefill machine. Numbers in brackets are entries of the failure list."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton.core.events import (
    DrainRequested,
    LeaseChanged,
    RestartRequested,
    RoleLeft,
    TimePassed,
)
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, Outcome, Reason
from baton.ports.driving import EXIT_RESTART, EXIT_ROLE, CallLedger, Exit, Note, RecordStep, Send
from baton.ports.engine import Sampled
from baton.ports.ledger import AdvanceRequest
from baton.prefill.io import (
    ArenaOpened,
    ChunkFinished,
    ChunkResult,
    ChunkStored,
    MapArena,
    RunChunk,
    UnmapArena,
)
from baton.prefill.machine import PrefillMachine
from baton.wire.messages import (
    ArenaMapped,
    ArenaOffered,
    ArenaRef,
    AssignPrefill,
    AttemptId,
    CancelWork,
    ChunkAnnounced,
    PrefillCommitted,
    PrefillFailed,
    RequestEnded,
    RequestSpec,
    Ticket,
    TicketBlock,
    TicketRevoked,
    WorkerStatus,
    WorkFailed,
    WorkRefused,
    WriterStopped,
)
from support.machine_playbook import Like, Playbook, ids, request, sent

ME, R = Peer("prefill-0", 1), Peer("router-0", 2)
G, D, E = Peer("gateway-0", 3), Peer("decode-0", 4), Peer("decode-1", 5)
HEIR = Peer("decode-0", 9)
SIZE = 4
EOS = 9
CHUNK = Like(RunChunk)
STARTED = Like(CallLedger, op=Like(AdvanceRequest, state=RequestState.PREFILLING))


def arena(owner: Peer) -> ArenaRef:
    name = f"arena-{owner.incarnation}"
    return ArenaRef(path=f"/{name}", device=1, inode=1, file_id=name, owner=owner)


class Prefill(Playbook):
    """A prefill worker that has mapped decode's arena, everybody linked."""

    stored_step = 0

    def __init__(self, **limits: Any) -> None:
        limits = {"prefill_chunk_tokens": 8, **limits}
        super().__init__(
            PrefillMachine(ME, Limits(**limits), block_size=SIZE, root=b"root"),
        )
        self.feed(LeaseChanged(LeaseState.HELD))
        self.up(R, Role.ROUTER)
        self.up(G, Role.GATEWAY)
        self.link(D)

    def link(self, owner: Peer) -> None:
        """Link a decode worker and map its arena."""
        self.up(owner, Role.DECODE)
        self.hear(owner, ArenaOffered(arena(owner)), MapArena(arena(owner)))
        mapped = sent(owner, ArenaMapped, error="")
        self.feed(ArenaOpened(arena(owner)), mapped)

    def assign(
        self,
        spec: RequestSpec,
        *expected: object,
        epoch: int = 1,
        decode: Peer = D,
        output: bytes = b"",
        alone: bool = False,
    ) -> None:
        self.hear(R, AssignPrefill(spec, epoch, decode, output, alone=alone), *expected)

    def ticket(
        self, request_id: str, tokens: int, *expected: object, epoch: int = 1, cached: int = 0
    ) -> None:
        self.hear(D, ticket(request_id, tokens, epoch=epoch, cached=cached), *expected)

    def start(self, spec: RequestSpec, **fields: Any) -> None:
        """Give work and its ticket; its first chunk runs."""
        tokens = spec.prompt_tokens + len(fields.get("output", b"")) // 4
        self.assign(spec, **fields)
        epoch = fields.get("epoch", 1)
        self.ticket(spec.request_id, tokens, STARTED, CHUNK, epoch=epoch)

    def returned(self, *expected: object, seconds: float = 0.01, **result: Any) -> None:
        """The running chunk is stored, if it is not yet, and returns; its last rows sample 50
        unless ``result`` says otherwise."""
        chunk = self.last(RunChunk)
        if chunk.step != self.stored_step and not result:
            self.stored()
        results = []
        for row in chunk.rows:
            values = {"sampled": Sampled(50) if row.row.sample is not None else None}
            results.append(ChunkResult(**({**values, **result})))
        self.feed(ChunkFinished(chunk.step, tuple(results), seconds, 2), *expected)

    def stored(self, but: str = "") -> None:
        """The running chunk has stored all rows ``but`` one and announces them at once."""
        chunk, self.stored_step = self.last(RunChunk), self.last(RunChunk).step
        kept = [row.row.request_id != but for row in chunk.rows]
        sums = tuple(
            (7,) * len(row.checks) if keep else None
            for row, keep in zip(chunk.rows, kept, strict=True)
        )
        announced = [
            sent(job.decode, ChunkAnnounced, request_id=row.row.request_id)
            for (row, job), keep in zip(self.machine.state.flying, kept, strict=True)
            if keep and not job.stopping
        ]
        self.feed(ChunkStored(chunk.step, sums, 1, 0.001), *announced)


def spec(request_id: str = "r", tokens: int = 6, **fields: Any) -> RequestSpec:
    fields.setdefault("stop_token_ids", (EOS,))
    return request(request_id, tuple(range(1, tokens + 1)), gateway=G, **fields)


def ticket(request_id: str, tokens: int, *, epoch: int = 1, cached: int = 0) -> Ticket:
    """Return a ticket for ``tokens`` tokens whose first ``cached`` blocks are there already.

    Physical blocks run backwards, so that whoever pairs by position is found out."""
    count = -(-tokens // SIZE)
    pairs = [TicketBlock(logical, 40 - logical, 3) for logical in range(count)]
    return Ticket(
        request_id=request_id,
        epoch=epoch,
        arena=arena(D),
        blocks=tuple(pairs[cached:]),
        prefix=tuple(pairs[:cached]),
        cached_tokens=cached * SIZE,
    )


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


# --- arenas and links ---------------------------------------------------------------------------


def test_work_for_a_lost_decode_ends_and_its_arena_stays_mapped() -> None:
    """(3) Unmapping lets the lock go, which is this worker's death to the owner: only if the owner
    is over for good, and only when no chunk stores there any more."""
    play = Prefill()
    play.start(spec("a", tokens=14))
    play.assign(spec("b"))
    play.ticket("c", 6)
    play.lose(D)
    assert list(play.machine.state.jobs) == ["a"] and not play.machine.state.early
    play.returned()
    assert not play.machine.state.jobs
    assert not any(isinstance(each, UnmapArena) for each in play.all)
    play.up(D, Role.DECODE)
    play.hear(D, TicketRevoked("a", 1), Send(D, WriterStopped("a", 1)))


def test_a_dead_decodes_arena_waits_for_its_successor_and_is_then_given_up() -> None:
    """(3) Its memory may be taken over as it is; nobody waits for that for ever."""
    play = Prefill(arena_kept_ms=10_000)
    play.start(spec("a", tokens=14))
    play.lose(D, gone=True)
    play.returned()
    assert play.wait(9.0) == []
    assert play.wait(2.0) == [UnmapArena(arena(D).file_id)]
    assert not play.machine.arenas.mapped and not play.machine.arenas.gone


def test_an_arena_is_not_unmapped_before_the_last_chunk_returned() -> None:
    """(3) Its owner is over, and so is the memory, but the engine still stores into it."""
    play = Prefill(arena_kept_ms=1_000)
    play.start(spec("a", tokens=14))
    play.lose(D, gone=True)
    assert play.wait(3.0) == []
    play.returned()
    assert play.wait(1.0) == [UnmapArena(arena(D).file_id)]


def test_a_decode_that_comes_back_in_mid_chunk_hears_when_it_returned() -> None:
    """(8, 14) The revocation of the second link waits for the chunk that began on the first."""
    play = Prefill()
    play.start(spec("r", tokens=14))
    play.lose(D)
    play.link(D)
    play.hear(D, TicketRevoked("r", 1))
    play.returned(Send(D, WriterStopped("r", 1)))


def test_the_arena_of_an_earlier_incarnation_is_unmapped() -> None:
    """Nobody reports the death of a decode that was out of reach: its successor shows it, and by
    what it offers, that it has not taken the memory over."""
    play = Prefill()
    play.lose(D)
    play.up(HEIR, Role.DECODE)
    assert play.wait(1.0) == []
    fresh = arena(HEIR)
    play.hear(HEIR, ArenaOffered(fresh), MapArena(fresh), UnmapArena(arena(D).file_id))
    play.feed(ArenaOpened(fresh), sent(HEIR, ArenaMapped, error=""))


def taken_over(owner: Peer = HEIR) -> ArenaRef:
    """Return the arena of ``D`` as its successor offers it."""
    return msgspec.structs.replace(arena(D), owner=owner)


def test_an_arena_that_was_taken_over_is_answered_for_when_nothing_stores_there_any_more() -> None:
    """(3) The successor frees what it kept from us when it hears that: the chunk that runs for the
    dead owner has to be over. The mapping, and with it our lock, is the same all the time."""
    play = Prefill(arena_kept_ms=5_000)
    play.start(spec("a", tokens=14))
    play.assign(spec("b"))
    play.ticket("b", 6)
    play.lose(D, gone=True)
    play.up(HEIR, Role.DECODE)
    play.hear(HEIR, ArenaOffered(taken_over()), MapArena(taken_over()))
    assert play.wait(10.0) == [], "it is kept as long as the answer is not there"
    play.returned()
    play.feed(ArenaOpened(taken_over()), sent(HEIR, ArenaMapped, file_id="arena-4", error=""))
    assert not play.machine.state.jobs
    assert play.wait(120.0) == []
    assert play.machine.arenas.mapped == {"arena-4": taken_over()}


def test_a_successor_seen_before_the_death_is_told_ends_the_work_for_the_dead() -> None:
    """Whatever order the news come in: what runs for the former owner stops."""
    play = Prefill()
    play.start(spec("a", tokens=14))
    play.up(HEIR, Role.DECODE)
    assert play.machine.state.jobs["a"].stopping
    play.returned(Send(D, WriterStopped("a", 1)))


def test_tickets_of_a_former_owner_are_void() -> None:
    """(3) The file is mapped, but it is not that owner's any more."""
    play = Prefill()
    play.up(HEIR, Role.DECODE)
    play.hear(HEIR, ArenaOffered(taken_over()), MapArena(taken_over()))
    play.feed(ArenaOpened(taken_over()), sent(HEIR, ArenaMapped))
    play.assign(spec("r"), decode=HEIR)
    failed = sent(HEIR, PrefillFailed, reason=Reason.FENCED)
    play.hear(HEIR, ticket("r", 6), failed, sent(R, WorkFailed, reason=Reason.FENCED))
    play.assign(spec("s"), decode=HEIR)
    valid = msgspec.structs.replace(ticket("s", 6), arena=taken_over())
    play.hear(HEIR, valid, STARTED, CHUNK)


def test_an_arena_that_cannot_be_mapped_for_its_successor_is_unmapped() -> None:
    """Our lock's end says then that nothing of ours will be stored there."""
    play = Prefill()
    play.lose(D, gone=True)
    play.up(HEIR, Role.DECODE)
    play.hear(HEIR, ArenaOffered(taken_over()), MapArena(taken_over()))
    refused = sent(HEIR, ArenaMapped, error="no")
    play.feed(ArenaOpened(taken_over(), "no"), refused, UnmapArena("arena-4"))


def test_a_successor_that_dies_as_well_leaves_the_arena_to_the_next_one() -> None:
    """The answer to the first comes late, and is not taken for one to the second."""
    play = Prefill()
    third = Peer("decode-0", 10)
    play.lose(D, gone=True)
    play.up(HEIR, Role.DECODE)
    play.hear(HEIR, ArenaOffered(taken_over()), MapArena(taken_over()))
    play.lose(HEIR, gone=True)
    play.up(third, Role.DECODE)
    play.hear(third, ArenaOffered(taken_over(third)), MapArena(taken_over(third)))
    play.feed(ArenaOpened(taken_over(), "its owner is dead"))
    assert play.machine.arenas.mapped == {"arena-4": arena(D)}
    play.feed(ArenaOpened(taken_over(third)), sent(third, ArenaMapped, error=""))
    assert play.wait(120.0) == []


def test_an_arena_that_cannot_be_mapped_is_said_so() -> None:
    """Decode gives no tickets to such a pair."""
    play = Prefill()
    play.up(E, Role.DECODE)
    play.hear(E, ArenaOffered(arena(E)), MapArena(arena(E)))
    play.feed(ArenaOpened(arena(E), "layout differs"), sent(E, ArenaMapped, error="layout differs"))
    play.hear(E, ArenaOffered(arena(D)))


def test_a_message_that_fits_nothing_is_counted_and_dropped() -> None:
    """(12) Unknown ids and foreign messages change nothing."""
    play = Prefill()
    play.hear(R, WorkRefused("x", 1, Reason.INTERNAL))
    play.hear(R, CancelWork("x", 1, Reason.INTERNAL))
    play.hear(D, TicketRevoked("x", 1), Send(D, WriterStopped("x", 1)))
