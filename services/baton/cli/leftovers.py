"""What a cluster leaves behind, and taking it away once its owners are dead.

Decides what counts as left behind: processes, sockets, arenas, the ledger's data. Logs stay.
Nothing is removed while a process of the cluster lives, and an arena only when nobody holds its
owner's lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

from baton.channel import locks
from baton.channel.files import open_arena, read_header, remove_unowned
from baton.channel.layout import BadHeader
from baton.cli.processes import describe, members
from baton.cli.record import ClusterRecord
from baton.ports.channel import ArenaInUse

LOGS = "logs"
#: Taking down a mapping takes 0.1 s per GiB, more on a busy host.
_UNMAP_S = 3.0
#: A path and the inode it named: a successor's file of the same name is another one.
Known = tuple[str, int]


def end_members(run_dir: Path, patience_s: float, tell: Callable[[str], object]) -> list[str]:
    """Wait for orphans of a dead supervisor, then kill them; return those that do not die.

    Workers end by themselves within 5 s of their supervisor's death.
    """
    deadline = time.monotonic() + patience_s
    while (found := members(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in found:
        tell(f"killing {describe(process.pid)}: it did not end by itself")
        process.send(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while (found := members(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [describe(process.pid) for process in found]


def arenas(arena_dir: Path, cluster: str) -> list[Path]:
    """Return the arena files of that cluster."""
    return sorted(arena_dir.glob(f"baton-{cluster}-*.arena"))


def remove_arenas(record: ClusterRecord, keep: Collection[str] = ()) -> list[str]:
    """Remove the cluster's ownerless arenas but those of the workers in ``keep``; say which live.

    A worker that starts again under its old name takes over its own arena. One that was killed
    holds its lock until the kernel has taken its memory down, a moment after the process is gone.
    """
    prefix = f"baton-{record.arenas}-"
    deadline = time.monotonic() + _UNMAP_S
    while True:
        alive = []
        for path in arenas(Path(record.arena_dir), record.arenas):
            if path.name.removeprefix(prefix).removesuffix(".arena") in keep:
                continue
            try:
                remove_unowned(path)
            except ArenaInUse as error:
                alive.append(f"arena {error}")
        if not alive or time.monotonic() >= deadline:
            return alive
        time.sleep(0.05)


def ownerless(run_dir: Path, record: ClusterRecord) -> frozenset[Known]:
    """Return the sockets and arenas whose process has crashed and has no successor yet.

    Looked at before a stop: what a crash left is the successor's to take over, and no fault of the
    stop when there never was one.
    """
    dead = [path for path in run_dir.glob("*.sock") if not _answers(path)]
    dead += [path for path in arenas(Path(record.arena_dir), record.arenas) if not _is_owned(path)]
    return frozenset(_known(path) for path in dead)


def found_after_stop(run_dir: Path, record: ClusterRecord, crashed: Collection[Known]) -> list[str]:
    """Return, in words, everything that an orderly stop should have taken away and did not."""
    found = [f"process {describe(process.pid)}" for process in members(run_dir)]
    for what, paths in (
        ("socket", sorted(run_dir.glob("*.sock"))),
        ("arena", arenas(Path(record.arena_dir), record.arenas)),
    ):
        found += [f"{what} {path}" for path in paths if _known(path) not in crashed]
    return found


def _known(path: Path) -> Known:
    try:
        return str(path), path.lstat().st_ino
    except FileNotFoundError:
        return str(path), 0


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
        return True


def _is_owned(path: Path) -> bool:
    try:
        fd = open_arena(path)
    except OSError:
        return False
    try:
        return locks.is_locked(fd, read_header(fd).owner.incarnation)
    except BadHeader:
        return locks.is_any_locked(fd)
    finally:
        os.close(fd)


def clear(run_dir: Path, *, keep_ledger: bool = False) -> None:
    """Empty the run directory of a cluster none of whose processes lives; logs stay."""
    kept = {LOGS, "ledger"} if keep_ledger else {LOGS}
    for path in run_dir.iterdir():
        if path.name in kept:
            continue
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
