"""Conversations with the decode machine about blocks: who has them, who waits, who gives way.

Numbers in brackets are entries of the failure list.
"""

from __future__ import annotations

from baton.core.outcomes import Reason
from baton.decode.io import RunStep
from baton.wire.handover import Ticket, TicketRevoked, WriterStopped
from baton.wire.messages import DecodeReserved, TokenChunk, WorkFailed, WorkRefused
from support.decode_parts import ADVANCED, STEP, Decode, G, P, Q, R, spec
from support.machine_playbook import sent


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
