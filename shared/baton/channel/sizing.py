"""How large an arena becomes: what is asked for, or what fits.

Decides the share an unset size takes and when an asked one is refused. The numbers it decides on
are read by :func:`room_in`; the decision itself is pure.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from baton.channel.layout import PAGE, RECORD_BYTES, offsets
from baton.ports.channel import ArenaTooSmall
from baton.ports.engine import KVLayout

MIB = 2**20
#: An unset size takes at most this much ...
AUTO_BYTES_MAX = 1024 * MIB
#: ... at most this share of the free space of the file system (so that two workers fit) ...
AUTO_SPACE_SHARE = 2
#: ... and at most this share of the available memory (weights, activations, other workers).
AUTO_MEMORY_SHARE = 4
#: An unset size on a device takes this share of what is free: others' arenas, and what is computed
#: in between, are there too.
AUTO_DEVICE_SHARE = 2


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that could be taken now."""

    space: int
    """Free space of the file system the arena will lie in."""
    memory: int
    """Available memory, the control group's limit included."""

    @property
    def both(self) -> int:
        return min(self.space, self.memory)


@dataclass(frozen=True, slots=True)
class Size:
    """The decision and the words for the log."""

    blocks_total: int
    file_bytes: int
    note: str


def blocks_asked(layout: KVLayout, *, blocks: int = 0, size_mb: int = 0) -> int | None:
    """Return how many blocks are asked for, ``None`` if as many as fit."""
    assert not (blocks and size_mb), "one size, not two"
    if blocks:
        return blocks
    if layout.place == "device":
        return size_mb * MIB // layout.block_bytes if size_mb else None
    return _blocks_in(size_mb * MIB, layout) if size_mb else None


def choose_size(layout: KVLayout, room: Room, *, blocks: int = 0, size_mb: int = 0) -> Size:
    """Return how many blocks the arena gets: ``blocks``, or ``size_mb``, or (both 0) what fits.

    Raises:
        ArenaTooSmall: it does not fit, or not one block does; the text holds both sizes.
    """
    asked = blocks_asked(layout, blocks=blocks, size_mb=size_mb)
    if asked is not None:
        wanted = asked
        origin = f"{blocks} blocks asked for" if blocks else f"{size_mb} MiB asked for"
    else:
        budget = min(
            AUTO_BYTES_MAX, room.space // AUTO_SPACE_SHARE, room.memory // AUTO_MEMORY_SHARE
        )
        wanted, origin = (
            _blocks_in(budget, layout),
            f"no size set: at most 1/{AUTO_SPACE_SHARE} of {_mib(room.space)} free space, "
            f"1/{AUTO_MEMORY_SHARE} of {_mib(room.memory)} available memory, "
            f"{_mib(AUTO_BYTES_MAX)}",
        )
    file_bytes = _file_bytes(max(wanted, 1), layout)
    if wanted < 1 or file_bytes > room.both:
        raise too_small(file_bytes, room, origin)
    tokens = wanted * layout.block_size
    note = f"{_mib(file_bytes)}, {wanted} blocks, {tokens} tokens ({origin})"
    return Size(blocks_total=wanted, file_bytes=file_bytes, note=note)


def choose_device_size(layout: KVLayout, free: int, *, blocks: int = 0, size_mb: int = 0) -> Size:
    """Return how many blocks an arena on a device gets: ``blocks``, or ``size_mb``, or (both 0) a
    share of the device's free memory.

    Raises:
        ArenaTooSmall: it does not fit, or not one block does; the text holds both sizes.
    """
    asked = blocks_asked(layout, blocks=blocks, size_mb=size_mb)
    wanted = free // AUTO_DEVICE_SHARE // layout.block_bytes if asked is None else asked
    origin = (
        "asked for" if asked is not None else f"no size set: 1/{AUTO_DEVICE_SHARE} of what is free"
    )
    needed = max(wanted, 1) * layout.block_bytes
    if wanted < 1 or needed > free:
        raise ArenaTooSmall(
            f"the arena needs {_mib(needed)} of the device ({origin}), {_mib(free)} are free: set "
            "another [arena] size_mb, or free memory of the device"
        )
    tokens = wanted * layout.block_size
    note = f"{_mib(needed)} of the device, {wanted} blocks, {tokens} tokens ({origin})"
    return Size(wanted, _file_bytes(wanted, layout), note)


def too_small(needed: int, room: Room, origin: str) -> ArenaTooSmall:
    """Return the error that says what was needed and what there is."""
    return ArenaTooSmall(
        f"the arena needs {needed} bytes ({_mib(needed)}; {origin}), available are {room.both} "
        f"bytes ({_mib(room.space)} in its file system, {_mib(room.memory)} of memory): set a "
        f"smaller [arena] size_mb, or give the container a larger /dev/shm"
    )


def _blocks_in(budget: int, layout: KVLayout) -> int:
    blocks = max(budget - 3 * PAGE, 0) // (layout.file_block_bytes + RECORD_BYTES)
    while _file_bytes(blocks + 1, layout) <= budget:
        blocks += 1
    return blocks


def _file_bytes(blocks: int, layout: KVLayout) -> int:
    return offsets(blocks, layout.file_block_bytes)[2]


def _mib(count: int) -> str:
    return f"{count / MIB:.1f} MiB"


# --- reading the machine --------------------------------------------------------------------------


def room_in(directory: Path) -> Room:
    """Read what could be taken in ``directory`` now."""
    memory = min([_available_memory(), *_group_memory()])
    info = os.statvfs(directory)
    # A tmpfs mounted with size=0 has no limit of its own and reports no blocks at all.
    space = info.f_bavail * info.f_frsize if info.f_blocks else memory
    return Room(space=space, memory=memory)


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("no MemAvailable in /proc/meminfo")


def _group_memory() -> list[int]:
    """What each control group above this process has left; page cache counts as free."""
    left = []
    for folder, limit_name, usage_name, cache_name in _memory_groups():
        try:
            limit = (folder / limit_name).read_text().strip()
            usage = int((folder / usage_name).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue  # the root group, or one that this container does not see
        if limit != "max":
            left.append(max(int(limit) - usage + int(stat.get(cache_name, 0)), 0))
    return left


def _memory_groups() -> list[tuple[Path, str, str, str]]:
    root = Path("/sys/fs/cgroup")
    second = ("memory.max", "memory.current", "inactive_file")
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    groups = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root, second
        elif "memory" in controllers.split(","):
            top, names = root / "memory", first
        else:
            continue
        folder = top / path.lstrip("/")
        groups += [(each, *names) for each in (folder, *folder.parents) if each.is_relative_to(top)]
    # In a container the root of the mount is the container's own group, whatever the path says.
    groups += [(root, *second), (root / "memory", *first)]
    return groups
