"""Bringing blocks from another worker's arena: copied, verified on the copy, in bounded pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from baton.core.ids import Peer
from baton.core.lifecycles import BlockState
from baton.decode import work
from baton.decode.io import BlocksImported, ImportBlocks
from baton.ports.channel import BlockCheck, BlockMark
from support.channel_hosts import FakeHost
from support.channel_parts import LAYOUT, pattern
from support.runtime_fakes import HandClock

SOURCE, ME = Peer("decode-1", 11), Peer("decode-0", 12)
SIZE = LAYOUT.block_bytes
NAMES = [bytes([number]) * 16 for number in range(1, 21)]


class World:
    """A source with ``NAMES`` sealed in reverse order, and an own arena that is empty."""

    def __init__(self, blocks: int = 20) -> None:
        self.host = FakeHost()
        self.source = self.host.create(SOURCE, blocks=20)
        self.own = self.host.create(ME, blocks=blocks)
        self.source.memory[:] = pattern(len(self.source.memory))
        for number, name in enumerate(NAMES):
            self.seal(19 - number, name)

    def seal(self, block: int, name: bytes, generation: int = 1) -> None:
        check = BlockCheck(0, block, LAYOUT.block_size, name)
        (checksum,) = self.source.checksums([check])
        mark = BlockMark(block, BlockState.CACHED, generation, chain=name, checksum=checksum)
        self.source.mark([mark])

    def command(self, count: int, source: str = SOURCE.worker_id) -> ImportBlocks:
        targets = tuple(
            BlockCheck(logical, logical, LAYOUT.block_size, NAMES[logical])
            for logical in range(count)
        )
        return ImportBlocks("r", 2, source, targets)

    def pieces(self, command: ImportBlocks) -> Any:
        return work.bring(self.own, self.host.sources(), command, HandClock())

    def bring(self, command: ImportBlocks) -> BlocksImported:
        return [each for each in self.pieces(command) if each is not None][-1]

    def same(self, count: int) -> bool:
        """Whether the first ``count`` own blocks hold the source's bytes."""
        return all(
            self.own.memory[n * SIZE : (n + 1) * SIZE]
            == self.source.memory[(19 - n) * SIZE : (20 - n) * SIZE]
            for n in range(count)
        )


def test_blocks_come_with_their_checksums() -> None:
    """Checksums are seeded with names: the source's are the own ones too."""
    world = World()
    event = world.bring(world.command(3))
    assert (len(event.sums), event.why, event.epoch) == (3, "", 2)
    assert world.same(3)
    assert event.sums == tuple(world.source.marked(19 - n).checksum for n in range(3))


def test_a_piece_is_bounded_and_others_get_their_turn() -> None:
    """Between two pieces the thread is free."""
    world = World()
    events = list(world.pieces(world.command(2 * work.PIECE_BLOCKS + 1)))
    assert events[:2] == [None, None] and len(events) == 3


@pytest.mark.parametrize("damage", ["flipped", "unnamed", "renamed"])
def test_an_import_ends_where_something_is_wrong(damage: str) -> None:
    """One flipped bit, a block that is not there, a checksum of something else."""
    world = World()
    if damage == "flipped":
        world.host.flip(world.source, 19 - 2, SIZE - 1)
    elif damage == "unnamed":
        world.source.mark([BlockMark(19 - 2, BlockState.FREE, 2)])
    else:
        world.seal(19 - 2, NAMES[7])
    event = world.bring(world.command(5))
    assert len(event.sums) == 2
    assert "block 2" in event.why


@pytest.mark.parametrize("generation", [1, 2])
def test_a_block_that_got_another_content_meanwhile_is_not_taken(generation: int) -> None:
    """Its owner lives and uses it again after it was found and before it is copied: whatever its
    record says then, what was asked for is not there."""
    world = World()
    pieces = world.pieces(world.command(work.PIECE_BLOCKS + 1))
    assert next(pieces) is None
    last = 19 - work.PIECE_BLOCKS
    world.source.memory[last * SIZE : (last + 1) * SIZE] = bytes(reversed(range(256))) * (
        SIZE // 256
    )
    world.seal(last, b"x" * 16, generation)
    event = next(pieces)
    assert len(event.sums) == work.PIECE_BLOCKS
    assert "does not match" in event.why


def test_a_source_that_is_not_there_is_an_answer() -> None:
    """Nothing came, and why is told."""
    world = World()
    event = world.bring(world.command(3, source="decode-7"))
    assert event.sums == () and "decode-7" in event.why


def test_imports_take_their_turn_after_each_other_and_leave_turns_to_others() -> None:
    """The first is not held up by the second, and neither holds up what else the thread has."""
    world, thread, said = World(), deque[Callable[[], object]](), []
    turns = work.Turns(thread.append)
    for count in (2 * work.PIECE_BLOCKS, 1):
        turns.add(world.pieces(world.command(count)))
    thread.append(lambda: "something else")
    while thread:
        event = thread.popleft()()
        if event is not None:
            said.append(len(event.sums) if isinstance(event, BlocksImported) else event)
    assert said == ["something else", 2 * work.PIECE_BLOCKS, 1]
