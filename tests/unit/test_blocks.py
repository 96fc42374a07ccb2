"""The block pool conserves blocks and never gives away what somebody may still touch."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.blocks import BlockPool
from baton.core.lifecycles import BLOCK_MOVES, BlockState, become

TOTAL = 12


class Pool(RuleBasedStateMachine):
    """Random owners (sequences) and holders (tickets) on a small pool."""

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(TOTAL)
        self.running: list[list[int]] = []
        self.filling: list[list[int]] = []
        self.holds: list[list[int]] = []
        self.name = 0

    @rule(count=st.integers(1, 5))
    def grow(self, count: int) -> None:
        had = self.pool.available()
        taken = self.pool.grow(count)
        assert (taken is None) == (count > had)
        if taken:
            self._not_touchable(taken)
            self.running.append(taken)

    @rule(count=st.integers(1, 5))
    def reserve(self, count: int) -> None:
        taken = self.pool.reserve(count, epoch=1, writer=7)
        if taken:
            self._not_touchable(taken)
            self.pool.fill(taken)
            self.pool.hold(taken)
            self.holds.append(list(taken))
            self.filling.append(taken)

    def _not_touchable(self, taken: list[int]) -> None:
        for held in self.holds:
            assert not set(held) & set(taken), "a block was given away that a writer may touch"
        for owned in (*self.running, *self.filling):
            assert not set(owned) & set(taken), "a block has two owners"

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        blocks = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        for number in blocks:
            chain = b""
            if data.draw(st.booleans()):
                self.name += 1
                chain = data.draw(st.integers(1, self.name)).to_bytes(16, "little")
            self.pool.announce(number, chain, 7)
            self.pool.settle(number)
        self.running.append(blocks)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        blocks = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        self.pool.abandon(blocks)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        blocks = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        number = data.draw(st.sampled_from(blocks))
        if not self.pool.blocks[number].chain:
            self.name += 1
            self.pool.seal(number, self.name.to_bytes(16, "little"), 7)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.release(blocks)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        self.pool.unhold(self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))))

    @precondition(lambda self: self.name)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        name = data.draw(st.integers(1, self.name)).to_bytes(16, "little")
        found = self.pool.match([name])
        if found and found[0] not in {n for owned in self.running for n in owned}:
            self.pool.reference(found)
            self.pool.hold(found)
            self.holds.append(list(found))
            self.running.append(list(found))

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert sum(self.pool.counts().values()) == TOTAL


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_generation_grows_each_time_a_block_is_freed() -> None:
    """A generation names one use of a block: freeing it ends that name."""
    pool = BlockPool(1)
    first = pool.blocks[0].generation
    for use in range(1, 4):
        blocks = pool.grow(1)
        assert blocks == [0]
        pool.release(blocks)
        assert pool.blocks[0].generation == first + use


def test_quarantined_block_becomes_free_only_when_its_writer_stopped() -> None:
    """An abandoned block that a writer may still store into is nobody's until it said so."""
    pool = BlockPool(2)
    blocks = pool.reserve(2, epoch=1, writer=7)
    assert blocks is not None
    pool.fill(blocks)
    pool.hold(blocks)
    pool.abandon(blocks)
    assert pool.counts()[BlockState.QUARANTINED] == 2
    assert pool.available() == 0
    assert pool.grow(1) is None
    pool.unhold(blocks)
    assert pool.available() == 2


def test_sealed_block_is_found_again_until_it_is_evicted() -> None:
    """The cache keeps released sealed blocks and gives the least recently used one away first."""
    pool = BlockPool(2)
    names = [bytes([n]) * 16 for n in (1, 2)]
    for name in names:
        (block,) = pool.grow(1) or []
        pool.seal(block, name, 7)
        pool.release([block])
    assert len(pool.match(names)) == 2
    pool.grow(1)
    assert pool.match(names[:1]) == []
    assert len(pool.match(names[1:])) == 1


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    """What is left of a prefix is found as long as it begins at its beginning."""
    pool = BlockPool(3)
    names = [bytes([n]) * 16 for n in (1, 2, 3)]
    blocks = pool.grow(3) or []
    for block, name in zip(blocks, names, strict=True):
        pool.seal(block, name, 7)
    pool.release(blocks)
    pool.grow(1)
    assert pool.match(names) == blocks[:2]


def test_the_pool_tells_which_names_came_and_went() -> None:
    """What came and went since the last time is not told; what went and came neither."""
    pool = BlockPool(2)
    one, other = bytes([1]) * 16, bytes([2]) * 16
    (block,) = pool.grow(1) or []
    pool.seal(block, one, 7)
    assert pool.renamed and pool.take_renamed() == ([one], [])
    assert not pool.renamed and pool.named_in(0, 2) == [one]
    pool.release([block])
    fresh = pool.grow(2) or []
    pool.seal(fresh[0], other, 7)
    assert pool.take_renamed() == ([other], [one])
    pool.release(fresh)
    (block,) = pool.reserve(1, epoch=1, writer=7) or []
    again = pool.grow(1) or []
    pool.seal(again[0], other, 7)
    assert pool.take_renamed() == ([], [])
    pool.fill([block])
    pool.announce(block, one, 7)
    assert not pool.renamed and pool.named_in(0, 2) == [other]
    pool.settle(block)
    assert pool.take_renamed() == ([one], [])


def test_cached_block_with_a_reader_is_not_evicted() -> None:
    """A block that another process reads stays what it is, though nobody here uses it."""
    pool = BlockPool(1)
    (block,) = pool.grow(1) or []
    pool.seal(block, b"x" * 16, 7)
    pool.hold([block])
    pool.release([block])
    assert pool.available() == 0
    assert pool.grow(1) is None
    pool.unhold([block])
    assert pool.grow(1) == [block]


def test_an_announced_block_is_named_but_found_only_when_it_is_settled() -> None:
    """Its name and checksum are metadata at once; sequences get it once it is the owner's."""
    pool = BlockPool(3)
    blocks = pool.reserve(3, epoch=1, writer=7) or []
    pool.fill(blocks)
    name = b"x" * 16
    for number in blocks[:2]:
        pool.announce(number, name, 9)
    assert [pool.blocks[n].chain for n in blocks] == [name, name, b""]
    assert pool.match([name]) == []
    pool.settle(blocks[0])
    pool.settle(blocks[1])
    assert pool.match([name]) == [blocks[0]]
    assert (pool.blocks[blocks[0]].checksum, pool.blocks[blocks[1]].checksum) == (9, 0)
    pool.release(blocks[:2])
    pool.abandon(blocks[2:])
    pool.check()


@pytest.mark.parametrize(
    ("source", "target"),
    [(s, t) for s in BlockState for t in BlockState if t not in BLOCK_MOVES[s]],
)
def test_illegal_move_is_a_bug(source: BlockState, target: BlockState) -> None:
    """A move outside the table raises."""
    with pytest.raises(AssertionError, match="illegal move"):
        become(BLOCK_MOVES, source, target)
