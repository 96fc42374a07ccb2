"""Conversations with a decode machine that has a dead incarnation's arena."""

from __future__ import annotations

from baton.core.ids import Peer, Role
from baton.core.lifecycles import BlockState
from baton.core.outcomes import Reason
from baton.core.prefix import chain_of
from baton.decode.io import MarkBlocks, ProbeWriter, RunStep, WriterProbed
from baton.decode.takeover import TakenOver, rebuild
from baton.ports.channel import BlockMark
from baton.ports.driving import Send
from baton.wire.handover import ArenaMapped, ArenaOffered
from baton.wire.messages import WorkRefused
from support.decode_parts import ADVANCED, ARENA, SIZE, STEP, Decode, P, Q, R, run, spec
from support.machine_playbook import ids, sent


def taken_over(*, tokens: int = 0, filling: int = 0, writer: Peer = P) -> TakenOver:
    """Return eight blocks: the first have ``tokens`` tokens, ``filling`` more are ``writer``'s."""
    names = chain_of(b"root", ids(*range(1, tokens + 1)), SIZE)
    marks = [
        BlockMark(number, BlockState.RESIDENT, 3, chain=name, checksum=9)
        for number, name in enumerate(names)
    ]
    first = len(marks)
    for number in range(first, 8):
        state = BlockState.FILLING if number < first + filling else BlockState.FREE
        marks.append(BlockMark(number, state, 3, epoch=1, writer=writer.incarnation))
    return rebuild(Peer("decode-0", 0), marks, range(first), {writer.incarnation})


def test_the_metadata_is_stored_again_before_anything_is_sent() -> None:
    """Nobody sees the former owner's records together with a word of the new one."""
    play = Decode(writers=(), found=taken_over(tokens=8, filling=2))
    first = next(i for i, c in enumerate(play.all) if isinstance(c, MarkBlocks))
    assert not any(isinstance(each, Send) for each in play.all[:first])
    marks = [m for c in play.all if isinstance(c, MarkBlocks) for m in c.marks]
    states = [BlockState.CACHED] * 2 + [BlockState.QUARANTINED] * 2 + [BlockState.FREE] * 4
    assert [(mark.block, mark.state) for mark in marks] == list(enumerate(states))
    assert [mark.generation for mark in marks] == [3] * 4 + [4] * 4
    assert [mark.checksum for mark in marks[:2]] == [9, 9]


def test_a_request_goes_on_from_the_blocks_that_were_kept() -> None:
    """Ten tokens, two full blocks of them kept: two are computed again, whoever computed them."""
    play = Decode(writers=(), found=taken_over(tokens=8))
    play.local(spec(tokens=6), output=ids(7, 8, 50, 51), epoch=2)
    (row,) = play.last(RunStep).rows
    assert (row.start, row.token_ids.tolist()) == (8, [50, 51])
    assert row.blocks.tolist()[:2] == [0, 1]
    play.stepped((52,), ADVANCED, STEP, run(4, 52, epoch=2))


def test_a_living_writers_blocks_are_kept_from_all_until_it_maps_the_arena_anew() -> None:
    """(3) That answer comes when nothing of it stores there for the former owner any more."""
    play = Decode(blocks=8, writers=(), found=taken_over(filling=8))
    refused = sent(R, WorkRefused, reason=Reason.NO_BLOCKS)
    play.reserve(spec(tokens=4, max_tokens=1), None, refused)
    play.up(P, Role.PREFILL, Send(P, ArenaOffered(ARENA)))
    assert play.states() == {"QUARANTINED": 8}
    play.hear(P, ArenaMapped("f", "no room"))
    play.hear(P, ArenaMapped("another"))
    play.hear(Q, ArenaMapped("f"), ProbeWriter(Q.incarnation))
    assert play.states() == {"QUARANTINED": 8}
    play.hear(P, ArenaMapped("f"), ProbeWriter(P.incarnation))
    assert play.states() == {"FREE": 8}
    play.local(spec(tokens=4, max_tokens=1), epoch=2)


def test_a_writer_that_never_comes_back_is_looked_at_until_its_lock_is_gone() -> None:
    """(3) No timer frees what it may store into: only the kernel's word does."""
    play = Decode(writers=(), found=taken_over(tokens=4, filling=3))
    probes = play.wait(1.0)
    assert len(probes) >= 15 and set(probes) == {ProbeWriter(P.incarnation)}
    play.feed(WriterProbed(P.incarnation, alive=True))
    assert play.states() == {"CACHED": 1, "QUARANTINED": 3, "FREE": 4}
    play.feed(WriterProbed(P.incarnation, alive=False))
    assert play.states() == {"CACHED": 1, "FREE": 7}
    play.wait(0.2)
    assert play.wait(1.0) == []


def test_the_oldest_waits_for_a_former_writer_that_is_linked_and_takes_nobodys_ticket() -> None:
    """Its blocks come back in a moment: no running hand-over is given up for them."""
    play = Decode(blocks=8, found=taken_over(filling=4, writer=Q), growth_tokens=0)
    play.local(spec(tokens=8, max_tokens=20))
    play.remote(spec("b", tokens=7, first=30, max_tokens=1))
    play.up(Q, Role.PREFILL, Send(Q, ArenaOffered(ARENA)))
    play.stepped((40,), ADVANCED, run(0, 40))
    assert "b" in play.machine.state.sequences
    play.hear(Q, ArenaMapped("f"), ProbeWriter(Q.incarnation), STEP)
