"""A keeper in a thread, and arenas on a device, for tests of both."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from msgspec.structs import replace

from baton.channel.arena import SharedArena
from baton.channel.keeping import SOCKET_NAME, KeeperLink
from baton.channel.on_device import OnDevice
from baton.channel.shm import ShmArena, ShmChannel
from baton.channel.sources import ShmSource, ShmSources
from baton.core.ids import Compat, Peer
from baton.engine.host_device import HostDevice
from baton.keeper.server import KeeperServer
from baton.ports.channel import BlockCheck
from baton.ports.device import Takers
from baton.ports.engine import KVLayout
from support.channel_fixtures import shared_directory
from support.channel_hosts import RealHost
from support.channel_parts import CHAIN, COMPAT, LAYOUT, OWNER

DEVICE_LAYOUT = replace(LAYOUT, place="device")
ROOM = 2**20


class Listed(HostDevice):
    """A device whose driver shows what a test says."""

    def __init__(self, *pids: int) -> None:
        super().__init__(ROOM)
        self.pids: frozenset[int] | None = frozenset(pids)

    def processes(self) -> frozenset[int] | None:
        return self.pids


@contextmanager
def running_keeper(run_dir: Path) -> Iterator[KeeperLink]:
    """Serve in ``run_dir`` until the end; what is kept is gone then."""
    server = KeeperServer(run_dir, structlog.get_logger())
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            server.serve_one()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    link = KeeperLink(run_dir)
    try:
        yield link
    finally:
        over.set()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as poke:
            poke.connect(str(run_dir / SOCKET_NAME))  # the thread may wait for a question
        thread.join()
        server.close()


class Bytes:
    """A tensor of bytes, used as tests use a memoryview."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __len__(self) -> int:
        return len(self._tensor)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tensor.tolist())

    def __getitem__(self, key: Any) -> Any:
        found = self._tensor[key]
        return int(found) if isinstance(key, int) else bytes(found.cpu().numpy())

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, int):
            self._tensor[key] = value
        else:
            fresh = torch.from_numpy(np.frombuffer(value, np.uint8).copy())
            self._tensor[key] = fresh.to(self._tensor.device)


class DeviceArena(SharedArena):
    """An arena whose memory a test reads and writes like the host's."""

    @property
    def memory(self) -> Any:
        return Bytes(super().memory)


class Pids(KeeperLink):
    """The keeper, as if each incarnation were a process of its own."""

    def __init__(self, run_dir: Path, device: Listed) -> None:
        super().__init__(run_dir)
        self._device = device
        self.killed: set[int] = set()

    def takers(self, file_id: str) -> Takers:
        found = super().takers(file_id)
        return Takers({each: PIDS + each for each in found.pids}, complete=found.complete)

    def fetch(self, file_id: str, incarnation: int) -> int:
        self._live(incarnation)
        return super().fetch(file_id, incarnation)

    def keep(self, name: str, file_id: str, fd: int, incarnation: int, *, fresh: bool) -> None:
        self._live(incarnation)
        super().keep(name, file_id, fd, incarnation, fresh=fresh)

    def leave(self, file_id: str, incarnation: int) -> None:
        if incarnation not in self.killed:
            super().leave(file_id, incarnation)

    def _live(self, incarnation: int) -> None:
        assert self._device.pids is not None
        self._device.pids |= {PIDS + incarnation}

    def kill(self, incarnation: int) -> None:
        """It will not say that it has left; the driver shows it no more."""
        self.killed.add(incarnation)
        assert self._device.pids is not None
        self._device.pids -= {PIDS + incarnation}


PIDS = 10_000_000


@contextmanager
def device_host() -> Iterator[DeviceHost]:
    """A host with a keeper, for the channel's conformance suite."""
    with shared_directory() as directory, running_keeper(directory):
        host = DeviceHost(directory)
        yield host
        host.close()


class DeviceHost(RealHost):
    """The real channel with blocks on a device."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.device = Listed(os.getpid())
        self.link = Pids(directory, self.device)
        self._place = OnDevice(self.device, self.link)

    def die(self, side: SharedArena | ShmArena, incarnation: int) -> None:
        self.link.kill(incarnation)
        super().die(side, incarnation)

    def check(self, side: SharedArena | ShmArena, block: int, **more: int) -> BlockCheck:
        check = BlockCheck(more.get("logical", 0), block, more.get("tokens", 4), CHAIN)
        (checksum,) = side.checksums([check])
        return dataclasses.replace(check, checksum=checksum)

    def copied(self, source: ShmSource, block: int) -> bytes | None:
        target = torch.zeros(LAYOUT.block_bytes, dtype=torch.uint8)
        return bytes(target.numpy()) if source.copy(block, target) else None

    def create(self, owner: Peer = OWNER, *, cluster: str = "test", blocks: int = 8) -> SharedArena:
        arena = DeviceArena.create(
            self._directory,
            cluster,
            owner,
            DEVICE_LAYOUT,
            COMPAT,
            blocks=blocks,
            place=self._place,
        )
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
        arena = DeviceArena.open(
            self._directory,
            "test",
            owner,
            replace(layout, place="device"),
            compat,
            blocks=blocks,
            place=self._place,
        )
        self._open.append(arena)
        return arena

    def channel(self, layout: KVLayout = LAYOUT, compat: Compat = COMPAT) -> ShmChannel:
        return _Channel(replace(layout, place="device"), compat, self._place)

    def sources(self, layout: KVLayout = LAYOUT, compat: Compat = COMPAT) -> ShmSources:
        layout = replace(layout, place="device")
        return ShmSources(self._directory, "test", layout, compat, place=self._place)


class _Channel(ShmChannel):
    def map(self, ref: Any, me: Peer) -> ShmArena:
        mapped = super().map(ref, me)
        if not isinstance(mapped._memory, Bytes):
            mapped._memory = Bytes(mapped._memory)
        return mapped
