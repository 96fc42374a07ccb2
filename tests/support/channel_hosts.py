"""One host to run the channel's conformance suite on: the real kernel, or the simulated one."""

from __future__ import annotations

from pathlib import Path

from baton.channel.arena import SharedArena
from baton.channel.files import reclaim_unlocked
from baton.channel.shm import ShmArena, ShmChannel
from baton.channel.sources import ShmSource, ShmSources
from baton.core.ids import Compat, Peer
from baton.ports.channel import BlockCheck, SourceArena
from baton.ports.engine import KVLayout
from baton.sim.channel import SimArena, SimChannel, SimHost, SimMapped, SimSources
from support.channel_parts import COMPAT, LAYOUT, OWNER, check_of


def copied(source: SourceArena, block: int) -> bytes | None:
    target = memoryview(bytearray(LAYOUT.block_bytes))
    return bytes(target) if source.copy(block, target) else None


class RealHost:
    """Real files; dying is closing everything, which is what the kernel does to the killed.

    (``tests/unit/test_channel_processes.py`` kills real processes.)
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: list[SharedArena | ShmArena] = []

    def create(self, owner: Peer = OWNER, *, cluster: str = "test", blocks: int = 8) -> SharedArena:
        arena = SharedArena.create(self._directory, cluster, owner, LAYOUT, COMPAT, blocks=blocks)
        self._open.append(arena)
        return arena

    def open(
        self,
        owner: Peer = OWNER,
        *,
        blocks: int = 0,
        layout: KVLayout = LAYOUT,
        compat: Compat = COMPAT,
    ) -> SharedArena:
        arena = SharedArena.open(self._directory, "test", owner, layout, compat, blocks=blocks)
        self._open.append(arena)
        return arena

    def channel(self, layout: KVLayout = LAYOUT, compat: Compat = COMPAT) -> ShmChannel:
        return ShmChannel(layout, compat)

    def sources(self, layout: KVLayout = LAYOUT, compat: Compat = COMPAT) -> ShmSources:
        return ShmSources(self._directory, "test", layout, compat)

    def die(self, side: SharedArena | ShmArena, incarnation: int) -> None:
        if isinstance(side, SharedArena):
            side.close(unlink=False)
        else:
            side.close()

    def reclaim(self, cluster: str) -> list[str]:
        return [str(path) for path in reclaim_unlocked(self._directory, cluster)]

    def flip(self, arena: SharedArena, block: int, byte: int) -> None:
        arena.memory[block * LAYOUT.block_bytes + byte] ^= 1

    def check(self, side: SharedArena | ShmArena, block: int, **more: int) -> BlockCheck:
        """Return the check that holds for what is in a block now."""
        return check_of(side.memory, block, **more)

    def copied(self, source: ShmSource, block: int) -> bytes | None:
        """Return a copy of a block, ``None`` if it is not there."""
        return copied(source, block)

    def close(self) -> None:
        for arena in self._open:
            arena.close(unlink=True)


class FakeHost:
    """The simulated kernel; dying takes some virtual time."""

    def __init__(self) -> None:
        self._time = 1000.0
        self._host = SimHost(lambda: self._time)

    def create(self, owner: Peer = OWNER, *, cluster: str = "test", blocks: int = 8) -> SimArena:
        return self._host.create(cluster, owner, LAYOUT, COMPAT, blocks=blocks)

    def open(
        self,
        owner: Peer = OWNER,
        *,
        blocks: int = 0,
        layout: KVLayout = LAYOUT,
        compat: Compat = COMPAT,
    ) -> SimArena:
        return self._host.open("test", owner, layout, compat, blocks=blocks)

    def channel(self, layout: KVLayout = LAYOUT, compat: Compat = COMPAT) -> SimChannel:
        return self._host.channel(layout, compat)

    def sources(self, layout: KVLayout = LAYOUT, compat: Compat = COMPAT) -> SimSources:
        return self._host.sources("test", layout, compat)

    def die(self, side: SimArena | SimMapped, incarnation: int) -> None:
        self._host.kill(incarnation)
        self._time += 0.2

    def reclaim(self, cluster: str) -> list[str]:
        return self._host.reclaim_unlocked(cluster)

    def flip(self, arena: SimArena, block: int, byte: int) -> None:
        self._host.flip(arena.ref, block, byte)

    def check(self, side: SimArena | SimMapped, block: int, **more: int) -> BlockCheck:
        return check_of(side.memory, block, **more)

    def copied(self, source: SourceArena, block: int) -> bytes | None:
        return copied(source, block)

    def close(self) -> None:
        pass
