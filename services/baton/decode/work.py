"""What decode's threads do for its machine: steps, verification, looks at locks.

Decides nothing; each function turns a command into the event that answers it. The process and the
simulator both call these, so what is simulated is what runs.
"""

from __future__ import annotations

from baton.decode.io import (
    BlocksVerified,
    ProbeWriter,
    RunStep,
    StepFailed,
    StepFinished,
    VerifyBlocks,
    WriterProbed,
)
from baton.ports.channel import OwnArena
from baton.ports.clock import Clock
from baton.ports.engine import Engine
from baton.ports.engine import StepFailed as EngineStepFailed


def run_step(
    engine: Engine, arena: OwnArena, command: RunStep, clock: Clock
) -> StepFinished | StepFailed:
    """Run one step. Anything but a :class:`StepFailed` of the engine is a bug and is raised."""
    began = clock.now()
    try:
        results = engine.step(command.rows)
    except EngineStepFailed as error:
        return StepFailed(command.step, error.request_ids, str(error), error.retryable)
    seconds = clock.now() - began
    sums = tuple(tuple(arena.checksums(checks)) for checks in command.seals)
    return StepFinished(command.step, tuple(results), sums, seconds)


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
