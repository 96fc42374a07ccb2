"""The host's memory in a device's place: everything of a device's way but the device (ADR 27).

Decides nothing of its own: memory without a name (``memfd``) is what the driver's descriptors are,
and a process that lives is one that may have work. For tests, and to look at the way of a hand-over
on a machine without a GPU: ``engine.device = "memfd"``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch

from baton.engine.device_checksum import DeviceChecksums
from baton.ports.channel import BlockCheck
from baton.ports.device import DeviceFull
from baton.ports.engine import KVLayout


class HostBlocks:
    """See :class:`baton.ports.device.DeviceBlocks`."""

    def __init__(self, mapping: mmap.mmap, layout: KVLayout) -> None:
        self._map: mmap.mmap | None = mapping
        # torch keeps a reference to the view, which keeps the mapping from being closed.
        self.memory: torch.Tensor = torch.frombuffer(memoryview(mapping), dtype=torch.uint8)
        self._checksums: DeviceChecksums | None = DeviceChecksums(self.memory, layout)
        self._block_bytes = layout.block_bytes

    def checksums(self, checks: Sequence[BlockCheck]) -> list[int]:
        assert self._checksums is not None
        return self._checksums.of(checks)

    def copy_out(self, block: int, target: torch.Tensor) -> None:
        at = block * self._block_bytes
        target.copy_(self.memory[at : at + self._block_bytes])

    def close(self) -> bool:
        mapping, self._map, self._checksums = self._map, None, None
        if mapping is None:
            return True
        del self.memory
        try:
            mapping.close()
        except BufferError:
            return False  # the last view unmaps
        return True


class HostDevice:
    """See :class:`baton.ports.device.Device`."""

    name = "the host's memory in a device's place"

    def __init__(self, limit: int) -> None:
        """``limit``: bytes that count as the device's memory, for each arena."""
        self._limit = limit

    def free_bytes(self) -> int:
        return self._limit

    def make(self, length: int) -> int:
        if length > self._limit:
            raise DeviceFull(f"{length} bytes are more than {self._limit}")
        fd = os.memfd_create("baton-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, length)
        return fd

    def map(self, fd: int, layout: KVLayout, blocks_total: int) -> HostBlocks:
        length = blocks_total * layout.block_bytes
        if os.fstat(fd).st_size != length:
            raise OSError(f"memory of {os.fstat(fd).st_size} bytes, {length} are wanted")
        return HostBlocks(mmap.mmap(fd, length), layout)

    def processes(self) -> frozenset[int] | None:
        """All that live: what they store ends with them."""
        return frozenset(int(name) for name in os.listdir("/proc") if name.isdecimal())
