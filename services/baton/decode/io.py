"""What only the decode machine asks for and hears of, beside ``baton.ports.driving``."""

from __future__ import annotations

from dataclasses import dataclass

from baton.ports.channel import BlockCheck, BlockMark
from baton.ports.engine import Row, Sampled


@dataclass(frozen=True, slots=True)
class MarkBlocks:
    """Command: store block metadata. Comes before any message that relies on it."""

    marks: tuple[BlockMark, ...]


@dataclass(frozen=True, slots=True)
class VerifyBlocks:
    """Command: compare checksums in the verifying thread; answered by :class:`BlocksVerified`."""

    request_id: str
    epoch: int
    checks: tuple[BlockCheck, ...]


@dataclass(frozen=True, slots=True)
class BlocksVerified:
    """Event: ``bad`` are the logical numbers whose bytes are not what was announced."""

    request_id: str
    epoch: int
    checks: tuple[BlockCheck, ...]
    bad: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class ImportBlocks:
    """Command: copy these blocks from the arena of ``source``, each verified on its copy; answered
    by :class:`BlocksImported`. The targets are the copying thread's until then."""

    request_id: str
    epoch: int
    source: str
    """A ``worker_id``: whoever owns, or owned, that arena."""
    targets: tuple[BlockCheck, ...]
    """Own blocks, and the names of what they take; a sequence's, in order."""


@dataclass(frozen=True, slots=True)
class BlocksImported:
    """Event: nothing stores into the targets any more; the first of them verified."""

    request_id: str
    epoch: int
    sums: tuple[int, ...]
    """Checksums of the leading targets that verified; what the others hold is of no use."""
    seconds: float
    why: str = ""
    """What ended it before the last target, for people."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """Command: run one engine step, then make the checksums of the blocks that it fills.

    Answered by :class:`StepFinished` or :class:`StepFailed`.
    """

    step: int
    rows: tuple[Row, ...]
    seals: tuple[tuple[BlockCheck, ...], ...]
    """One for each row: the blocks that are full after it."""
    borrows: bool = True
    """Whether it may have cores of other workers."""


@dataclass(frozen=True, slots=True)
class StepFinished:
    """Event: the step returned; nothing touches the arena on its behalf any more."""

    step: int
    results: tuple[Sampled | None, ...]
    checksums: tuple[tuple[int, ...], ...]
    """One for each row: of the blocks that it filled."""
    seconds: float
    """Of the engine's part."""
    borrowed: float = 0.0
    """For which share of it cores of other workers were borrowed."""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """Event: the rows named have no result; the others may be stepped again in place."""

    step: int
    request_ids: tuple[str, ...]
    error: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class ProbeWriter:
    """Command: look at a writer's lock; answered by :class:`WriterProbed`."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class WriterProbed:
    """Event: whether the kernel shows that incarnation's lock."""

    incarnation: int
    alive: bool
