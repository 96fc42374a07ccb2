"""What a restarted decode worker keeps of its old memory, and what it must not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.channel.layout import RECORD_BYTES
from baton.core.ids import Peer
from baton.core.lifecycles import BlockState
from baton.decode.takeover import TakenOver, take_stock
from baton.ports.channel import BlockCheck, BlockMark
from baton.sim.channel import SimArena, SimHost, SimMapped
from support.channel_parts import COMPAT, LAYOUT, OWNER, WRITER, pattern

B = BlockState
HEIR = Peer(OWNER.worker_id, 1003)
BLOCKS = 8
NAMES = [bytes([n]) * 16 for n in range(1, BLOCKS + 1)]


class Host:
    """A simulated host on which decode dies and comes back."""

    def __init__(self) -> None:
        self.time = 0.0
        self.host = SimHost(lambda: self.time)
        self.arena = self.host.open("test", OWNER, LAYOUT, COMPAT, blocks=BLOCKS)
        self.arena.memory[:] = pattern(len(self.arena.memory))

    def checksum(self, block: int, name: bytes) -> int:
        (found,) = self.arena.checksums([BlockCheck(block, block, LAYOUT.block_size, name)])
        return found

    def named(
        self, block: int, state: BlockState = B.CACHED, *, name: bytes = b"", generation: int = 5
    ) -> BlockMark:
        """Store the record of a full block under its name, with its checksum."""
        name = name or NAMES[block]
        checksum = self.checksum(block, name)
        mark = BlockMark(block, state, generation, chain=name, checksum=checksum)
        self.arena.mark([mark])
        return mark

    def writer(self, me: Peer = WRITER) -> SimMapped:
        return self.host.channel(LAYOUT, COMPAT).map(self.arena.ref, me)

    def written(self, block: int, state: BlockState, *, by: Peer = WRITER) -> None:
        """Store the record of a block that ``by`` may store into."""
        mark = BlockMark(block, state, 5, epoch=2, writer=by.incarnation)
        self.arena.mark([mark])

    def restart(self, *, verify_mb: int = 100) -> TakenOver:
        """Kill decode and start it again."""
        self.host.kill(OWNER.incarnation)
        self.time += 1.0
        self.arena = self.host.open("test", HEIR, LAYOUT, COMPAT, blocks=BLOCKS)
        assert isinstance(self.arena, SimArena)
        return take_stock(self.arena, LAYOUT.block_size, LAYOUT.block_bytes, verify_mb)


def states(found: TakenOver) -> list[BlockState]:
    return [block.state for block in found.pool.blocks]


@pytest.mark.parametrize("state", [B.RESIDENT, B.ANNOUNCED, B.CACHED])
def test_a_verified_block_is_in_the_cache_under_its_name(state: BlockState) -> None:
    """Whatever used it: what a running sequence had is found like any prefix."""
    host = Host()
    mark = host.named(3, state, generation=7)
    found = host.restart()
    assert found.pool.match([NAMES[3]]) == [3]
    block = found.pool.blocks[3]
    assert (block.state, block.generation, block.checksum) == (B.CACHED, 7, mark.checksum)
    assert (found.kept, found.dropped, found.former) == (1, 0, OWNER)


@pytest.mark.parametrize("state", sorted(set(B) - {B.RESIDENT, B.ANNOUNCED, B.CACHED}))
def test_a_name_in_any_other_state_is_a_torn_record(state: BlockState) -> None:
    """A block in such a state has no name; what looks like one was half stored."""
    host = Host()
    host.named(3, state)
    found = host.restart()
    assert found.pool.match([NAMES[3]]) == []
    assert states(found) == [B.FREE] * BLOCKS


@pytest.mark.parametrize("byte", [0, LAYOUT.block_bytes - 1])
def test_a_block_whose_bytes_have_changed_is_free(byte: int) -> None:
    """One flipped bit costs one block: it is computed again."""
    host = Host()
    host.named(3)
    host.named(4)
    host.arena.memory[3 * LAYOUT.block_bytes + byte] ^= 1
    found = host.restart()
    assert found.pool.match([NAMES[3]]) == []
    assert found.pool.match([NAMES[4]]) == [4]
    assert (found.kept, found.dropped) == (1, 1)
    assert found.pool.blocks[3].generation == 6


@pytest.mark.parametrize("cut", range(8, RECORD_BYTES))
def test_a_record_cut_off_at_any_byte_names_nothing_wrong(cut: int) -> None:
    """(3) Killed while it stores a record, the owner leaves new fields under the old word."""
    host = Host()
    record = host.arena._records._bytes[3 * RECORD_BYTES : 4 * RECORD_BYTES]
    old = host.named(3, name=NAMES[1])
    before = bytes(record)
    host.arena.mark([BlockMark(3, B.RESIDENT, 6, chain=NAMES[2], checksum=1)])
    record[:8] = before[:8]
    record[cut:] = before[cut:]
    found = host.restart()
    whole = cut <= 32
    assert found.pool.match([old.chain]) == ([3] if whole else [])
    assert found.pool.match([NAMES[2]]) == []
    assert (found.kept, found.dropped) == ((1, 0) if whole else (0, 1))
    assert found.damaged == (not whole)


def test_two_blocks_of_one_name_leave_one_that_was_in_use() -> None:
    """Equal names are equal bytes; the pool knows each name once."""
    host = Host()
    host.named(2, B.CACHED, name=NAMES[0])
    host.named(5, B.RESIDENT, name=NAMES[0])
    found = host.restart()
    assert found.pool.match([NAMES[0]]) == [5]
    assert states(found).count(B.FREE) == BLOCKS - 1


def test_what_was_in_use_is_verified_first_and_evicted_last() -> None:
    """With less time than memory the running sequences' blocks are kept."""
    host = Host()
    for block, state in ((0, B.CACHED), (1, B.RESIDENT), (2, B.CACHED), (3, B.RESIDENT)):
        host.named(block, state)
    found = host.restart()
    pool = found.pool
    assert [pool.match([name]) for name in NAMES[:4]] == [[0], [1], [2], [3]]
    pool.grow(BLOCKS - 2)
    assert [pool.match([name]) for name in NAMES[:4]] == [[], [1], [], [3]]


def test_what_cannot_be_verified_in_time_is_dropped() -> None:
    """A limit of nothing keeps nothing: no block is trusted unread."""
    host = Host()
    host.named(3)
    found = host.restart(verify_mb=0)
    assert (found.kept, found.dropped, found.damaged) == (0, 1, 0)
    assert states(found) == [B.FREE] * BLOCKS


@pytest.mark.parametrize("state", [B.RESERVED, B.FILLING, B.QUARANTINED])
def test_what_a_living_writer_may_store_into_stays_in_quarantine(state: BlockState) -> None:
    """(3) Its lock is held: until it says that it stopped, or is dead, nobody gets the block."""
    host = Host()
    host.writer()
    host.written(3, state)
    found = host.restart()
    assert found.pool.blocks[3].state is B.QUARANTINED
    assert found.quarantined == {WRITER.incarnation: (3,)}
    assert found.pool.available() == BLOCKS - 1
    (mark,) = [each for each in host_marks(found) if each.block == 3]
    assert (mark.generation, mark.epoch, mark.writer) == (5, 2, WRITER.incarnation)
    found.pool.unhold([3])
    assert (found.pool.blocks[3].state, found.pool.blocks[3].generation) == (B.FREE, 6)


def host_marks(found: TakenOver) -> list[BlockMark]:
    blocks = found.pool.blocks
    return [
        BlockMark(n, blocks[n].state, blocks[n].generation, blocks[n].epoch, blocks[n].writer)
        for n in found.pool.take_dirty()
    ]


@pytest.mark.parametrize("state", [B.RESERVED, B.FILLING, B.QUARANTINED])
def test_what_a_dead_writer_stored_into_is_free(state: BlockState) -> None:
    """No lock, no store: with the next generation, which no ticket of old names."""
    host = Host()
    host.writer()
    host.written(3, state)
    host.host.kill(WRITER.incarnation)
    found = host.restart()
    assert not found.quarantined
    assert (found.pool.blocks[3].state, found.pool.blocks[3].generation) == (B.FREE, 6)


def test_every_record_is_stored_again() -> None:
    """The metadata says what the pool says before anybody hears of the new owner."""
    host = Host()
    host.named(3)
    assert host.restart().pool.take_dirty() == list(range(BLOCKS))


def test_a_state_that_does_not_exist_is_a_failed_take_over() -> None:
    """Nothing is guessed of memory that somebody else has stored into."""
    host = Host()
    host.arena._records._words[3 * RECORD_BYTES // 8] = 99 << 32
    with pytest.raises(ValueError, match="99"):
        host.restart()


@given(
    st.lists(
        st.tuples(st.sampled_from(B), st.booleans(), st.booleans(), st.integers(0, 3)),
        min_size=BLOCKS,
        max_size=BLOCKS,
    )
)
def test_any_records_make_a_whole_pool(
    records: list[tuple[BlockState, bool, bool, int]],
) -> None:
    """Named or not, damaged or not, written by the living or the dead: each block is in one place,
    nothing damaged is kept and nothing that may be stored into is given away."""
    host = Host()
    dead = Peer("prefill-1", 2002)
    host.writer()
    host.writer(dead)
    writers = [0, WRITER.incarnation, dead.incarnation, 999]
    for block, (state, named, damaged, writer) in enumerate(records):
        name = NAMES[block % 3] if named else b""
        checksum = host.checksum(block, name) if named else 0
        mark = BlockMark(
            block, state, 5, writer=writers[writer], chain=name, checksum=checksum + damaged
        )
        host.arena.mark([mark])
    host.host.kill(dead.incarnation)
    found = host.restart()
    found.pool.check()
    for block, (state, named, damaged, writer) in enumerate(records):
        now = found.pool.blocks[block].state
        written = state in (B.RESERVED, B.FILLING, B.QUARANTINED) and writer == 1
        assert (now is B.QUARANTINED) == written
        if now is B.CACHED:
            assert named and not damaged and state in (B.RESIDENT, B.ANNOUNCED, B.CACHED)
