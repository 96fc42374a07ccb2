"""Arenas whose blocks are on a device: their memory, and when a dead process's stores are over.

Decides how the owner of an arena gets its blocks (a dead incarnation's from the keeper, or new
ones, which the keeper is given) and what proves that a process stores nothing there any more
(ADR 27): the kernel shows its lock gone, so it launches nothing; and the driver, which shows this
very process on the device, does not show that one. A driver that does not show this process (other
pids in a container) proves nothing.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import structlog

from baton.ports.device import Device, DeviceBlocks, Keeper, NotKept, Takers
from baton.ports.engine import KVLayout

#: The context of a process that was killed goes a moment after its lock; so often, and so long, is
#: it looked at before its arena is given up.
_LOOKS, _PAUSE_S = 40, 0.05

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Where blocks are, and who keeps them: what the channel needs beside its files."""

    device: Device
    keeper: Keeper

    def fetched(
        self, file_id: str, incarnation: int, layout: KVLayout, blocks_total: int
    ) -> DeviceBlocks:
        """Map the blocks of an arena that exists.

        Raises:
            NotKept: nobody has its memory any more.
            OSError: it is not what the arena's header says.
        """
        fd = self.keeper.fetch(file_id, incarnation)
        try:
            return self.device.map(fd, layout, blocks_total)
        finally:
            os.close(fd)

    def left(self, file_id: str, incarnation: int) -> None:
        """That incarnation has unmapped it, and nothing of its is queued."""
        try:
            self.keeper.leave(file_id, incarnation)
        except NotKept as error:
            log.info("device_memory_left", reason=str(error))

    def forget(self, name: str) -> None:
        """Nobody will take over the memory that is kept under that file's name."""
        try:
            self.keeper.drop(name)
        except NotKept as error:
            log.warning("device_memory_not_dropped", reason=str(error))


@dataclass(frozen=True, slots=True)
class Whose:
    """Names an arena and its owner to the keeper."""

    name: str
    """Of its file."""
    file_id: str
    incarnation: int


class OwnBlocks:
    """The owner's side of one arena's blocks."""

    def __init__(self, place: OnDevice, whose: Whose, fd: int, blocks: DeviceBlocks) -> None:
        """``fd``: of the memory that ``blocks`` maps; taken over."""
        self.blocks = blocks
        self._place = place
        self._whose = whose
        self._fd = fd
        #: Pids of incarnations, learned while they lived: the keeper may forget them.
        self._pids: dict[int, int] = {}

    @classmethod
    def made(cls, place: OnDevice, whose: Whose, layout: KVLayout, blocks_total: int) -> OwnBlocks:
        """Make an arena's memory and have it kept.

        Raises:
            DeviceFull: there is no room.
            NotKept: there is no keeper.
        """
        fd = place.device.make(blocks_total * layout.block_bytes)
        try:
            place.keeper.keep(whose.name, whose.file_id, fd, whose.incarnation, fresh=True)
            blocks = place.device.map(fd, layout, blocks_total)
        except BaseException:
            os.close(fd)
            raise
        return cls(place, whose, fd, blocks)

    @classmethod
    def kept(cls, place: OnDevice, whose: Whose, layout: KVLayout, blocks_total: int) -> OwnBlocks:
        """Take over what a dead incarnation had made.

        Raises:
            NotKept: nobody has it.
            OSError: it is not what the header says.
        """
        fd = place.keeper.fetch(whose.file_id, whose.incarnation)
        try:
            blocks = place.device.map(fd, layout, blocks_total)
        except BaseException:
            os.close(fd)
            raise
        return cls(place, whose, fd, blocks)

    def offer(self) -> None:
        """Give the keeper the memory once more: it may be another one, which has nothing."""
        whose = self._whose
        try:
            self._place.keeper.keep(
                whose.name, whose.file_id, self._fd, whose.incarnation, fresh=False
            )
        except NotKept as error:
            log.warning("device_memory_not_kept", reason=str(error))

    def seen(self, incarnation: int) -> None:
        """That process lives, says its lock: learn its pid."""
        if incarnation not in self._pids and incarnation in (pids := self._takers().pids):
            self._pids[incarnation] = pids[incarnation]

    def over(self, incarnation: int) -> bool:
        """Whether what that process, whose lock is gone, had launched is proved to be over."""
        takers = self._takers()
        if takers.complete and incarnation not in takers.pids:
            return True  # it never had the memory, or has left it
        pid = takers.pids.get(incarnation, self._pids.get(incarnation))
        if pid is None:
            return False  # nobody knows who that was
        return proves_over(pid, os.getpid(), self._place.device.processes())

    def waited_over(self, incarnation: int) -> bool:
        """The same, given a moment."""
        pause = threading.Event()
        for _ in range(_LOOKS):
            if self.over(incarnation):
                return True
            pause.wait(_PAUSE_S)
        return False

    def _takers(self) -> Takers:
        try:
            return self._place.keeper.takers(self._whose.file_id)
        except NotKept:
            return Takers({}, complete=False)

    def close(self, *, forget: bool) -> bool:
        """Unmap; with ``forget`` nobody is to take it over. Return whether it is unmapped."""
        os.close(self._fd)
        unmapped = self.blocks.close()
        if forget:
            self._place.forget(self._whose.name)
        elif unmapped:
            self._place.left(self._whose.file_id, self._whose.incarnation)
        return unmapped


def proves_over(pid: int, me: int, processes: frozenset[int] | None) -> bool:
    """Whether the driver's list proves that ``pid`` has nothing on the device: a list without this
    process, which is there, is of other pids."""
    return processes is not None and me in processes and pid not in processes
