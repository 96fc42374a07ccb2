"""The KV channel on one host: arenas, tickets, proof of death, imports.

Three sides. The *owner* (decode) creates its arena and is the only writer of its metadata. A
*writer* (prefill) maps it, looks at the metadata before each chunk, and stores only into blocks
that are FILLING for it. Another decode worker may *import*: read blocks and copy them into its own
arena. Held by ``tests/conformance/test_channel.py`` (real and simulated).

Metadata record of a block: its first 8 bytes hold generation, state and filled count and are
stored at once (one aligned store); the other fields are written before it. Readers look at it
after a message, never in a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.core.ids import Peer
from baton.core.lifecycles import BlockState
from baton.wire.handover import ArenaRef, TicketBlock


@dataclass(frozen=True, slots=True)
class BlockMark:
    """One block's metadata, as the owner wants it."""

    block: int
    state: BlockState
    generation: int
    epoch: int = 0
    writer: int = 0
    """Incarnation that may store into it; 0: the owner alone."""
    chain: bytes = b""
    """Prefix-chain hash (16 bytes) of the tokens up to and including this block, if it is full
    and its bytes are known to be right."""
    checksum: int = 0
    """Of a block with a chain: whoever reads both can verify the bytes."""
    filled: int = 0
    request_key: int = 0
    """64 bits that name the request to people and audits; no rule rests on it. 0: none."""


@dataclass(frozen=True, slots=True)
class BlockCheck:
    """One block whose checksum is to be made, or compared with ``checksum``."""

    logical: int
    """Its number among the blocks asked about: names it in the answer."""
    block: int
    tokens: int
    """Filled tokens, 1..block_size."""
    chain: bytes
    """Name of the block (``baton.core.prefix.block_names``, 16 bytes): the checksum's seed."""
    checksum: int = 0


class OwnArena(Protocol):
    """The owner's side. Opened before the process announces itself.

    It is new and zero, or one that a dead incarnation of the same worker left, taken over in place:
    memory and metadata are as they were, the file is the same, and writers that live go on holding
    it. Of two that start at once only one gets it. A take-over that is not completed is counted;
    an arena whose take-overs fail again and again is replaced by a new one.
    """

    ref: ArenaRef
    blocks_total: int
    former: Peer | None
    """Whose arena was taken over; ``None``: it is new."""

    @property
    def memory(self) -> Any:
        """All blocks, writable: ``blocks_total * layout.block_bytes``. A memoryview; on a device
        what ``DeviceBlocks.memory`` is."""
        ...

    def mark(self, marks: Sequence[BlockMark]) -> None:
        """Store metadata, in order."""
        ...

    def marked(self, block: int) -> BlockMark:
        """Return what the metadata says of one block.

        Raises:
            ValueError: nothing that this version could have stored.
        """
        ...

    def complete(self) -> None:
        """The take-over is done: what it may have failed by is behind us."""
        ...

    def verify(self, checks: Sequence[BlockCheck]) -> list[int]:
        """Return the logical numbers of the blocks whose bytes do not match. Thread-safe."""
        ...

    def checksums(self, checks: Sequence[BlockCheck]) -> list[int]:
        """Return the checksum of each block's filled tokens. Thread-safe."""
        ...

    def writer_alive(self, incarnation: int) -> bool:
        """Whether the kernel still shows that incarnation's lock (ADR 0003), or, on a device, it
        is not proved that what it launched is over (ADR 0027)."""
        ...

    def close(self, *, unlink: bool) -> None: ...


class MappedArena(Protocol):
    """The writer's side of somebody else's arena."""

    ref: ArenaRef

    @property
    def memory(self) -> Any: ...

    def may_write(self, epoch: int, blocks: Sequence[TicketBlock]) -> bool:
        """Whether every block is FILLING, of that generation and epoch, and for this process."""
        ...

    def checksums(self, checks: Sequence[BlockCheck]) -> list[int]:
        """Return the checksum of each block's filled tokens."""
        ...

    def close(self) -> None: ...


class Channel(Protocol):
    """Opens other processes' arenas."""

    def map(self, ref: ArenaRef, me: Peer) -> MappedArena:
        """Map ``ref``, after locking this incarnation's byte in it. Idempotent per arena.

        A file that is mapped already stays so when its owner has changed: the same mapping then has
        the new ``ref``.

        Raises:
            ArenaGone: the file is not the one ``ref`` names, or its layout differs.
        """
        ...


@dataclass(frozen=True, slots=True)
class NamedBlock:
    """What the records of a foreign arena say of one name."""

    block: int
    checksum: int


class SourceArena(Protocol):
    """Another decode worker's arena on this host, opened to copy from it.

    Its owner may be alive, frozen, dead or replaced, and may store while it is read: nothing read
    here is believed before the copy matched the checksum, seeded with the name that was asked for.
    """

    def find(self, names: Sequence[bytes]) -> list[NamedBlock | None]:
        """Return where the records say that each name is now."""
        ...

    def copy(self, block: int, target: Any) -> bool:
        """Copy one block into ``target`` (``block_bytes``, of memory like the source's); return
        whether all of it was there."""
        ...

    def close(self) -> None: ...


class Sources(Protocol):
    """Finds other workers' arenas on this host by their names."""

    def open(self, worker_id: str) -> SourceArena:
        """Open the arena of ``worker_id``, whoever owns it now.

        Raises:
            ArenaGone: there is none, or its KV is not of this process's model, layout and kernels.
        """
        ...


class ArenaGone(OSError):
    """The arena does not exist (any more), is not the one that was named, or does not fit."""


class ArenaTooSmall(OSError):
    """The shared memory cannot hold the configured arena; the text holds both sizes."""


class ArenaInUse(OSError):
    """Another live incarnation owns this arena."""
