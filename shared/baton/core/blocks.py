"""The block pool of one arena: who may use which block.

Decides states, generations, references and holds; the arena's metadata follows from the marks it
collects. It does not know sequences or tickets, only counts:

- a *reference* is one of the owner's sequences that uses the block;
- a *hold* is another process that may still read or write it (a ticket). A block without
  references but with holds waits in quarantine (or, sealed, in the cache, where it is not evicted).

A block becomes FREE in one place (:meth:`BlockPool._free`), where its generation grows.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.core.lifecycles import BLOCK_MOVES, BlockState, become

B = BlockState
GENERATION_MAX = 2**32 - 1


@dataclass(slots=True)
class Block:
    """One block's record."""

    state: BlockState = B.FREE
    generation: int = 1
    references: int = 0
    holds: int = 0
    chain: bytes = b""
    """Name of the prefix that ends with this block; empty unless it is full and verified (or the
    owner's own) and no other block has the name."""
    checksum: int = 0
    """Of a block with a name."""
    epoch: int = 0
    writer: int = 0


class BlockPool:
    """All blocks of one arena. Bounded by ``blocks_total``; every method is O(blocks named)."""

    def __init__(self, blocks_total: int) -> None:
        self.blocks = [Block() for _ in range(blocks_total)]
        self._free_list: deque[int] = deque(range(blocks_total))
        #: Sealed blocks by prefix name, RESIDENT or CACHED. The first one sealed keeps the name.
        self._index: dict[bytes, int] = {}
        #: CACHED blocks, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._held_cached = 0
        self._dirty: dict[int, None] = {}
        #: Names that came into the index (True) or left it since :meth:`take_renamed`.
        self._renamed: dict[bytes, bool] = {}

    @classmethod
    def restored(cls, blocks: Sequence[Block], cached: Sequence[int]) -> BlockPool:
        """Return a pool of blocks that were found FREE, QUARANTINED (held) or CACHED.

        ``cached`` are the last, the one to be evicted first leading; their names differ. All of it
        is metadata to be stored again.
        """
        pool = cls(0)
        pool.blocks = list(blocks)
        pool._free_list.extend(n for n, block in enumerate(blocks) if block.state is B.FREE)
        pool._cached.update(dict.fromkeys(cached))
        pool._index.update((blocks[number].chain, number) for number in cached)
        pool._dirty.update(dict.fromkeys(range(len(blocks))))
        pool.check()
        return pool

    # --- looking ------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        return len(self.blocks)

    def available(self) -> int:
        """Blocks a reservation could get at once: FREE, or CACHED without a hold."""
        return len(self._free_list) + len(self._cached) - self._held_cached

    def match(self, chains: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached leading part of ``chains``."""
        found: list[int] = []
        for chain in chains:
            block = self._index.get(chain)
            if block is None:
                break
            found.append(block)
        return found

    def counts(self) -> dict[BlockState, int]:
        """Number of blocks in each state."""
        result = dict.fromkeys(B, 0)
        for block in self.blocks:
            result[block.state] += 1
        return result

    def take_dirty(self) -> list[int]:
        """Return the blocks that changed since the last call, each once, in order."""
        dirty = list(self._dirty)
        self._dirty.clear()
        return dirty

    def named_in(self, start: int, count: int) -> list[bytes]:
        """Return the names of the sealed blocks among ``start`` .. ``start + count - 1``."""
        blocks = self.blocks[start : start + count]
        return [block.chain for block in blocks if block.chain and block.state is not B.ANNOUNCED]

    @property
    def renamed(self) -> bool:
        """Whether a name has come or gone since :meth:`take_renamed`."""
        return bool(self._renamed)

    def take_renamed(self) -> tuple[list[bytes], list[bytes]]:
        """Return the names that came and those that went since the last call; what did both, did
        neither. Bounded: a name that came is in the index, one that went was when this was last
        called."""
        came = [name for name, there in self._renamed.items() if there]
        gone = [name for name, there in self._renamed.items() if not there]
        self._renamed.clear()
        return came, gone

    # --- taking -------------------------------------------------------------------------------

    def reference(self, blocks: Iterable[int]) -> None:
        """Use sealed blocks (from :meth:`match`) in one more sequence."""
        for number in blocks:
            block = self.blocks[number]
            if block.state is B.CACHED:
                self._leave_cache(number)
                self._become(number, B.RESIDENT)
            assert block.state is B.RESIDENT and block.chain
            block.references += 1

    def reserve(self, count: int, *, epoch: int, writer: int) -> list[int] | None:
        """Take ``count`` blocks for a remote writer (RESERVED), or ``None`` if there are not."""
        if count > self.available():
            return None
        taken = [self._take(B.RESERVED) for _ in range(count)]
        for number in taken:
            self.blocks[number].epoch = epoch
            self.blocks[number].writer = writer
        return taken

    def grow(self, count: int) -> list[int] | None:
        """Take ``count`` blocks for the owner itself (RESIDENT), or ``None`` if there are not."""
        if count > self.available():
            return None
        return [self._take(B.RESIDENT) for _ in range(count)]

    # --- the hand-over ------------------------------------------------------------------------

    def fill(self, blocks: Iterable[int]) -> None:
        """RESERVED -> FILLING: the ticket is about to be sent."""
        for number in blocks:
            self._become(number, B.FILLING)

    def announce(self, number: int, chain: bytes = b"", checksum: int = 0) -> None:
        """FILLING -> ANNOUNCED: its checksum verified; it is never written by others again.

        A full one has its name from now on, though nobody is given it by that name yet.
        """
        self._become(number, B.ANNOUNCED)
        block = self.blocks[number]
        block.writer = 0
        block.chain, block.checksum = chain, checksum

    def settle(self, number: int) -> None:
        """ANNOUNCED -> RESIDENT: sealed if it is full, else the owner may append to it."""
        self._become(number, B.RESIDENT)
        block = self.blocks[number]
        chain, block.chain = block.chain, b""
        if chain:
            self.seal(number, chain, block.checksum)

    def hold(self, blocks: Iterable[int]) -> None:
        """Another process may touch these until :meth:`unhold`."""
        for number in blocks:
            block = self.blocks[number]
            block.holds += 1
            if block.state is B.CACHED and block.holds == 1:
                self._held_cached += 1

    def unhold(self, blocks: Iterable[int]) -> None:
        """That process touches them no more (it said so, or it is proven dead)."""
        for number in blocks:
            block = self.blocks[number]
            assert block.holds > 0
            block.holds -= 1
            if block.holds:
                continue
            if block.state is B.CACHED:
                self._held_cached -= 1
            elif block.state is B.QUARANTINED:
                self._free(number)

    # --- giving back --------------------------------------------------------------------------

    def seal(self, number: int, chain: bytes, checksum: int) -> None:
        """A RESIDENT block is full: name it. A name already taken stays with its first block."""
        block = self.blocks[number]
        assert block.state is B.RESIDENT and not block.chain
        block.checksum = 0
        if chain not in self._index:
            self._index[chain] = number
            self._rename(chain, there=True)
            block.chain, block.checksum = chain, checksum
            self._dirty[number] = None

    def abandon(self, blocks: Iterable[int]) -> None:
        """Drop RESERVED, FILLING or ANNOUNCED blocks: the attempt is over."""
        for number in blocks:
            block = self.blocks[number]
            assert block.references == 1
            block.references = 0
            if block.state is B.RESERVED and not block.holds:
                self._free(number)
                continue
            self._become(number, B.QUARANTINED)
            block.chain, block.checksum = b"", 0
            if not block.holds:
                self._free(number)

    def release(self, blocks: Sequence[int]) -> None:
        """One sequence less uses these RESIDENT blocks, given in the order of its tokens.

        Its last block is evicted first: without its beginning a prefix is of no use to anybody."""
        for number in reversed(blocks):
            block = self.blocks[number]
            assert block.state is B.RESIDENT and block.references > 0
            block.references -= 1
            if block.references:
                continue
            if block.chain:
                self._become(number, B.CACHED)
                self._cached[number] = None
                self._held_cached += bool(block.holds)
            elif block.holds:
                self._become(number, B.QUARANTINED)
            else:
                self._free(number)

    # --- inside -------------------------------------------------------------------------------

    def _take(self, state: BlockState) -> int:
        number = self._free_list.popleft() if self._free_list else self._evict()
        block = self.blocks[number]
        assert block.state is B.FREE and not block.references and not block.holds
        self._become(number, state)
        block.references = 1
        return number

    def _evict(self) -> int:
        """Free the least recently used cached block that nobody holds; return it."""
        number = next(n for n in self._cached if not self.blocks[n].holds)
        self._leave_cache(number)
        self._free(number)
        return self._free_list.pop()

    def _leave_cache(self, number: int) -> None:
        del self._cached[number]
        self._held_cached -= bool(self.blocks[number].holds)

    def _free(self, number: int) -> None:
        block = self.blocks[number]
        assert not block.references and not block.holds
        self._become(number, B.FREE)
        if block.chain:
            del self._index[block.chain]
            self._rename(block.chain, there=False)
            block.chain, block.checksum = b"", 0
        assert block.generation < GENERATION_MAX, "a block's generation ran out"
        block.generation += 1
        block.epoch = block.writer = 0
        self._free_list.append(number)

    def _rename(self, chain: bytes, *, there: bool) -> None:
        if self._renamed.pop(chain, there) == there:
            self._renamed[chain] = there

    def _become(self, number: int, state: BlockState) -> None:
        block = self.blocks[number]
        block.state = become(BLOCK_MOVES, block.state, state)
        self._dirty[number] = None

    def check(self) -> None:
        """Assert conservation: every block is in exactly the lists its state says."""
        free = set(self._free_list)
        assert len(free) == len(self._free_list), "a block is free twice"
        held = named = 0
        for number, block in enumerate(self.blocks):
            assert (block.state is B.FREE) == (number in free)
            assert (block.state is B.CACHED) == (number in self._cached)
            if block.state in (B.FREE, B.CACHED, B.QUARANTINED):
                assert block.references == 0
            else:
                assert block.references > 0
            if block.state in (B.RESERVED, B.FILLING, B.ANNOUNCED):
                assert block.references == 1
            if block.state is B.QUARANTINED:
                assert block.holds > 0
            if block.state is B.FREE:
                assert block.holds == 0
            if block.chain and block.state is not B.ANNOUNCED:
                assert block.state in (B.RESIDENT, B.CACHED)
                assert self._index[block.chain] == number
            named += bool(block.chain) and block.state is not B.ANNOUNCED
            held += block.state is B.CACHED and block.holds > 0
        assert held == self._held_cached
        assert len(self._index) == named
