"""What decode's threads do for its machine: steps, verification, looks at locks.

Decides nothing; each function turns a command into the event that answers it. The process and the
simulator both call these, so what is simulated is what runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from baton.decode.io import (
    BlocksImported,
    BlocksVerified,
    ImportBlocks,
    ProbeWriter,
    RunStep,
    StepFailed,
    StepFinished,
    VerifyBlocks,
    WriterProbed,
)
from baton.ports.channel import ArenaGone, BlockCheck, NamedBlock, OwnArena, SourceArena, Sources
from baton.ports.clock import Clock
from baton.ports.engine import Engine
from baton.ports.engine import StepFailed as EngineStepFailed

#: Copied between two looks at what else the thread has to do: 3 MB of the default model.
PIECE_BLOCKS = 8


def run_step(
    engine: Engine, arena: OwnArena, command: RunStep, clock: Clock
) -> StepFinished | StepFailed:
    """Run one step. Anything but a :class:`StepFailed` of the engine is a bug and is raised."""
    began = clock.now()
    engine.borrows = command.borrows
    try:
        results = engine.step(command.rows)
    except EngineStepFailed as error:
        return StepFailed(command.step, error.request_ids, str(error), error.retryable)
    seconds = clock.now() - began
    sums = tuple(tuple(arena.checksums(checks)) for checks in command.seals)
    return StepFinished(command.step, tuple(results), sums, seconds, engine.borrowed)


def verify(arena: OwnArena, command: VerifyBlocks, clock: Clock) -> BlocksVerified:
    """Compare the announced checksums with the bytes that are there."""
    began = clock.now()
    bad = tuple(arena.verify(command.checks))
    return BlocksVerified(
        command.request_id, command.epoch, command.checks, bad, clock.now() - began
    )


def probe(arena: OwnArena, command: ProbeWriter) -> WriterProbed:
    """Ask the kernel whether that incarnation still holds its lock."""
    return WriterProbed(command.incarnation, arena.writer_alive(command.incarnation))


def bring(
    arena: OwnArena, sources: Sources, command: ImportBlocks, clock: Clock
) -> Iterator[BlocksImported | None]:
    """Import blocks, as far as they are there without a gap. Yields ``None`` after each piece, so
    that others get their turn in the thread, and the answer last."""
    began = clock.now()
    sums: list[int] = []
    why = ""
    try:
        source = sources.open(command.source)
    except ArenaGone as error:
        why = str(error)
    else:
        found = source.find([target.chain for target in command.targets])
        for target, named in zip(command.targets, found, strict=True):
            why = _bring_one(arena, source, target, named)
            if why or named is None:
                break
            sums.append(named.checksum)
            if len(sums) % PIECE_BLOCKS == 0:
                yield None
        source.close()
    seconds = clock.now() - began
    yield BlocksImported(command.request_id, command.epoch, tuple(sums), seconds, why)


class Turns:
    """Imports one after the other, so that the first is soon done, with other work of the thread
    between their pieces. Belongs to that thread."""

    def __init__(self, submit: Callable[[Callable[[], object]], None]) -> None:
        """``submit`` queues work in the thread and feeds what it returns."""
        self._submit = submit
        self._imports: deque[Iterator[BlocksImported | None]] = deque()

    def add(self, pieces: Iterator[BlocksImported | None]) -> None:
        self._imports.append(pieces)
        if len(self._imports) == 1:
            self._submit(self._piece)

    def _piece(self) -> BlocksImported | None:
        event = next(self._imports[0])
        if event is not None:
            self._imports.popleft()
        if self._imports:
            self._submit(self._piece)
        return event


def _bring_one(
    arena: OwnArena, source: SourceArena, target: BlockCheck, named: NamedBlock | None
) -> str:
    """Copy one block and verify the copy, which nobody else can change; return what is wrong."""
    if named is None:
        return f"block {target.logical} is not there"
    size = len(arena.memory) // arena.blocks_total
    at = target.block * size
    if not source.copy(named.block, arena.memory[at : at + size]):
        return f"block {target.logical} is cut off"
    if arena.verify([replace(target, checksum=named.checksum)]):
        return f"block {target.logical} does not match its checksum"
    return ""
