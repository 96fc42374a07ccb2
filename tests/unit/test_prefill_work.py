"""What prefill's thread does for a chunk: fence, stores, sums, tokens, in this order."""

from __future__ import annotations

import numpy as np

from baton.core.lifecycles import BlockState
from baton.core.sampling import SamplingParams
from baton.engine.fake import FakeEngine
from baton.engine.fake_model import fake_info
from baton.ports.channel import BlockCheck, BlockMark
from baton.ports.engine import Row, SampleSpec
from baton.prefill.io import ChunkFinished, ChunkRow, ChunkStored, MapArena, RunChunk
from baton.prefill.work import ChunkWorker
from baton.wire.handover import TicketBlock
from support.channel_hosts import FakeHost
from support.channel_parts import LAYOUT, OWNER, WRITER
from support.engine_steps import ids_of
from support.runtime_fakes import HandClock

SIZE = LAYOUT.block_size
GREEDY = SamplingParams(seed=1, temperature=0.0)
#: Leaves no token to choose.
STUCK = SamplingParams(seed=1, temperature=0.0, allowed_token_ids=(5,), bad_words_ids=((5,),))


class World:
    """A prefill worker that has mapped an arena, of which some blocks are its own to fill."""

    def __init__(self, mine: tuple[int, ...]) -> None:
        host = FakeHost()
        self.arena = host.create(OWNER)
        self.arena.mark([BlockMark(n, BlockState.FILLING, 1, 1, WRITER.incarnation) for n in mine])
        engine = FakeEngine(fake_info(), LAYOUT)
        self.worker = ChunkWorker(engine, host.channel(), WRITER, HandClock())
        assert not self.worker.map(MapArena(self.arena.ref)).error
        self.told: list[ChunkStored] = []

    def run(self, *rows: ChunkRow) -> ChunkFinished:
        """Run one chunk of ``rows``."""
        return self.worker.run(RunChunk(7, rows), self.told.append)

    def row(
        self, name: str, block: int, params: SamplingParams | None = None, start: int = 0
    ) -> ChunkRow:
        """Return a row that fills ``block``, and samples by ``params``."""
        tokens = ids_of(range(10, 10 + SIZE))
        sample = None if params is None else SampleSpec(params, 0, tokens, ())
        table = np.array([0, block] if start else [block], np.int32)
        logical = start // SIZE
        return ChunkRow(
            row=Row(name, tokens, start, table, self.arena.ref.file_id, sample),
            epoch=1,
            targets=(TicketBlock(logical, block, 1),),
            checks=(BlockCheck(logical, block, SIZE, bytes([block]) * 16),),
        )

    def sums(self, row: ChunkRow) -> tuple[int, ...]:
        """Return the checksums of what is there now."""
        return tuple(self.arena.checksums(row.checks))


def test_what_is_stored_is_told_before_the_tokens_are_there() -> None:
    """With the checksums of the bytes; a row whose fence does not hold has stored nothing."""
    world = World(mine=(1, 2))
    rows = world.row("a", 1, GREEDY), world.row("x", 3, GREEDY), world.row("b", 2)
    finished = world.run(*rows)
    (stored,) = world.told
    assert stored.step == 7
    assert stored.checksums == (world.sums(rows[0]), None, world.sums(rows[2]))
    a, x, b = finished.results
    assert a.sampled is not None and x.fenced and not x.failed
    assert b.sampled is None and not b.failed and not b.fenced


def test_a_row_without_a_token_leaves_its_neighbours_theirs_and_nothing_is_stored_again() -> None:
    """All of it may be announced by then."""
    world = World(mine=(1, 2))
    finished = world.run(world.row("stuck", 1, STUCK), world.row("good", 2, GREEDY))
    assert len(world.told) == 1 and None not in world.told[0].checksums
    stuck, good = finished.results
    assert "no token" in stuck.failed and not stuck.retryable
    assert good.sampled is not None and not good.failed


def test_a_row_that_read_wrong_memory_is_not_told_and_the_others_are_stepped_again() -> None:
    """(24) What it stored rests on bytes that are not its prefix."""
    world = World(mine=(1, 2))
    finished = world.run(world.row("bad", 1, GREEDY, start=SIZE), world.row("good", 2, GREEDY))
    (stored,) = world.told
    assert stored.checksums[0] is None and stored.checksums[1] is not None
    bad, good = finished.results
    assert "wrong KV" in bad.failed and bad.retryable
    assert good.sampled is not None


def test_a_chunk_of_which_no_fence_holds_stores_nothing() -> None:
    """(8) And tells nothing."""
    world = World(mine=())
    before = bytes(world.arena.memory)
    assert world.run(world.row("x", 3, GREEDY)).results[0].fenced
    assert not world.told and bytes(world.arena.memory) == before
