"""What prefill and decode processes share in their making: the engine, and the step record.

Decides that the guard makes the engine and warms it up: every incarnation of the worker inherits
mapped weights, allocations and what was looked up for the first step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from baton.channel.keeping import KeeperLink
from baton.channel.on_device import OnDevice
from baton.core.pages import Pages
from baton.core.step_times import Rehearsed
from baton.engine.build import build_device, build_engine
from baton.engine.fake import FakeKnobs
from baton.engine.info import ModelNotPrepared, ModelRefused
from baton.engine.kernels import KernelChoice
from baton.engine.stop_points import FileStopPoints
from baton.ports.device import DeviceMissing
from baton.ports.engine import Engine, SharedCores
from baton.runtime import core_board
from baton.runtime.clock import BootClock
from baton.runtime.core_board import NoCoreBoard, open_core_board
from baton.runtime.cores import Placement
from baton.runtime.dirs import run_dir
from baton.runtime.logs import FilteringBoundLogger
from baton.runtime.model import ServedModel, served_model
from baton.runtime.service import Context, StartFailed
from baton.runtime.settings import Config
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


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a guard loaded for its worker."""

    model: ServedModel
    engine: Engine
    rehearsed: Rehearsed = ()
    """What steps took when the engine was warmed up, with one thread."""


def preload(config: Config, log: FilteringBoundLogger) -> Loaded | StartFailed:
    """Return the engine for all incarnations of this worker, or what they are to fail with.

    Starts no thread, so that the worker can be forked from whoever calls this.
    """
    if config.engine.device == "cuda":
        # Libraries ask torch whether there is a device when they are imported. By default it then
        # asks the driver, after which no process that is forked can use the device.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        return _load(config, served_model(config, run_dir(config)), log)
    except (ModelNotPrepared, ModelRefused, DeviceMissing) as error:
        return StartFailed(str(error), permanent=True)


def take_engine(context: Context) -> Loaded:
    """Return what was loaded: the engine computes with this process's threads from now on.

    Raises:
        StartFailed: the model is not prepared, or cannot run on its device.
    """
    loaded: Loaded | StartFailed = context.preloaded
    if isinstance(loaded, StartFailed):
        raise loaded
    try:
        loaded.engine.use_threads(context.placement.threads, _share_cores(context, loaded.model))
    except (DeviceMissing, ModelRefused) as error:
        raise StartFailed(str(error), permanent=True) from None
    # What one thread took says little of several.
    return loaded if context.placement.threads == 1 else replace(loaded, rehearsed=())


def blocks_place(context: Context, model: ServedModel) -> OnDevice | None:
    """Return where arenas' blocks are, if not in their files.

    Raises:
        StartFailed: the device is not there.
    """
    if model.layout.place == "host":
        return None
    try:
        device = build_device(context.config.engine.device)
    except DeviceMissing as error:
        raise StartFailed(str(error), permanent=True) from None
    context.log.info("device_opened", device=device.name, free_bytes=device.free_bytes())
    if os.getpid() not in (device.processes() or ()):
        # Deaths on this device can never be proved (ADR 27).
        context.log.warning("device_pids_hidden", device=device.name)
    return OnDevice(device, KeeperLink(context.run_dir))


def huge_gauges(**mapped: Pages | None) -> dict[str, float]:
    """Return the gauges that tell how much of what this worker has mapped lies in huge pages."""
    known = {name: pages for name, pages in mapped.items() if pages is not None}
    return {f"huge_pages_ratio:{name}": pages.huge_share for name, pages in known.items()}


def weight_facts(engine: Engine) -> dict[str, object] | None:
    """Return what ``baton status`` tells of the weights; ``None`` where they are no mapped file."""
    pages = engine.weight_pages
    return None if pages is None else {"bytes": pages.total_bytes, "huge_share": share_of(pages)}


def share_of(pages: Pages | None) -> float | None:
    """Return the share in huge pages as logs and ``baton status`` show it."""
    return None if pages is None else round(pages.huge_share, 3)


def may_borrow(placement: Placement, kernels: KernelChoice) -> tuple[int, ...]:
    """Return the cores of other workers on which a worker with these kernels may compute."""
    return placement.borrows if kernels.packed is not None else ()


def _share_cores(context: Context, model: ServedModel) -> SharedCores | None:
    """Open the core board, if there is anything to borrow for this worker.

    Raises:
        StartFailed: what lies there is no core board.
    """
    own, borrows = context.placement.cores, may_borrow(context.placement, model.kernels)
    if not borrows:
        return None
    try:
        lines = open_core_board(context.run_dir / core_board.FILE, own)
    except NoCoreBoard as error:
        raise StartFailed(str(error), permanent=True) from None
    context.log.info("cores_shared", own=list(own), may_borrow=list(borrows))
    return SharedCores(lines, own, borrows)


def _load(config: Config, model: ServedModel, log: FilteringBoundLogger) -> Loaded:
    fake, clock = config.fake, BootClock()
    began = clock.now()
    engine = build_engine(
        model.folder,
        dtype=model.layout.dtype,
        block_size=config.arena.block_size,
        # With one thread nothing that is computed while loading makes a pool of threads.
        threads=1,
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
    rehearsed = engine.warm_up()
    log.info(
        "engine_loaded",
        kind=config.engine.kind,
        model=model.name,
        dtype=model.layout.dtype,
        kernels=engine.kernels,
        kernels_note=model.kernels.note,
        huge_share=share_of(engine.weight_pages),
        seconds=round(clock.now() - began, 3),
    )
    return Loaded(model, engine, rehearsed)
