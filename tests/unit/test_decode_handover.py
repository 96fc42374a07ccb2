"""Conversations with the decode machine about a hand-over, from the ticket to the running sequence.

Numbers in brackets are entries of the failure list.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.ids import Role
from baton.core.lifecycles import BlockState
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
from baton.ports.driving import CallLedger, Measure, Send
from baton.ports.engine import Sampled
from baton.wire.handover import (
    ArenaMapped,
    ArenaOffered,
    BlockSum,
    ChunkAnnounced,
    PrefillCommitted,
    PrefillFailed,
    Ticket,
    TicketRevoked,
    WriterStopped,
)
from baton.wire.messages import (
    CancelWork,
    DecodeReserved,
    RequestEnded,
    TokenChunk,
    WorkFailed,
    WorkRefused,
)
from support.decode_parts import (
    ADVANCED,
    ARENA,
    CANCELLED,
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


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_block_of_a_writer_and_a_reader_is_free_after_both(
    order: tuple[int, int],
) -> None:
    """(7) Its writer still stores for the same prompt, a second one has it as a prefix, and both
    attempts are over: whoever stops last gives it back, once."""
    play = Decode(blocks=10, writers=(P, Q))
    wrote = play.remote(spec("a", tokens=9, first=1), P)
    announced = ChunkAnnounced("a", 1, sums(wrote, 9, last=0))
    play.hear(P, announced, Like(VerifyBlocks, request_id="a"))
    play.verified()
    play.cancel("a", sent(P, TicketRevoked))
    reads = play.remote(spec("b", tokens=9, first=1), Q)
    assert [pair.block for pair in reads.prefix] == [wrote.blocks[0].block]
    play.cancel("b", sent(Q, TicketRevoked))
    stops = [(P, WriterStopped("a", 1)), (Q, WriterStopped("b", 1))]
    play.hear(*stops[order[0]])
    assert play.pool.available() == 10 - 3
    play.hear(*stops[order[1]])
    play.hear(*stops[order[0]])
    assert play.pool.available() == 10
    assert play.states() == {"FREE": 9, "CACHED": 1}


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
    assert play.measured("integrity_failures_total") == 1


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
    play.verified(sent(R, WorkFailed, reason=Reason.INTEGRITY), bad=(1, 2))
    assert play.states() == {"FREE": 7, "CACHED": 1}
    assert play.machine.scheduler.step == 0
    assert play.measured("integrity_failures_total") == 2


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


def _joins_beside_a_step(play: Decode, name: str = "r", **fields: Any) -> None:
    """A request is handed over while a step of another one runs."""
    if not play.machine.state.in_flight:
        play.local(spec("a", tokens=4, max_tokens=9))
    play.complete(play.remote(spec(name, tokens=10, first=40, **fields)), 10)


def _said(play: Decode) -> list[tuple[str, int, tuple[int, ...]]]:
    chunks = play.messages(TokenChunk, G)
    return [(run.request_id, run.index, run.ids) for chunk in chunks for run in chunk.runs]


def test_the_first_token_comes_with_those_of_the_step_in_flight() -> None:
    """The second one takes a step of its own after that: as long as every later one."""
    play = Decode()
    _joins_beside_a_step(play, max_tokens=3)
    play.verified(ADVANCED)
    assert _said(play) == []
    play.stepped((60,), ADVANCED, STEP, sent(G, TokenChunk))
    assert _said(play) == [("a", 0, (60,)), ("r", 0, (50,))]
    assert [row.request_id for row in play.last(RunStep).rows] == ["a", "r"]


def test_a_first_token_that_is_the_whole_answer_comes_at_once() -> None:
    """So does one beside which no step runs."""
    play = Decode()
    _joins_beside_a_step(play, max_tokens=1)
    play.verified(ADVANCED, run(0, 50, finish=FinishReason.LENGTH))
    alone = Decode()
    alone.complete(alone.remote(spec(tokens=10, max_tokens=3)), 10)
    alone.verified(ADVANCED, STEP, run(0, 50))


def test_a_first_token_that_was_kept_is_told_though_the_step_fails() -> None:
    """What failed is another request's."""
    play = Decode()
    _joins_beside_a_step(play, max_tokens=3)
    play.verified(ADVANCED)
    play.do(StepFailed(play.last(RunStep).step, ("a",), "out of memory", retryable=True))
    assert _said(play) == [("r", 0, (50,))]


def test_a_request_cancelled_before_its_first_token_was_told_says_nothing() -> None:
    """Its client is gone."""
    play = Decode()
    _joins_beside_a_step(play, max_tokens=3)
    play.verified(ADVANCED)
    play.do_hear(R, CancelWork("r", 1, Reason.CLIENT_CANCELLED))
    play.stepped((60,), ADVANCED, STEP, sent(G, TokenChunk))
    assert _said(play) == [("a", 0, (60,))]
