"""A device's memory, handed from process to process as a file descriptor (ADR 27).

Held by ``tests/conformance/test_device.py``: the host's memory in a device's place, and CUDA where
there is a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.ports.channel import BlockCheck
from baton.ports.engine import KVLayout


class DeviceFull(OSError):
    """The device has no room; the text holds both sizes."""


class DeviceMissing(RuntimeError):
    """The device cannot serve; the text says why and what to do."""


class NotKept(OSError):
    """The keeper does not have that memory, or there is no keeper."""


class DeviceBlocks(Protocol):
    """One arena's blocks, mapped into this process."""

    @property
    def memory(self) -> Any:
        """All bytes, as the engine attaches them: a tensor of uint8. A slice is a view."""
        ...

    def checksums(self, checks: Sequence[BlockCheck]) -> list[int]:
        """Return the checksum of each block's filled tokens. Thread-safe.

        What another process stored, and said so after its device was done, is what is read.
        """
        ...

    def copy_out(self, block: int, target: Any) -> None:
        """Copy one block into ``target``, memory of the same device; done on return."""
        ...

    def close(self) -> bool:
        """Unmap, once nothing queued uses it; return whether it is unmapped, or a view lives."""
        ...


class Device(Protocol):
    """One device."""

    name: str
    """For people."""

    def free_bytes(self) -> int: ...

    def make(self, length: int) -> int:
        """Return the descriptor of new zeroed memory, which lives as long as a descriptor of it or
        a mapping does, in whatever process.

        Raises:
            DeviceFull: there is no room.
        """
        ...

    def map(self, fd: int, layout: KVLayout, blocks_total: int) -> DeviceBlocks:
        """Map memory that :meth:`make` made here or in another process; ``fd`` stays open.

        Raises:
            OSError: it is not of that size, or of another device.
        """
        ...

    def processes(self) -> frozenset[int] | None:
        """Return the pids that may have work on the device; ``None``: that cannot be told."""
        ...


@dataclass(frozen=True, slots=True)
class Takers:
    """Who has an arena's memory, as far as the keeper knows."""

    pids: dict[int, int]
    """By incarnation: who made it, offered it or fetched it, and has not left."""
    complete: bool
    """Nobody else ever had it: the keeper was there all along."""


class Keeper(Protocol):
    """Keeps the descriptors of a host's arenas, beyond the life of whoever made them."""

    def keep(self, name: str, file_id: str, fd: int, incarnation: int, *, fresh: bool) -> None:
        """Have ``fd`` kept for an arena, in place of what was kept under its file's ``name``; again
        is harmless. ``fresh``: nobody else had it yet.

        Raises:
            NotKept: there is no keeper, or it has no room.
        """
        ...

    def fetch(self, file_id: str, incarnation: int) -> int:
        """Return a descriptor of that arena's memory, and be known as one who has it.

        Raises:
            NotKept: it is not there.
        """
        ...

    def takers(self, file_id: str) -> Takers:
        """Return who has it.

        Raises:
            NotKept: it is not there.
        """
        ...

    def leave(self, file_id: str, incarnation: int) -> None:
        """That incarnation has unmapped it: nothing of its will touch it any more.

        Raises:
            NotKept: it is not there.
        """
        ...

    def drop(self, name: str) -> None:
        """Forget what is kept under that name, if anything is.

        Raises:
            NotKept: there is no keeper.
        """
        ...
