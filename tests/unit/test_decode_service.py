"""What a decode process does with its arena at the end of a start, and of a life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from baton.channel.arena import SharedArena
from baton.core.ids import Peer, Role, WorkerRole
from baton.core.lifecycles import BlockState
from baton.decode import service
from baton.ports.channel import BlockCheck, BlockMark
from baton.ports.driving import RecordStep
from baton.runtime import config as configuration
from baton.runtime.clock import BootClock
from baton.runtime.cores import Placement
from baton.runtime.dirs import arenas_name
from baton.runtime.service import Context, Service
from baton.runtime.worker import Loaded
from support.channel_fixtures import shared_directory

NAME = b"n" * 16


@dataclass
class Host:
    """A host on which decode-0 starts again and again."""

    arenas: Path
    run_dir: Path
    starts: int = 0

    def __post_init__(self) -> None:
        environ = {
            "BATON_ARENA_DIR": str(self.arenas),
            "BATON_ARENA_SIZE_MB": "1",
            "BATON_ENGINE_KIND": "fake",
            "BATON_CLUSTER_RUN_DIR": str(self.run_dir),
        }
        self.config = configuration.load(None, environ)
        loaded = service.preload(self.config, structlog.get_logger())
        assert isinstance(loaded, Loaded)
        self.loaded = loaded

    def start(self, loop: asyncio.AbstractEventLoop) -> Service:
        """Build the service of the next incarnation."""
        self.starts += 1
        nobody: Callable[..., Any] = lambda *_: None  # noqa: E731
        return service.build(
            Context(
                config=self.config,
                role=Role.DECODE,
                me=Peer("decode-0", self.starts),
                run_dir=self.run_dir,
                placement=Placement((), 1),
                clock=BootClock(),
                loop=loop,
                log=structlog.get_logger(),
                feed=nobody,
                crash=nobody,
                end=nobody,
                worker_role=WorkerRole.DECODE,
                preloaded=self.loaded,
            )
        )

    def leave_a_block(self) -> None:
        """Be an incarnation that dies with a named block in its arena."""
        self.starts += 1
        model, me = self.loaded.model, Peer("decode-0", self.starts)
        layout = model.layout
        place = self.config.arena.dir, arenas_name(self.config.cluster.name, self.run_dir)
        arena = SharedArena.open(*place, me, layout, model.compat, size_mb=1)
        (found,) = arena.checksums([BlockCheck(0, 0, layout.block_size, NAME)])
        arena.mark([BlockMark(0, BlockState.RESIDENT, 1, chain=NAME, checksum=found)])
        arena.close(unlink=False)

    def files(self) -> list[Path]:
        return list(self.arenas.iterdir())


async def end(made: Service) -> None:
    """End in order, as the process would; what its end closes is closed here."""
    await made.on_stop()
    record: Any = made.executors[RecordStep]
    record.__self__.close()


def kept(made: Service) -> int:
    """Blocks that were taken over."""
    facts: Any = made.facts()
    return int((facts["arena"]["taken_over"] or {"kept": 0})["kept"])


def test_starts_that_fail_for_want_of_others_keep_what_they_found(tmp_path: Path) -> None:
    """A ledger that is away for long has a worker begin many times; none of that is the arena's
    fault, and the requests of its former owner are still in it."""

    async def live(host: Host) -> None:
        host.leave_a_block()
        for _ in range(host.config.limits.takeover_tries_max + 1):
            made = host.start(asyncio.get_running_loop())
            assert kept(made) == 1
            await end(made)
        made = host.start(asyncio.get_running_loop())
        assert kept(made) == 1
        await made.on_start()
        await end(made)
        assert host.files() == []

    with shared_directory() as directory:
        asyncio.run(live(Host(directory, tmp_path)))


def test_a_worker_tells_how_its_memory_lies(tmp_path: Path) -> None:
    """Status, metrics and the start-up log agree on how much is in huge pages; the fake engine has
    no file of weights, and this arena is smaller than one huge page."""

    async def live(host: Host) -> None:
        with structlog.testing.capture_logs() as logged:
            made = host.start(asyncio.get_running_loop())
        facts: Any = made.facts()
        assert facts["weights"] is None and facts["arena"]["huge_share"] == 0.0
        assert made.gauges == {"huge_pages_ratio:arena": 0.0}
        (created,) = (line for line in logged if line["event"] == "arena_created")
        assert created["huge_share"] == 0.0
        await end(made)

    with shared_directory() as directory:
        asyncio.run(live(Host(directory, tmp_path)))


def test_a_start_that_fails_leaves_no_arena_of_its_own(tmp_path: Path) -> None:
    """There is nothing in it for anybody."""

    async def live(host: Host) -> None:
        made = host.start(asyncio.get_running_loop())
        assert kept(made) == 0 and len(host.files()) == 1
        await end(made)
        assert host.files() == []

    with shared_directory() as directory:
        asyncio.run(live(Host(directory, tmp_path)))
