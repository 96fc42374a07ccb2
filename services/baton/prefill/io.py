"""What only the prefill machine asks for and hears of, beside ``baton.ports.driving``."""

from __future__ import annotations

from dataclasses import dataclass

from baton.ports.channel import BlockCheck
from baton.ports.engine import Row, Sampled
from baton.wire.handover import ArenaRef, TicketBlock


@dataclass(frozen=True, slots=True)
class MapArena:
    """Command: lock and map a decode worker's arena; answered by :class:`ArenaOpened`."""

    ref: ArenaRef


@dataclass(frozen=True, slots=True)
class ArenaOpened:
    """Event: mapped and known to the engine, or not (``error`` says why)."""

    ref: ArenaRef
    error: str = ""


@dataclass(frozen=True, slots=True)
class UnmapArena:
    """Command: its owner is gone and no step uses it: drop engine views, then the mapping."""

    file_id: str


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """One request's part of a chunk: the fence to look at before, the sums to make once stored."""

    row: Row
    epoch: int
    targets: tuple[TicketBlock, ...]
    """Blocks this chunk stores into: each must be FILLING for us when the chunk starts."""
    checks: tuple[BlockCheck, ...]
    """Blocks that are complete after it; ``checksum`` is to be made."""


@dataclass(frozen=True, slots=True)
class RunChunk:
    """Command: look at the fences, run the rows that pass, checksum what they completed.

    Answered by :class:`ChunkStored`, unless nothing was stored, and by :class:`ChunkFinished`.
    """

    step: int
    rows: tuple[ChunkRow, ...]


@dataclass(frozen=True, slots=True)
class ChunkStored:
    """Event: nothing of this chunk stores any more; what it is waited for are first tokens."""

    step: int
    checksums: tuple[tuple[int, ...] | None, ...]
    """One for each row, of the blocks that it completed; ``None``: it stored nothing to keep."""
    last_write_ns: int
    """CLOCK_BOOTTIME when the engine had stored the last K and V."""
    sums_seconds: float
    """Of the checksums."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What became of one row."""

    fenced: bool = False
    """The blocks were no longer ours: nothing was stored."""
    failed: str = ""
    """The engine blames this row."""
    retryable: bool = True
    sampled: Sampled | None = None


@dataclass(frozen=True, slots=True)
class ChunkFinished:
    """Event: the chunk is over; nothing of this process touches its blocks any more."""

    step: int
    results: tuple[ChunkResult, ...]
    seconds: float
    """Of the engine's part."""
    ended_ns: int
    """CLOCK_BOOTTIME when the engine returned."""
    borrowed: float = 0.0
    """For which share of the engine's part cores of other workers were borrowed."""
