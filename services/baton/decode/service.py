"""Puts one decode process together: engine, arena, its threads, the machine.

Decides the order: the arena is there (a dead incarnation's, if there is one) and the engine warm
before anybody knows of this process.
"""

from __future__ import annotations

import asyncio

from baton.channel.arena import SharedArena
from baton.channel.on_device import OnDevice
from baton.channel.sources import ShmSources
from baton.core.ids import WorkerRole
from baton.core.pages import Pages
from baton.core.prefix import chain_root
from baton.decode.io import ImportBlocks, MarkBlocks, ProbeWriter, RunStep, VerifyBlocks
from baton.decode.machine import DecodeMachine
from baton.decode.takeover import TakenOver, take_stock
from baton.decode.work import Turns, bring, probe, run_step, verify
from baton.ports.driving import RecordStep
from baton.runtime.dirs import arenas_name
from baton.runtime.engine_thread import EngineThread
from baton.runtime.model import ServedModel
from baton.runtime.service import Context, Service
from baton.runtime.worker import (
    blocks_place,
    huge_gauges,
    may_borrow,
    open_step_record,
    preload,
    share_of,
    take_engine,
    weight_facts,
)

__all__ = ["build", "preload"]

STOP_S = 1.5
#: How long a keeper of device memory that was started anew has nothing of this worker's.
OFFER_S = 2.0
#: Up to this much is verified on the loop, in about half a millisecond: the way to the verifying
#: thread and back takes as long, and it is on the way to the first token of decode.
VERIFY_HERE_BYTES = 6 * 2**20


def build(context: Context) -> Service:
    """Make the decode service.

    Raises:
        StartFailed: the model is not prepared.
        ArenaTooSmall, ArenaInUse: the arena cannot be had.
    """
    config = context.config
    loaded = take_engine(context)
    engine, model = loaded.engine, loaded.model
    place = blocks_place(context, model)
    arena, pages, found = _open_arena(context, model, place)
    cluster = arenas_name(config.cluster.name, context.run_dir)
    sources = ShmSources(config.arena.dir, cluster, model.layout, model.compat, place=place)
    engine.attach(arena.ref.file_id, arena.memory)
    record = open_step_record(context)
    machine = DecodeMachine(
        context.me,
        config.limits,
        arena.ref,
        blocks_total=arena.blocks_total,
        block_size=model.layout.block_size,
        block_bytes=model.layout.block_bytes,
        root=chain_root(repr(model.compat)),
        slo=config.adaptive_slo(),
        found=found,
        left=record.left,
        rehearsed=loaded.rehearsed,
        mixed=context.worker_role is WorkerRole.MIXED,
    )
    steps = EngineThread(context.feed, context.crash, context.clock)
    checks = EngineThread(context.feed, context.crash, context.clock, name="verify")
    turns = Turns(checks.submit)
    serves = found is None
    offers: asyncio.TimerHandle | None = None

    async def start() -> None:
        nonlocal serves
        serves = True
        if found is not None and found.damaged:
            context.metrics.measure("integrity_failures_total", found.damaged)
        arena.complete()
        if place is not None:
            offer()

    def offer() -> None:
        """The keeper may have been started anew."""
        nonlocal offers
        checks.submit(arena.offer)
        offers = context.loop.call_later(OFFER_S, offer)

    async def stop() -> None:
        if offers is not None:
            offers.cancel()
        idle = await steps.stop(STOP_S) and await checks.stop(STOP_S)
        if idle:
            # A thread that hangs in native code may still store: then the mapping stays until the
            # process ends, and the next start takes the file over.
            engine.detach(arena.ref.file_id)
            if not serves:
                # No ledger, or somebody's wish: nothing that the arena is to blame for. The next
                # start finds it as this one did.
                arena.complete()
            arena.close(unlink=serves and not machine.leaving)

    def run(command: RunStep) -> None:
        engine.claim()
        steps.submit(lambda: run_step(engine, arena, command, context.clock))

    token_bytes = model.layout.block_bytes // model.layout.block_size

    def check(command: VerifyBlocks) -> None:
        tokens = sum(item.tokens for item in command.checks)
        if tokens * token_bytes <= VERIFY_HERE_BYTES:
            context.feed(verify(arena, command, context.clock))
        else:
            checks.submit(lambda: verify(arena, command, context.clock))

    def mark(command: MarkBlocks) -> None:
        arena.mark(command.marks)

    def bring_in(command: ImportBlocks) -> None:
        checks.submit(lambda: turns.add(bring(arena, sources, command, context.clock)))

    def look(command: ProbeWriter) -> None:
        context.feed(probe(arena, command))

    return Service(
        machine=machine,
        executors={
            RecordStep: record.write,
            RunStep: run,
            VerifyBlocks: check,
            ImportBlocks: bring_in,
            MarkBlocks: mark,
            ProbeWriter: look,
        },
        compat=model.compat,
        model_name=model.name,
        on_start=start,
        on_stop=stop,
        gauges=huge_gauges(weights=engine.weight_pages, arena=pages),
        facts=lambda: {
            "weights": weight_facts(engine),
            "may_borrow": may_borrow(context.placement, model.kernels),
            "arena": {
                "path": arena.ref.path,
                "blocks": arena.blocks_total,
                "bytes": arena.blocks_total * model.layout.block_bytes,
                "huge_share": share_of(pages),
                "dtype": model.layout.dtype,
                "taken_over": None if found is None else found.describe(),
            },
        },
    )


def _open_arena(
    context: Context, model: ServedModel, place: OnDevice | None
) -> tuple[SharedArena, Pages | None, TakenOver | None]:
    """Take over what a dead incarnation of this worker left, or make a new arena."""
    config, clock = context.config, context.clock
    began = clock.now()
    arena = SharedArena.open(
        config.arena.dir,
        arenas_name(config.cluster.name, context.run_dir),
        context.me,
        model.layout,
        model.compat,
        size_mb=config.arena.size_mb,
        tries_max=config.limits.takeover_tries_max,
        place=place,
    )
    pages = arena.pages()
    if arena.former is None:
        context.log.info(
            "arena_created",
            blocks=arena.blocks_total,
            huge_share=share_of(pages),
            note=arena.size_note,
        )
        return arena, pages, None
    layout = model.layout
    opened = clock.now()
    found = take_stock(
        arena, layout.block_size, layout.block_bytes, config.limits.takeover_verify_mb
    )
    context.log.info(
        "arena_taken_over",
        **found.describe(),
        tokens=found.kept * layout.block_size,
        map_s=round(opened - began, 3),
        verify_s=round(clock.now() - opened, 3),
        huge_share=share_of(pages),
        note=arena.size_note,
    )
    return arena, pages, found
