"""Puts one prefill process together: engine, channel, its thread, the machine."""

from __future__ import annotations

from pathlib import Path

from baton.channel import files
from baton.channel.shm import ShmChannel
from baton.core.prefix import chain_root
from baton.ports.driving import RecordStep
from baton.prefill.io import MapArena, RunChunk, UnmapArena
from baton.prefill.machine import PrefillMachine
from baton.prefill.work import ChunkWorker
from baton.runtime.dirs import arenas_name
from baton.runtime.engine_thread import EngineThread
from baton.runtime.service import Context, Service
from baton.runtime.worker import (
    blocks_place,
    huge_gauges,
    may_borrow,
    open_step_record,
    preload,
    take_engine,
    weight_facts,
)

__all__ = ["build", "preload"]

STOP_S = 1.5


def build(context: Context) -> Service:
    """Make the prefill service.

    Raises:
        StartFailed: the model is not prepared.
        ArenaInUse: a former incarnation, which decoded, still has its arena.
    """
    config = context.config
    # This worker may have been a decode worker, and have died as one: nobody takes it over now.
    cluster = arenas_name(config.cluster.name, context.run_dir)
    former = files.arena_path(Path(config.arena.dir), cluster, context.me.worker_id)
    if files.remove_unowned(former):
        context.log.info("arena_given_up", path=str(former))
    loaded = take_engine(context)
    engine, model = loaded.engine, loaded.model
    place = blocks_place(context, model)
    if place is not None:
        place.forget(former.name)
    channel = ShmChannel(model.layout, model.compat, place)
    worker = ChunkWorker(engine, channel, context.me, context.clock)
    record = open_step_record(context)
    machine = PrefillMachine(
        context.me,
        config.limits,
        block_size=model.layout.block_size,
        root=chain_root(repr(model.compat)),
        left=record.left,
        rehearsed=loaded.rehearsed,
    )
    # One thread for chunks and mappings: a mapping never goes while a chunk stores into it.
    thread = EngineThread(context.feed, context.crash, context.clock)

    async def stop() -> None:
        await thread.stop(STOP_S)

    def run(command: RunChunk) -> None:
        engine.claim()
        thread.submit(lambda: worker.run(command, thread.tell))

    def map_arena(command: MapArena) -> None:
        thread.submit(lambda: worker.map(command))

    def unmap(command: UnmapArena) -> None:
        thread.submit(lambda: worker.unmap(command))

    return Service(
        machine=machine,
        executors={
            RecordStep: record.write,
            RunChunk: run,
            MapArena: map_arena,
            UnmapArena: unmap,
        },
        compat=model.compat,
        model_name=model.name,
        on_stop=stop,
        gauges=huge_gauges(weights=engine.weight_pages),
        facts=lambda: {
            "weights": weight_facts(engine),
            "may_borrow": may_borrow(context.placement, model.kernels),
        },
    )
