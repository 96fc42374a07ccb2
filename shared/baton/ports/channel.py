"""The KV channel on one host: arenas, tickets, proof of death.

Two sides. The *owner* (decode) creates its arena and is the only writer of its metadata. A *writer*
(prefill) maps it, looks at the metadata before each chunk, and stores only into blocks that are
FILLING for it. Held by ``tests/conformance/test_channel.py`` (real and simulated).

Metadata record of a block: its first 8 bytes hold generation, state and filled count and are
stored at once (one aligned store); the other fields are written before it. Readers look at it
after a message, never in a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.ids import Peer
from baton.core.lifecycles import BlockState
from baton.wire.messages import ArenaRef, TicketBlock


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
    """The owner's side. Created before the process announces itself."""

    ref: ArenaRef
    blocks_total: int

    @property
    def memory(self) -> memoryview:
        """All blocks, writable: ``blocks_total * layout.block_bytes``."""
        ...

    def mark(self, marks: Sequence[BlockMark]) -> None:
        """Store metadata, in order."""
        ...

    def verify(self, checks: Sequence[BlockCheck]) -> list[int]:
        """Return the logical numbers of the blocks whose bytes do not match. Thread-safe."""
        ...

    def checksums(self, checks: Sequence[BlockCheck]) -> list[int]:
        """Return the checksum of each block's filled tokens. Thread-safe."""
        ...

    def writer_alive(self, incarnation: int) -> bool:
        """Whether the kernel still shows that incarnation's lock (ADR 0003)."""
        ...

    def close(self, *, unlink: bool) -> None: ...


class MappedArena(Protocol):
    """The writer's side of somebody else's arena."""

    ref: ArenaRef

    @property
    def memory(self) -> memoryview: ...

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

        Raises:
            ArenaGone: the file is not the one ``ref`` names, or its layout differs.
        """
        ...


class ArenaGone(OSError):
    """The arena named by a ticket does not exist any more, or is not the one it was."""


class ArenaTooSmall(OSError):
    """The shared memory cannot hold the configured arena; the text holds both sizes."""


class ArenaInUse(OSError):
    """Another live incarnation owns this arena."""
