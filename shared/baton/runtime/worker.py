"""What prefill and decode processes share in their making: the engine, and the step record."""

from __future__ import annotations

from pathlib import Path

from baton.engine.build import build_engine
from baton.engine.fake import FakeKnobs
from baton.engine.stop_points import FileStopPoints
from baton.ports.engine import Engine
from baton.runtime.model import ServedModel
from baton.runtime.service import Context, StartFailed
from baton.runtime.step_record import StepRecord, StepRecordInUse, record_path


def open_step_record(context: Context) -> StepRecord:
    """Open the record of this worker's steps, and log what its former incarnation left there.

    Raises:
        StartFailed: a former incarnation is still there.
    """
    try:
        record = StepRecord(record_path(context.run_dir, context.me.worker_id), context.me)
    except StepRecordInUse as error:
        raise StartFailed(str(error), permanent=False) from None
    if record.left is not None and record.left.attempts:
        context.log.warning(
            "died_in_a_step",
            former=record.left.peer,
            request_ids=[each.request_id for each in record.left.attempts],
        )
    return record


def make_engine(context: Context, model: ServedModel) -> Engine:
    """Return the engine of this process; loads the weights."""
    config = context.config
    fake = config.fake
    began = context.clock.now()
    engine = build_engine(
        model.folder,
        dtype=config.model.dtype,
        block_size=config.arena.block_size,
        threads=context.placement.threads,
        kind=config.engine.kind,
        kernels=model.kernels,
        knobs=FakeKnobs(
            prefill_ms=fake.prefill_ms,
            step_ms=fake.step_ms,
            write_ms=fake.write_ms,
            eos_every=fake.eos_every,
        ),
        stops=FileStopPoints(Path(fake.stops_dir)) if fake.stops_dir else None,
    )
    context.log.info(
        "engine_loaded",
        kind=config.engine.kind,
        model=model.name,
        dtype=model.layout.dtype,
        kernels=engine.kernels,
        kernels_note=model.kernels.note,
        threads=context.placement.threads,
        seconds=round(context.clock.now() - began, 3),
    )
    return engine
