"""Conversations with the decode machine. Numbers in brackets are entries of the failure list."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.events import DrainRequested, LeaseChanged, RestartRequested, TimePassed
from baton.core.ids import Peer, Role
from baton.core.lifecycles import BlockState, LeaseState
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.core.prefix import block_names
from baton.decode.io import (
    BlocksVerified,
    MarkBlocks,
    ProbeWriter,
    RunStep,
    StepFailed,
    StepFinished,
    VerifyBlocks,
    WriterProbed,
)
from baton.ports.channel import BlockMark
from baton.ports.driving import EXIT_RESTART, CallLedger, Exit, Measure, RecordStep, Send
from baton.ports.engine import Sampled
from baton.ports.ledger import EndRequest
from baton.wire.messages import (
    ArenaMapped,
    ArenaOffered,
    AttemptId,
    BlockSum,
    CancelWork,
    ChunkAnnounced,
    DecodeReserved,
    LastStep,
    MoveOffered,
    PrefillCommitted,
    PrefillFailed,
    RequestEnded,
    Ticket,
    TicketRevoked,
    TokenChunk,
    TokensWanted,
    WorkAdopted,
    WorkerStatus,
    WorkFailed,
    WorkRefused,
    WriterStopped,
)
from support.decode_parts import (
    ADVANCED,
    ARENA,
    CANCELLED,
    EOS,
    R1,
    SIZE,
    STEP,
    Decode,
    G,
    P,
    Q,
    R,
    commit,
    run,
    spec,
    sums,
)
from support.machine_playbook import Like, ids, sent

# --- the hand-over ------------------------------------------------------------------------------


def test_a_request_goes_through_the_hand_over_and_generates() -> None:
    """Ticket, announcement, commit, verification, join, tokens, end: nothing is left."""
    play = Decode()
    ticket = play.remote(spec(tokens=6, max_tokens=3))
    announced = ChunkAnnounced("r", 1, sums(ticket, 6, last=0))
    play.hear(P, announced, Like(VerifyBlocks, request_id="r"))
    rest = ChunkAnnounced("r", 1, sums(ticket, 6, first=1))
    play.hear(P, rest, Like(VerifyBlocks, request_id="r"))
    play.hear(P, commit(ticket))
    first, second = (each for each in play.all if isinstance(each, VerifyBlocks))
    play.feed(BlocksVerified("r", 1, first.checks, (), 0.0))
    play.feed(BlocksVerified("r", 1, second.checks, (), 0.0), ADVANCED, STEP, run(0, 50))
    play.stepped((51,), STEP, run(1, 51))
    play.stepped((52,), run(2, 52, finish=FinishReason.LENGTH))
    play.hear(G, RequestEnded("r", 1, Outcome(Ending.COMPLETED)))
    assert play.used() == 0 and not play.machine.state.sequences
    measured = [one for one in play.all if isinstance(one, Measure)]
    assert sum(one.value for one in measured if one.name == "generation_tokens_total") == 3
    assert len([one for one in measured if one.name == "request_decode_seconds"]) == 1
    assert {one.value for one in measured if one.name == "engine_step_rows"} == {1}


def test_a_prompt_that_is_nearly_all_cached_is_finished_here() -> None:
    """A few tokens are less than a hand-over; prefill hears that it has nothing to do for it."""
    play = Decode(blocks=24, hit_rest_tokens=6)
    play.local(spec("a", tokens=16, max_tokens=1))
    play.stepped((40,), ADVANCED, Like(Send))
    reserved = sent(R, DecodeReserved, request_id="b", cached_tokens=16)
    nothing = sent(P, Ticket, request_id="b", blocks=(), prefix=(), cached_tokens=0)
    play.reserve(spec("b", tokens=22, max_tokens=1), P, nothing, reserved, STEP)
    assert play.last(RunStep).rows[0].start == 16
    assert not play.machine.handover.tickets
    play.hear(P, PrefillFailed("b", 1, Reason.FENCED, "no assignment came"))
    ticket = sent(P, Ticket, request_id="c", cached_tokens=16)
    play.reserve(
        spec("c", tokens=23, max_tokens=1), P, ticket, sent(R, DecodeReserved, request_id="c")
    )
    play.reserve(
        spec("d", tokens=3, first=60, max_tokens=1), P, sent(P, Ticket), sent(R, DecodeReserved)
    )


def test_metadata_says_filling_before_the_ticket_leaves() -> None:
    """A writer that looks at once must find its blocks FILLING for it."""
    play = Decode()
    play.remote(spec(tokens=6))
    at = next(i for i, c in enumerate(play.all) if isinstance(c, Send) and _is_ticket(c))
    marks = [m for c in play.all[:at] if isinstance(c, MarkBlocks) for m in c.marks]
    ticket = play.messages(Ticket)[0]
    for pair in ticket.blocks:
        mark = [each for each in marks if each.block == pair.block][-1]
        assert (mark.state, mark.generation) == (BlockState.FILLING, pair.generation)
        assert (mark.epoch, mark.writer) == (1, P.incarnation)


def marked(play: Decode) -> dict[int, BlockMark]:
    """Return what the metadata says in the end."""
    found = [mark for c in play.all if isinstance(c, MarkBlocks) for mark in c.marks]
    return {mark.block: mark for mark in found}


def names(tokens: int, first: int = 1) -> list[bytes]:
    """Return the names of all blocks of ``tokens`` consecutive ids."""
    return block_names(b"root", ids(*range(first, first + tokens)), SIZE)


def test_verified_blocks_have_name_and_checksum_in_the_metadata() -> None:
    """Whoever finds the arena can verify them: as soon as they are, not when the prompt is."""
    play = Decode()
    ticket = play.remote(spec(tokens=10))
    play.hear(P, ChunkAnnounced("r", 1, sums(ticket, 10, last=1)), Like(VerifyBlocks))
    asked = play.last(VerifyBlocks).checks
    assert [(check.chain, check.tokens) for check in asked] == [(n, SIZE) for n in names(10)[:2]]
    play.verified()
    found = [marked(play)[pair.block] for pair in ticket.blocks]
    assert [(mark.chain, mark.checksum) for mark in found] == [(n, 7) for n in names(10)[:2]] + [
        (b"", 0)
    ]
    assert [mark.state for mark in found[:2]] == [BlockState.ANNOUNCED] * 2


def test_a_partly_filled_block_is_verified_under_its_own_name_and_has_none_in_the_metadata() -> (
    None
):
    """Its name is that of all tokens up to its last one, which no full block has."""
    play = Decode()
    ticket = play.remote(spec(tokens=6))
    play.complete(ticket, 6)
    assert play.last(VerifyBlocks).checks[-1].chain == names(6)[-1] not in names(8)
    play.verified(ADVANCED, STEP, run(0, 50))
    assert not marked(play)[ticket.blocks[1].block].chain


def test_a_block_that_steps_fill_gets_the_checksum_that_its_step_made() -> None:
    """Made in the engine's thread, for the blocks that are full when the step returns."""
    play = Decode()
    play.local(spec(tokens=6, max_tokens=4))
    step = play.last(RunStep)
    (check,) = step.seals[0]
    assert (check.logical, check.tokens, check.chain) == (0, SIZE, names(6)[0])
    play.feed(StepFinished(step.step, (Sampled(7),), ((99,),), 0.01), ADVANCED, STEP, run(0, 7))
    assert (marked(play)[check.block].chain, marked(play)[check.block].checksum) == (
        check.chain,
        99,
    )
    assert play.last(RunStep).seals == ((),)
    play.stepped((8,), STEP, run(1, 8))
    (check,) = play.last(RunStep).seals[0]
    assert (check.logical, check.chain) == (1, names(8)[1])


def _is_ticket(command: Send) -> bool:
    return isinstance(command.message, Ticket)


def test_blocks_of_a_cancelled_request_wait_for_their_writer() -> None:
    """(1) What prefill may still write to is given to nobody before it says that it stopped."""
    play = Decode(blocks=3)
    play.remote(spec(tokens=8, max_tokens=2))
    play.cancel("r", sent(P, TicketRevoked))
    assert play.states() == {"FREE": 1, "QUARANTINED": 2}
    refused = sent(R, WorkRefused, reason=Reason.NO_BLOCKS)
    play.reserve(spec("b", tokens=8, first=20, max_tokens=2), P, refused)
    play.hear(P, WriterStopped("r", 1))
    assert play.states() == {"FREE": 3}
    play.remote(spec("b", tokens=8, first=20, max_tokens=2), epoch=2)


def test_an_arena_full_of_quarantine_refuses_and_recovers() -> None:
    """(1) With every block in quarantine new work is refused, and taken once they are back."""
    play = Decode(blocks=4)
    play.remote(spec(tokens=15, max_tokens=1))
    play.cancel("r", sent(P, TicketRevoked))
    assert play.states() == {"QUARANTINED": 4}
    for epoch in (1, 2):
        refused = sent(R, WorkRefused, reason=Reason.NO_BLOCKS)
        play.reserve(spec("b", tokens=1, first=30), None, refused, epoch=epoch)
    play.hear(P, WriterStopped("r", 1))
    play.local(spec("b", tokens=1, first=30), epoch=3)


def test_blocks_of_a_dead_writer_come_back_when_the_kernel_shows_it() -> None:
    """(3) A lost link frees nothing; the writer's lock gone does."""
    play = Decode()
    play.remote(spec(tokens=6))
    failed = sent(R, WorkFailed, reason=Reason.WORKER_LOST, retryable=True)
    play.lose(P, failed, gone=True)
    assert play.used() == 2
    assert play.wait(0.06)[0] == ProbeWriter(P.incarnation)
    play.feed(WriterProbed(P.incarnation, alive=True))
    assert play.used() == 2
    assert play.wait(0.06) == [ProbeWriter(P.incarnation)]
    play.feed(WriterProbed(P.incarnation, alive=False))
    assert play.used() == 0
    assert play.wait(1.0) == []


def test_a_writer_that_comes_back_is_asked_to_stop_and_probed_no_more() -> None:
    """(3, 8) A frozen writer's blocks stay held; after its return it answers, and that ends it."""
    play = Decode()
    play.remote(spec(tokens=6))
    play.lose(P, sent(R, WorkFailed))
    play.map(P, Send(P, TicketRevoked("r", 1)))
    assert play.used() == 2
    play.hear(P, WriterStopped("r", 1))
    assert play.used() == 0
    play.wait(0.2)
    assert play.wait(5.0) == [], "nothing of it is held, and still its lock is looked at"


def test_a_late_proof_of_death_leaves_the_new_ticket_to_the_lost_link() -> None:
    """(3) A writer came back, got another ticket and died: its attempt ends, once, whichever
    news is first, the kernel's or the link's."""
    play = Decode()
    play.remote(spec("old", tokens=6))
    play.lose(P, sent(R, WorkFailed, request_id="old"))
    play.map(P, Send(P, TicketRevoked("old", 1)))
    play.remote(spec("r", tokens=6, first=20))
    play.wait(0.06)
    play.feed(WriterProbed(P.incarnation, alive=False))
    play.lose(P, sent(R, WorkFailed, request_id="r"), gone=True)
    play.wait(0.06)
    play.feed(WriterProbed(P.incarnation, alive=False))
    play.cancel("r")
    assert play.used() == 0


def test_a_failed_prefill_frees_its_blocks_and_is_told_at_once() -> None:
    """(5) Prefill's failure says too that it stores no more; decode makes no step for it."""
    play = Decode()
    play.remote(spec(tokens=6))
    failed = sent(R, WorkFailed, request_id="r", epoch=1, reason=Reason.PREFILL_ERROR)
    play.hear(P, PrefillFailed("r", 1, Reason.PREFILL_ERROR, "boom"), failed)
    assert play.used() == 0 and play.machine.scheduler.step == 0


def test_whether_another_attempt_makes_sense_is_passed_on() -> None:
    """(5) What prefill calls hopeless, decode does not call retryable."""
    play = Decode()
    play.remote(spec(tokens=6))
    failed = sent(R, WorkFailed, reason=Reason.PREFILL_ERROR, retryable=False)
    message = PrefillFailed("r", 1, Reason.PREFILL_ERROR, "NaN", retryable=False)
    play.hear(P, message, failed)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_block_read_by_two_tickets_is_free_after_both(order: tuple[int, int]) -> None:
    """(7) Holds are counted: a shared prefix leaves quarantine or cache after its last reader."""
    play = Decode(blocks=10, writers=(P, Q))
    play.local(spec("a", tokens=9, first=1, max_tokens=1))
    play.stepped((50,), Like(CallLedger), sent(G, TokenChunk))
    play.hear(G, RequestEnded("a", 1, CANCELLED))
    assert play.states() == {"FREE": 8, "CACHED": 2}
    tickets = [play.remote(spec("b", tokens=9), P), play.remote(spec("c", tokens=9), Q)]
    assert tickets[0].prefix == tickets[1].prefix and len(tickets[0].prefix) == 2
    play.cancel("b", sent(P, TicketRevoked))
    play.cancel("c", sent(Q, TicketRevoked))
    writers = [(P, "b"), (Q, "c")]
    play.hear(writers[order[0]][0], WriterStopped(writers[order[0]][1], 1))
    assert play.pool.available() == 10 - 2 - 1
    play.hear(writers[order[1]][0], WriterStopped(writers[order[1]][1], 1))
    play.hear(writers[order[1]][0], WriterStopped(writers[order[1]][1], 1))
    assert play.pool.available() == 10


def test_a_cancel_between_commit_and_verification_frees_once() -> None:
    """(9) After the commit the blocks are the owner's alone: a cancel frees them at once."""
    play = Decode()
    ticket = play.remote(spec(tokens=6))
    play.complete(ticket, 6)
    play.cancel("r")
    assert play.used() == 0
    play.verified()
    play.hear(P, WriterStopped("r", 1))
    assert play.used() == 0


def test_a_commit_that_crosses_its_revocation_is_the_writers_last_word() -> None:
    """(9) It says that nothing is stored any more, also if the link is lost right after it."""
    play = Decode()
    ticket = play.remote(spec(tokens=6))
    play.cancel("r", sent(P, TicketRevoked))
    play.hear(P, commit(ticket))
    assert play.used() == 0
    play.lose(P)
    assert play.used() == 0 and not play.machine.handover.tickets


def test_an_announcement_that_crosses_a_revocation_changes_nothing() -> None:
    """(9, 14) The late chunk of a cancelled prefill is not verified; its blocks come back once."""
    play = Decode()
    ticket = play.remote(spec(tokens=12))
    play.cancel("r", sent(P, TicketRevoked))
    play.hear(P, ChunkAnnounced("r", 1, sums(ticket, 12, last=1)))
    assert play.states()["QUARANTINED"] == 3
    play.hear(P, WriterStopped("r", 1))
    assert play.used() == 0


def test_a_writer_that_stops_unasked_ends_the_attempt() -> None:
    """(19) Cancelled over another link, prefill may stop before decode hears of the cancel."""
    play = Decode()
    play.remote(spec(tokens=6))
    play.hear(P, WriterStopped("r", 1), sent(R, WorkFailed, request_id="r", epoch=1))
    assert play.used() == 0
    play.cancel("r")
    assert play.used() == 0


def test_verified_blocks_of_a_failed_attempt_stay_cached() -> None:
    """(27) What verified is right whoever wrote it: the next attempt starts from it."""
    play = Decode()
    ticket = play.remote(spec(tokens=10))
    play.hear(P, ChunkAnnounced("r", 1, sums(ticket, 10, last=1)), Like(VerifyBlocks))
    play.verified()
    play.lose(P, sent(R, WorkFailed))
    play.feed(WriterProbed(P.incarnation, alive=False))
    assert play.states() == {"FREE": 6, "CACHED": 2}
    play.map(Q)
    again = play.remote(spec(tokens=10), Q, epoch=2)
    assert (again.cached_tokens, [pair.logical for pair in again.blocks]) == (8, [2])


def test_prompts_with_one_beginning_compute_it_once_though_they_come_together() -> None:
    """The second waits for its turn, and takes what the first has computed by then."""
    play = Decode(blocks=12, local_prefill_chunk_tokens=12)
    play.local(spec("a", tokens=12, max_tokens=1))
    reserved = sent(R, DecodeReserved, request_id="b", cached_tokens=0)
    play.reserve(spec("b", tokens=14, max_tokens=1), None, reserved)
    assert play.used() == 7
    play.stepped((50,), Like(CallLedger), STEP, sent(G, TokenChunk))
    (row,) = play.last(RunStep).rows
    assert (row.request_id, row.start, len(row.token_ids)) == ("b", 12, 2)
    assert play.used() == 4
    play.stepped((51,), Like(CallLedger), sent(G, TokenChunk))
    assert play.messages(TokenChunk)[-1].runs[0].cached_tokens == 12


def test_tickets_name_logical_blocks_and_destinations() -> None:
    """(27) With a cached prefix the pairs go on where it ends; positions mean nothing."""
    play = Decode(blocks=12)
    play.local(spec("a", tokens=9, max_tokens=1))
    play.stepped((50,), Like(CallLedger), sent(G, TokenChunk))
    ticket = play.remote(spec("r", tokens=13))
    assert [pair.logical for pair in ticket.prefix] == [0, 1]
    assert [pair.logical for pair in ticket.blocks] == [2, 3]
    assert ticket.cached_tokens == 8
    assert len({pair.block for pair in (*ticket.prefix, *ticket.blocks)}) == 4
    shorter = play.remote(spec("s", tokens=8))
    assert [pair.logical for pair in shorter.prefix] == [0], "the last token is always computed"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda each: BlockSum(9, each.generation, each.tokens, 7), "a block of nobody"),
        (lambda each: BlockSum(each.logical, 99, each.tokens, 7), "another generation"),
        (lambda each: BlockSum(each.logical, each.generation, 1, 7), "another length"),
    ],
)
def test_an_announcement_that_does_not_fit_its_ticket_ends_the_attempt(
    spoil: Any, why: str
) -> None:
    """Never guess: a sum for a block that the ticket does not say is an integrity failure."""
    play = Decode()
    ticket = play.remote(spec(tokens=8))
    wrong = tuple(spoil(each) for each in sums(ticket, 8))
    failed = sent(R, WorkFailed, reason=Reason.INTEGRITY)
    play.hear(P, ChunkAnnounced("r", 1, wrong[:1]), sent(P, TicketRevoked), failed)
    play.hear(P, WriterStopped("r", 1))
    assert play.used() == 0, why


def test_a_block_announced_twice_ends_the_attempt() -> None:
    """An announced block is never written again: a second sum for it is not believed."""
    play = Decode()
    ticket = play.remote(spec(tokens=12))
    play.hear(P, ChunkAnnounced("r", 1, sums(ticket, 12, last=0)), Like(VerifyBlocks))
    failed = sent(R, WorkFailed, reason=Reason.INTEGRITY)
    again = ChunkAnnounced("r", 1, sums(ticket, 12, last=0))
    play.hear(P, again, sent(P, TicketRevoked), failed)


def test_bytes_that_do_not_match_are_dropped_and_never_stepped_on() -> None:
    """A bad checksum ends the attempt as an integrity failure; good blocks stay."""
    play = Decode()
    ticket = play.remote(spec(tokens=10))
    play.complete(ticket, 10)
    play.verified(sent(R, WorkFailed, reason=Reason.INTEGRITY), bad=(1,))
    assert play.states() == {"FREE": 7, "CACHED": 1}
    assert play.machine.scheduler.step == 0


def test_a_commit_that_leaves_blocks_out_is_refused() -> None:
    """A commit is complete or it is wrong."""
    play = Decode()
    ticket = play.remote(spec(tokens=10))
    failed = sent(R, WorkFailed, reason=Reason.INTEGRITY)
    play.hear(P, ChunkAnnounced("r", 1, sums(ticket, 10, first=1)), Like(VerifyBlocks))
    play.hear(P, commit(ticket), failed)
    assert play.used() == 0


def test_messages_of_another_writer_or_epoch_change_nothing() -> None:
    """A ticket is one writer's and one epoch's."""
    play = Decode(writers=(P, Q))
    ticket = play.remote(spec(tokens=6), epoch=2)
    stale = PrefillCommitted("r", 1, 50)
    play.hear(P, stale)
    play.hear(Q, commit(ticket))
    play.hear(Q, WriterStopped("r", 2))
    play.hear(Q, PrefillFailed("r", 2, Reason.PREFILL_ERROR))
    play.hear(P, PrefillFailed("r", 1, Reason.PREFILL_ERROR))
    assert play.states()["FILLING"] == 2
    play.complete(ticket, 6)


def test_a_writer_gets_tickets_only_after_its_lock_was_seen() -> None:
    """Its word that it locked is not enough: otherwise its death could never be proven."""
    play = Decode(writers=())
    play.up(P, Role.PREFILL, Send(P, ArenaOffered(ARENA)))
    refused = sent(R, WorkRefused, reason=Reason.NO_LINK)
    play.reserve(spec(), P, refused)
    play.hear(P, ArenaMapped("f"), ProbeWriter(P.incarnation))
    play.reserve(spec(), P, refused)
    play.feed(WriterProbed(P.incarnation, alive=False))
    play.reserve(spec(), P, refused)


# --- epochs -------------------------------------------------------------------------------------


def test_a_lower_epoch_is_refused_and_the_same_one_is_a_repetition() -> None:
    """A sequence is never started twice, nor moved back."""
    play = Decode()
    play.local(spec(), epoch=3)
    play.reserve(spec(), None, epoch=3)
    refused = sent(R, WorkRefused, epoch=2, reason=Reason.STALE_EPOCH)
    play.reserve(spec(), None, refused, epoch=2)
    play.cancel("r", epoch=2)
    assert "r" in play.machine.state.sequences


def test_an_attempt_that_is_not_given_back_yet_is_not_begun_again() -> None:
    """A ledger that lost its last writes has one attempt placed twice: what its writer may still
    store into belongs to the first time, and comes back once."""
    play = Decode()
    play.remote(spec())
    play.cancel("r", sent(P, TicketRevoked))
    refused = sent(R, WorkRefused, epoch=1, reason=Reason.STALE_EPOCH)
    play.reserve(spec(), P, refused)
    play.hear(P, WriterStopped("r", 1))
    assert play.used() == 0
    play.remote(spec())


def test_a_higher_epoch_replaces_what_is_here_in_mid_step() -> None:
    """(16) The old attempt's blocks stay pinned by its step; its result goes nowhere."""
    play = Decode()
    play.local(spec(tokens=6))
    reserved = sent(R, DecodeReserved, epoch=2)
    play.reserve(spec(tokens=6), None, reserved, epoch=2, output=ids(50))
    assert play.states()["RESIDENT"] == 4
    play.stepped((50,), STEP)
    assert play.states()["RESIDENT"] == 2
    play.stepped((51,), Like(CallLedger), STEP, run(1, 51, epoch=2))


def test_forced_ids_are_continued_and_never_sent_again() -> None:
    """A new attempt goes on behind the ids that the client has."""
    play = Decode()
    play.local(spec(tokens=3, max_tokens=4), epoch=2, output=ids(50, 51))
    row = play.last(RunStep).rows[0]
    assert row.token_ids.tolist() == [1, 2, 3, 50, 51]
    assert row.sample is not None and (row.sample.index, list(row.sample.output)) == (2, [50, 51])
    play.stepped((52,), Like(CallLedger), STEP, run(2, 52, epoch=2))
    play.stepped((53,), run(3, 53, epoch=2, finish=FinishReason.LENGTH))


@pytest.mark.parametrize("prefill", [None, P])
@pytest.mark.parametrize(
    ("output", "finish"),
    [
        (ids(50, 51, 52), FinishReason.LENGTH),
        (ids(50, 51, 52, 53, 54), FinishReason.LENGTH),
        (ids(50, EOS), FinishReason.STOP),
    ],
)
def test_forced_ids_that_are_the_whole_answer_end_it(
    prefill: Peer | None, output: bytes, finish: FinishReason
) -> None:
    """(31) Nothing is computed, and the gateway hears why it is complete."""
    play = Decode()
    count = len(output) // 4
    reserved = sent(R, DecodeReserved, epoch=2)
    ended = run(count, epoch=2, finish=finish)
    request_spec = spec(tokens=3, max_tokens=3)
    play.reserve(request_spec, prefill, reserved, ended, epoch=2, output=output)
    assert play.used() == 0 and play.machine.scheduler.step == 0
    play.hear(G, RequestEnded("r", 2, Outcome(Ending.COMPLETED)))
    assert not play.machine.state.sequences


# --- ends of generation ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("way", ["local", "remote"])
def test_exactly_max_tokens_are_generated(count: int, way: str) -> None:
    """(31) For one token a remote prompt needs no step at all."""
    play = Decode()
    request_spec = spec(tokens=6, max_tokens=count)
    length = FinishReason.LENGTH
    if way == "remote":
        ticket = play.remote(request_spec)
        play.complete(ticket, 6)
        steps = (STEP,) if count > 1 else ()
        play.verified(ADVANCED, *steps, run(0, 50, finish=None if count > 1 else length))
    else:
        play.local(request_spec)
        steps = (STEP,) if count > 1 else ()
        play.stepped((50,), ADVANCED, *steps, run(0, 50, finish=None if count > 1 else length))
    for index in range(1, count):
        last = index + 1 == count
        more = () if last else (STEP,)
        play.stepped((50 + index,), *more, run(index, 50 + index, finish=length if last else None))
    assert play.machine.scheduler.step == count - (way == "remote")
    assert play.used() == 0


def test_a_first_token_that_is_a_stop_token_ends_the_request() -> None:
    """(30) The stop rules apply to prefill's token as to every other; decode makes no step."""
    play = Decode()
    ticket = play.remote(spec(tokens=6))
    play.complete(ticket, 6, first_id=EOS)
    play.verified(ADVANCED, run(0, EOS, finish=FinishReason.STOP))
    assert play.machine.scheduler.step == 0 and play.used() == 0


def test_the_end_at_the_first_token_may_overtake_the_commit() -> None:
    """(30) The gateway has it from prefill already: the blocks come back when prefill stopped."""
    play = Decode()
    ticket = play.remote(spec(tokens=6))
    play.hear(G, RequestEnded("r", 1, Outcome(Ending.COMPLETED)), sent(P, TicketRevoked))
    play.hear(P, commit(ticket, first_id=EOS))
    assert play.used() == 0
    play.hear(P, WriterStopped("r", 1))


def test_the_clients_parameters_reach_the_sampler_unchanged() -> None:
    """(33) Minimum tokens and stop ids are the request's own in every stage."""
    play = Decode()
    request_spec = spec(tokens=6, min_tokens=5)
    play.local(request_spec)
    sample = play.last(RunStep).rows[0].sample
    assert sample is not None and sample.params == request_spec.sampling


def test_a_finished_sequence_is_kept_until_its_gateway_said_how_it_ended() -> None:
    """The last tokens can be asked for again; blocks are not kept for that."""
    play = Decode()
    play.local(spec(tokens=3, max_tokens=2))
    play.stepped((50,), ADVANCED, STEP, run(0, 50))
    play.stepped((51,), run(1, 51, finish=FinishReason.LENGTH))
    assert play.used() == 0
    play.hear(G, TokensWanted("r", 1, 0), run(0, 50, 51, finish=FinishReason.LENGTH))
    play.hear(G, TokensWanted("r", 2, 0))
    play.hear(R, TokensWanted("r", 1, 0))
    play.hear(G, RequestEnded("r", 1, Outcome(Ending.COMPLETED)))
    assert not play.machine.state.sequences


def test_a_resent_beginning_says_again_what_was_cached() -> None:
    """The gateway takes the number of cached tokens from whatever brings index 0."""
    play = Decode(blocks=12)
    play.local(spec("a", tokens=9, max_tokens=1))
    play.stepped((50,), ADVANCED, sent(G, TokenChunk))
    play.local(spec(tokens=9))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    play.hear(G, TokensWanted("r", 1, 0), sent(G, TokenChunk))
    first, again = play.messages(TokenChunk)[-2:]
    assert first.runs[0].cached_tokens == again.runs[0].cached_tokens == 8


def test_a_finished_sequence_whose_gateway_never_speaks_is_dropped_in_the_end() -> None:
    """Nothing is kept for ever."""
    play = Decode()
    play.local(spec(tokens=3, max_tokens=1))
    play.stepped((50,), ADVANCED, sent(G, TokenChunk))
    play.wait(59.0)
    assert "r" in play.machine.state.sequences
    play.wait(2.0)
    assert not play.machine.state.sequences


# --- cancel -------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["router", "gateway"])
@pytest.mark.parametrize(
    "stage", ["remote", "announced", "committed", "local", "between", "step", "finished"]
)
def test_a_cancel_has_effect_in_every_stage(stage: str, by: str) -> None:
    """(19) Whoever says it and whenever: every block is back as soon as nothing touches it."""
    play = Decode()
    writing = stage in ("remote", "announced")
    if writing or stage == "committed":
        ticket = play.remote(spec(tokens=6, max_tokens=1 if stage == "finished" else 10))
        if stage == "announced":
            announced = ChunkAnnounced("r", 1, sums(ticket, 6, last=0))
            play.hear(P, announced, Like(VerifyBlocks))
        if stage == "committed":
            play.complete(ticket, 6)
    else:
        play.local(spec(tokens=6, max_tokens=1 if stage == "finished" else 10))
        if stage in ("step", "finished"):
            more = (STEP,) if stage == "step" else ()
            play.stepped((50,), ADVANCED, *more, sent(G, TokenChunk))
    said = (sent(P, TicketRevoked),) if writing else ()
    if by == "router":
        play.cancel("r", *said)
        play.cancel("r")
    else:
        play.hear(G, RequestEnded("r", 1, CANCELLED), *said)
        play.hear(G, RequestEnded("r", 1, CANCELLED))
    assert not play.machine.state.sequences
    if writing:
        play.hear(P, WriterStopped("r", 1))
    elif play.machine.scheduler.step_since is not None:
        assert play.states()["RESIDENT"] == 2, "the step still uses them"
        play.stepped((50,))
    assert play.used() == 0


def test_blocks_of_a_step_are_free_only_when_it_returned() -> None:
    """(16) A request that ends in mid step gives nothing to the one admitted meanwhile."""
    play = Decode(blocks=4)
    play.local(spec("a", tokens=8, max_tokens=4))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    play.cancel("a")
    refused = sent(R, WorkRefused, reason=Reason.NO_BLOCKS)
    play.reserve(spec("b", tokens=12, first=20, max_tokens=4), None, refused)
    play.stepped((51,))
    play.local(spec("b", tokens=12, first=20, max_tokens=4), epoch=2)


# --- memory -------------------------------------------------------------------------------------


def test_growth_is_counted_at_admission() -> None:
    """(57) A request is taken in only if the blocks for its growth are free as well."""
    play = Decode(blocks=4)
    play.local(spec("a", tokens=8, max_tokens=8))
    refused = sent(R, WorkRefused, reason=Reason.NO_BLOCKS)
    play.reserve(spec("b", tokens=8, first=20, max_tokens=8), None, refused)
    reserved = sent(R, DecodeReserved)
    play.reserve(spec("b", tokens=7, first=20, max_tokens=1), None, reserved, epoch=2)


def test_what_can_never_fit_is_refused_at_once() -> None:
    """(57) Prompt and answer larger than the arena: no waiting would help."""
    play = Decode(blocks=4)
    refused = sent(R, WorkRefused, reason=Reason.TOO_LONG)
    play.reserve(spec(tokens=8, max_tokens=9), None, refused)


def test_the_youngest_gives_way_and_is_computed_again_here() -> None:
    """(17) After a pre-emption nothing waits for a hand-over that nobody sends."""
    play = Decode(blocks=5, growth_tokens=0)
    play.local(spec("a", tokens=7, max_tokens=9))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    reserved = sent(R, DecodeReserved, request_id="b")
    play.reserve(spec("b", tokens=11, first=20, max_tokens=4), None, reserved)
    play.stepped((51,), STEP, sent(G, TokenChunk))
    assert {row.request_id for row in play.last(RunStep).rows} == {"a"}
    assert play.machine.scheduler.preemptions == 1
    tickets = play.messages(Ticket)
    for token in range(52, 57):
        play.stepped((token,), STEP, sent(G, TokenChunk))
    play.stepped((57,), STEP, sent(G, TokenChunk))
    play.stepped((58,), STEP, sent(G, TokenChunk))
    assert {row.request_id for row in play.last(RunStep).rows} == {"b"}
    assert play.messages(Ticket) == tickets == []


def test_a_pre_empted_prompt_goes_on_behind_what_is_still_cached() -> None:
    """(17) Also where the cache holds more of it than one chunk."""
    play = Decode(blocks=8, growth_tokens=0, local_prefill_chunk_tokens=4)
    play.local(spec("a", tokens=4, max_tokens=12))
    play.reserve(spec("b", tokens=23, first=20, max_tokens=1), None, sent(R, DecodeReserved))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    for token in (51, 52, 53):
        play.stepped((token, None), STEP, sent(G, TokenChunk))
    assert play.machine.scheduler.preemptions == 0
    play.stepped((54, None), STEP, sent(G, TokenChunk))
    assert play.machine.scheduler.preemptions == 1
    row = play.last(RunStep).rows[1]
    assert (row.request_id, row.start, len(row.token_ids)) == ("b", 16, 4)


def test_several_short_prompts_share_one_chunk_oldest_first() -> None:
    """What is placed again needs a few tokens each: nobody waits a step for each of the others."""
    play = Decode(blocks=12, growth_tokens=0, local_prefill_chunk_tokens=6)
    play.local(spec("a", tokens=2, max_tokens=9))
    for name, tokens in (("b", 3), ("c", 2), ("d", 4), ("e", 1)):
        reserved = sent(R, DecodeReserved)
        play.reserve(spec(name, tokens=tokens, first=20 + 10 * tokens), None, reserved)
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    rows = play.last(RunStep).rows
    assert [(row.request_id, len(row.token_ids)) for row in rows] == [
        *(("a", 1), ("b", 3), ("c", 2), ("d", 1)),
    ]
    assert [row.sample is not None for row in rows] == [True, True, True, False]
    tokens = (51, 60, 70, None)
    play.stepped(tokens, ADVANCED, ADVANCED, STEP, sent(G, TokenChunk))
    rows = play.last(RunStep).rows
    assert [(row.request_id, len(row.token_ids)) for row in rows] == [
        *(("a", 1), ("b", 1), ("c", 1), ("d", 3), ("e", 1)),
    ]


def test_what_is_said_to_be_here_is_not_computed_again_beyond_a_limit() -> None:
    """Decode computes a rest, prefill a prompt: with too much missing the placement is refused."""
    play = Decode(local_rest_tokens=4)
    refused = sent(R, WorkRefused, reason=Reason.KV_MISSING)
    play.reserve(spec("r", tokens=9, max_tokens=2), None, refused, source="decode-0")
    assert play.used() == 0
    play.local(spec("a", tokens=9, max_tokens=1))
    play.stepped((50,), ADVANCED, sent(G, TokenChunk))
    play.local(spec("r", tokens=9, max_tokens=2), epoch=2, source="decode-0")
    row = play.last(RunStep).rows[0]
    assert (row.start, len(row.token_ids)) == (8, 1)


def test_nothing_new_is_taken_in_while_somebody_waits_for_memory() -> None:
    """(60) A pre-empted sequence is not starved by small newcomers."""
    play = Decode(blocks=5, growth_tokens=0)
    play.local(spec("a", tokens=7, max_tokens=9))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    play.reserve(spec("b", tokens=11, first=20, max_tokens=4), None, sent(R, DecodeReserved))
    play.stepped((51,), STEP, sent(G, TokenChunk))
    assert play.machine.scheduler.waiting()
    refused = sent(R, WorkRefused, reason=Reason.NO_BLOCKS)
    play.reserve(spec("c", tokens=1, first=40), None, refused)


def test_a_waiting_hand_over_gives_its_blocks_back_to_a_running_request() -> None:
    """(59) The ticket is taken back first; the blocks come when its writer stopped."""
    play = Decode(blocks=4, growth_tokens=0)
    play.local(spec("a", tokens=7, max_tokens=9))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    play.remote(spec("b", tokens=8, first=20, max_tokens=8))
    failed = sent(R, WorkFailed, request_id="b", reason=Reason.NO_BLOCKS)
    play.stepped((51,), sent(P, TicketRevoked), failed, sent(G, TokenChunk))
    play.hear(P, WriterStopped("b", 1), STEP)


def test_a_writer_that_does_not_answer_does_not_protect_the_others_blocks() -> None:
    """(59) Blocks that wait for an unreachable writer are not what a running request waits for."""
    play = Decode(blocks=6, growth_tokens=0, writers=(P, Q))
    play.local(spec("a", tokens=7, max_tokens=9))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    play.remote(spec("b", tokens=8, first=20, max_tokens=8), P)
    play.lose(P, sent(R, WorkFailed, request_id="b"))
    play.remote(spec("c", tokens=8, first=40, max_tokens=8), Q)
    failed = sent(R, WorkFailed, request_id="c", reason=Reason.NO_BLOCKS)
    play.stepped((51,), sent(Q, TicketRevoked), failed, sent(G, TokenChunk))
    play.hear(Q, WriterStopped("c", 1), STEP)


def test_more_than_the_batch_wait_for_a_place_in_order() -> None:
    """Sequences beyond the batch's limit take part when older ones have ended."""
    play = Decode(blocks=12, growth_tokens=0, batch_sequences_max=1)
    play.local(spec("a", tokens=2, max_tokens=3))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    play.reserve(spec("b", tokens=2, first=20, max_tokens=3), None, sent(R, DecodeReserved))
    play.stepped((51,), STEP, sent(G, TokenChunk))
    assert {row.request_id for row in play.last(RunStep).rows} == {"a", "b"}
    play.stepped((52, 60), ADVANCED, STEP, sent(G, TokenChunk))
    assert {row.request_id for row in play.last(RunStep).rows} == {"b"}


def test_reservations_are_bounded() -> None:
    """More sequences than ``reservations_max`` are refused as a full queue."""
    play = Decode(reservations_max=1)
    play.local(spec("a", tokens=2))
    play.reserve(spec("b", tokens=2), None, sent(R, WorkRefused, reason=Reason.QUEUE_FULL))


def test_only_the_blamed_rows_of_a_failed_step_end() -> None:
    """The others are stepped again, in place."""
    play = Decode(growth_tokens=0)
    play.local(spec("a", tokens=2, max_tokens=3))
    play.reserve(spec("b", tokens=2, first=20), None, sent(R, DecodeReserved))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    step = play.last(RunStep)
    failed = sent(R, WorkFailed, request_id="b", reason=Reason.DECODE_ERROR, retryable=False)
    play.feed(StepFailed(step.step, ("b",), "NaN", retryable=False), failed, STEP)
    assert [row.request_id for row in play.last(RunStep).rows] == ["a"]
    assert play.last(RunStep).rows[0].start == step.rows[0].start


# --- life ---------------------------------------------------------------------------------------


def test_who_is_handed_over_is_told_apart_from_who_is_computed_here() -> None:
    """Both wait; routers shorten what they expect of chunks for the one that joins."""
    play = Decode()
    play.remote(spec("a"))
    play.local(spec("b", first=60))
    play.wait(0.1)
    told = play.messages(WorkerStatus)[-1]
    assert (told.waiting, told.joining) == (2, 1)


def test_a_request_that_came_and_went_between_two_statuses_is_told() -> None:
    """The router counts its blocks until the next status, which must not wait for the beat."""
    play = Decode()
    for request_id in ("a", "b"):
        told = len(play.messages(WorkerStatus))
        play.local(spec(request_id, tokens=2, max_tokens=1))
        play.stepped((50,), Like(CallLedger), sent(G, TokenChunk))
        play.hear(G, RequestEnded(request_id, 1, Outcome(Ending.COMPLETED)))
        play.wait(0.06)
        assert len(play.messages(WorkerStatus)) > told
        assert play.messages(WorkerStatus)[-1].running == 0


def test_a_suspect_worker_takes_nothing_new_and_goes_on_with_what_it_has() -> None:
    """A lease permits new work and transitions; stepping is safe without one."""
    play = Decode()
    play.local(spec("r", tokens=2, max_tokens=3))
    play.feed(LeaseChanged(LeaseState.SUSPECT))
    play.reserve(spec("b", tokens=2), None, sent(R, WorkRefused, reason=Reason.SUSPECT))
    play.stepped((50,), STEP, run(0, 50))
    assert play.messages(WorkerStatus)[-1].accepting is False


def test_a_draining_worker_finishes_what_it_has_and_exits() -> None:
    """Nothing new; code 0 when the last block is back."""
    play = Decode()
    play.local(spec("r", tokens=2, max_tokens=1))
    play.feed(DrainRequested(), sent(R, MoveOffered, request_id="r"))
    play.reserve(spec("b", tokens=2), None, sent(R, WorkRefused, reason=Reason.DRAINING))
    play.stepped((50,), ADVANCED, sent(G, TokenChunk))
    play.hear(G, RequestEnded("r", 1, Outcome(Ending.COMPLETED)), Exit(0, "drained"))
    play.feed(DrainRequested())


def test_a_restart_ends_between_two_steps_and_leaves_everything_as_it_is() -> None:
    """What the step in flight brings is sent; then the successor goes on."""
    play = Decode()
    play.local(spec("r", tokens=2, max_tokens=9))
    play.feed(RestartRequested())
    play.reserve(spec("b", tokens=2), None, sent(R, WorkRefused, reason=Reason.DRAINING))
    play.stepped((50,), ADVANCED, sent(G, TokenChunk), Exit(EXIT_RESTART, "restart"))
    assert play.machine.leaving and "r" in play.machine.state.sequences
    assert play.last(RecordStep).attempts == (), "nobody is to blame for a restart"


def test_an_idle_worker_restarts_at_once() -> None:
    """Nothing runs: nothing is waited for."""
    play = Decode()
    play.feed(RestartRequested(), Exit(EXIT_RESTART, "restart"))


@pytest.mark.parametrize("stage", ["remote", "revoked", "local", "finished"])
def test_a_drain_ends_in_time_in_every_state(stage: str) -> None:
    """What still runs at ``drain_ms`` fails as draining, so that the router places it elsewhere;
    a writer that does not answer holds nobody up: the memory ends with the process."""
    play = Decode(drain_ms=1_000)
    if stage in ("remote", "revoked"):
        play.remote(spec("r", tokens=6))
    else:
        play.local(spec("r", tokens=6, max_tokens=1))
    if stage == "revoked":
        play.cancel("r", sent(P, TicketRevoked))
    if stage == "finished":
        play.stepped((50,), ADVANCED, sent(G, TokenChunk))
    play.do(DrainRequested())
    assert play.wait(0.9) == []
    said = play.wait(0.3)
    assert said[-1] == Exit(0, "drained")
    failed = sent(R, WorkFailed, request_id="r", reason=Reason.DRAINING)
    told = any(failed.matches(each) for each in said)
    assert told == (stage in ("remote", "local"))


def test_a_hung_step_ends_the_process() -> None:
    """Peers and the lease cannot help a process whose engine does not return."""
    play = Decode()
    play.local(spec())
    play.wait(29.0)
    assert not any(isinstance(each, Exit) for each in play.all)
    play.now += 2.0
    play.feed(TimePassed(), Like(Exit, code=75))


def test_a_gateway_that_is_over_is_ended_for() -> None:
    """Its requests are cancelled in the ledger by their owner, and every block comes back."""
    play = Decode()
    play.local(spec())
    ended = Like(CallLedger, op=Like(EndRequest, request_id="r", outcome=Like(Outcome)))
    play.lose(G, ended, gone=True)
    play.stepped((50,))
    assert play.used() == 0


def test_a_gateway_out_of_reach_makes_the_attempt_fail() -> None:
    """Tokens sent on the lost link may be lost: the router asks the gateway what it holds."""
    play = Decode()
    play.local(spec())
    play.lose(G, sent(R, WorkFailed, reason=Reason.NO_LINK))
    play.up(G, Role.GATEWAY)
    play.stepped((50,))
    play.local(spec(), epoch=2)


def test_a_failure_without_a_router_is_told_to_the_one_that_adopts() -> None:
    """Nobody is there to place it again; whoever comes asks for the attempt and hears the end."""
    play = Decode()
    play.remote(spec())
    play.lose(R, gone=True)
    play.lose(P, gone=True)
    play.up(R1, Role.ROUTER)
    unknown = sent(R1, WorkFailed, request_id="r", epoch=1, reason=Reason.UNKNOWN_ATTEMPT)
    play.hear(R1, WorkAdopted("r", 1, 2, G), unknown)


def test_an_adopted_attempt_runs_on_and_reports_to_its_new_router() -> None:
    """Nothing of it changes; only the new router may cancel it from then on."""
    play = Decode()
    play.local(spec())
    play.up(R1, Role.ROUTER)
    play.hear(R1, WorkAdopted("r", 1, 2, G), sent(R1, DecodeReserved, request_id="r", epoch=1))
    play.hear(R, CancelWork("r", 1, Reason.SUPERSEDED, 1))
    play.hear(R, WorkAdopted("r", 1, 1, G))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    failed = sent(R1, WorkFailed, request_id="r", reason=Reason.NO_LINK)
    play.lose(G, failed)


def test_a_router_of_a_higher_turn_may_cancel_before_it_has_said_that_it_adopts() -> None:
    """Its cancel is newer than whatever this worker heard."""
    play = Decode()
    play.local(spec())
    play.up(R1, Role.ROUTER)
    play.hear(R1, CancelWork("r", 1, Reason.SUPERSEDED, 2))
    assert not play.machine.state.sequences
    play.stepped((50,))


def test_an_attempt_of_a_later_epoch_is_not_adopted_by_an_older_word() -> None:
    """The asking router is behind: it hears of that from the ledger."""
    play = Decode()
    play.local(spec(), epoch=3)
    play.hear(R1, WorkAdopted("r", 2, 5, G))
    assert play.machine.state.sequences["r"].router == R


def test_a_suspect_is_stepped_alone_in_turn_with_all_others() -> None:
    """(9) Should it end this worker, nobody else is blamed; nobody waits more than one step."""
    play = Decode(blocks=16)
    play.local(spec("a", first=1))
    for name, first, alone in (("b", 11, False), ("s", 21, True), ("t", 31, True)):
        reserved = sent(R, DecodeReserved, request_id=name)
        play.reserve(spec(name, first=first), None, reserved, alone=alone)
    names = []
    for _ in range(7):
        step = play.last(RunStep)
        names.append("".join(row.request_id for row in step.rows))
        record = play.last(RecordStep)
        assert [each.request_id for each in record.attempts] == list(names[-1])
        results = tuple(Sampled(50) for _ in step.rows)
        sums = tuple((7,) * len(seals) for seals in step.seals)
        play.do(StepFinished(step.step, results, sums, 0.01))
    assert names == ["a", "s", "ab", "t", "ab", "s", "ab"]


def test_the_record_names_nobody_when_no_step_runs() -> None:
    """A worker that is killed while it idles blames nobody."""
    play = Decode()
    play.local(spec(max_tokens=1))
    assert play.last(RecordStep).attempts == (AttemptId("r", 1),)
    play.stepped((50,), ADVANCED, sent(G, TokenChunk))
    assert play.last(RecordStep).attempts == ()


def test_a_successor_tells_every_router_whose_step_its_former_self_left() -> None:
    """Before anything else it says on that link."""
    left = LastStep(Peer("decode-0", 99), (AttemptId("x", 3),))
    play = Decode(left=left)
    assert play.messages(LastStep, R) == [left]
    play.up(R1, Role.ROUTER, Send(R1, left))


def test_a_message_that_fits_nothing_is_counted_and_dropped() -> None:
    """(12) Unknown ids and foreign messages change nothing."""
    play = Decode()
    play.hear(R, WorkRefused("x", 1, Reason.INTERNAL))
    play.hear(P, WriterStopped("x", 1))
    play.hear(P, PrefillFailed("x", 1, Reason.INTERNAL))
    play.hear(P, ChunkAnnounced("x", 1, ()))
    play.hear(R, CancelWork("x", 1, Reason.INTERNAL))
    play.hear(G, TokensWanted("x", 1, 0))
