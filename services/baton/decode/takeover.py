"""What is kept of an arena that a dead incarnation of this worker left.

Decides by the records alone. A full block with a name is kept if its bytes still have the checksum
that stands beside the name: it is in the prefix cache from then on, where the requests that come
back find it. Everything else is free, with the next generation, except what a writer that lives may
still store into: that waits in quarantine until the writer says that it has stopped, or is dead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.core.blocks import Block, BlockPool
from baton.core.ids import Peer
from baton.core.lifecycles import BlockState
from baton.ports.channel import BlockCheck, BlockMark, OwnArena

B = BlockState
#: States in which a block with a name is full and its bytes were right, the more useful first.
KEPT = (B.RESIDENT, B.ANNOUNCED, B.CACHED)
#: States in which its writer may store into a block.
WRITTEN = (B.RESERVED, B.FILLING, B.QUARANTINED)


@dataclass(frozen=True, slots=True)
class TakenOver:
    """What became of an arena's blocks."""

    former: Peer
    pool: BlockPool
    quarantined: Mapping[int, tuple[int, ...]]
    """Living writers of the former owner's: incarnation -> blocks held for it."""
    kept: int
    dropped: int
    """Blocks that had a name and are not kept: damaged, or more than could be verified."""
    damaged: int = 0
    """Those whose bytes did not match their checksum."""

    def describe(self) -> dict[str, object]:
        """Return what logs and ``baton status`` say of it."""
        return {
            "former": str(self.former),
            "kept": self.kept,
            "dropped": self.dropped,
            "damaged": self.damaged,
            "quarantined": sum(map(len, self.quarantined.values())),
            "blocks": self.pool.total,
        }


def take_stock(arena: OwnArena, block_size: int, block_bytes: int, verify_mb: int) -> TakenOver:
    """Read the records, verify at most ``verify_mb`` of the named blocks, and look at the writers.

    Raises:
        ValueError: a record that this version cannot have stored.
    """
    assert arena.former is not None
    marks = [arena.marked(number) for number in range(arena.blocks_total)]
    named = [mark for state in KEPT for mark in marks if mark.state is state and mark.chain]
    checks = [
        BlockCheck(mark.block, mark.block, block_size, mark.chain, mark.checksum)
        for mark in named[: verify_mb * 2**20 // block_bytes]
    ]
    bad = set(arena.verify(checks))
    good = [check.block for check in checks if check.block not in bad]
    writers = {mark.writer for mark in marks if mark.writer and mark.state in WRITTEN}
    alive = {writer for writer in writers if arena.writer_alive(writer)}
    return replace(rebuild(arena.former, marks, good, alive), damaged=len(bad))


def rebuild(
    former: Peer, marks: Sequence[BlockMark], good: Sequence[int], alive: Collection[int]
) -> TakenOver:
    """Return the pool of these records; ``good`` are the verified blocks, the most useful first."""
    kept = {marks[number].chain: number for number in reversed(good)}
    numbers = set(kept.values())
    blocks, quarantined = [], defaultdict(list)
    for mark in marks:
        if mark.block in numbers:
            block = Block(B.CACHED, mark.generation, chain=mark.chain, checksum=mark.checksum)
        elif mark.state in WRITTEN and mark.writer in alive:
            block = Block(
                B.QUARANTINED, mark.generation, holds=1, epoch=mark.epoch, writer=mark.writer
            )
            quarantined[mark.writer].append(mark.block)
        else:
            block = Block(B.FREE, mark.generation + 1)
        blocks.append(block)
    named = sum(1 for mark in marks if mark.state in KEPT and mark.chain)
    return TakenOver(
        former=former,
        pool=BlockPool.restored(blocks, list(kept.values())),
        quarantined={writer: tuple(held) for writer, held in quarantined.items()},
        kept=len(kept),
        dropped=named - len(kept),
    )
