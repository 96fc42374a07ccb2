"""The processes of a server that is compared: found by a mark in their environment, or a session.

Decides nothing about figures. A mark reaches every descendant, daemons too, so that memory, CPU
time and what is left at the end are those of the whole server, whoever started its processes. Some
write their title over their environment; those are found by the session that they are in.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

MARK = "PEERS_MARK"
_PROC = Path("/proc")
_TICK = os.sysconf("SC_CLK_TCK")


def find(mark: str, sessions: Collection[int]) -> list[int]:
    """Return the pids of all living processes with ``mark`` or in one of ``sessions``."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in _PROC.iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            environ = (folder / "environ").read_bytes()
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] == "Z":
            continue
        if int(fields[3]) in sessions or wanted in environ.split(b"\0"):
            found.append(int(folder.name))
    return sorted(found)


def memory_mb(pids: Collection[int]) -> float:
    """Return MiB of memory that they have together; pages they share count once (PSS)."""
    total = 0
    for pid in pids:
        try:
            text = (_PROC / str(pid) / "smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1024


def niceness(pids: Collection[int]) -> int:
    """Return the highest niceness among them: other than this process's, somebody changed it."""
    found = [0]
    for pid in pids:
        try:
            found.append(os.getpriority(os.PRIO_PROCESS, pid))
        except ProcessLookupError:
            continue
    return max(found)


def threads(pid: int) -> Iterator[tuple[int, str, float]]:
    """Yield (tid, name, CPU seconds so far) of a process's threads."""
    for folder in sorted((_PROC / str(pid) / "task").iterdir()):
        try:
            text = (folder / "stat").read_text()
        except OSError:
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        yield int(folder.name), name, (int(fields[11]) + int(fields[12])) / _TICK


def pin(pids: Collection[int], core: int) -> None:
    """Put every thread of these processes on one core, whatever they chose themselves."""
    for pid in pids:
        for tid, _, _ in threads(pid):
            try:
                os.sched_setaffinity(tid, {core})
            except ProcessLookupError:
                continue


def signal_all(pids: Collection[int], number: signal.Signals) -> None:
    """Send a signal to all that still live."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end(mark: str, sessions: Collection[int], patience_s: float = 20.0) -> None:
    """End all these processes: asked first, then killed."""
    signal_all(find(mark, sessions), signal.SIGCONT)
    signal_all(find(mark, sessions), signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while left := find(mark, sessions):
        if time.monotonic() > deadline:
            signal_all(left, signal.SIGKILL)
        time.sleep(0.1)
