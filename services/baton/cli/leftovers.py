"""What a cluster leaves behind, and taking it away once its owners are dead.

Decides what counts as left behind: processes, sockets, arenas, the ledger's data. Logs stay.
Nothing is removed while a process of the cluster lives, and an arena only when nobody holds its
owner's lock.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

from baton.channel.files import remove_unowned
from baton.cli.processes import describe, members
from baton.cli.record import ClusterRecord
from baton.ports.channel import ArenaInUse

LOGS = "logs"


def end_members(run_dir: Path, patience_s: float, tell: Callable[[str], None]) -> list[str]:
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

    A worker that starts again under its old name takes over its own arena.
    """
    prefix = f"baton-{record.name}-"
    alive = []
    for path in arenas(Path(record.arena_dir), record.name):
        if path.name.removeprefix(prefix).removesuffix(".arena") in keep:
            continue
        try:
            remove_unowned(path)
        except ArenaInUse as error:
            alive.append(f"arena {path}: {error}")
    return alive


def found_after_stop(run_dir: Path, record: ClusterRecord) -> list[str]:
    """Return, in words, everything that an orderly stop should have taken away and did not."""
    found = [f"process {describe(process.pid)}" for process in members(run_dir)]
    found += [f"socket {path}" for path in sorted(run_dir.glob("*.sock"))]
    found += [f"arena {path}" for path in arenas(Path(record.arena_dir), record.name)]
    return found


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
