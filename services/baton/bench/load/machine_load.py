"""Who used the machine during a run, from /proc: the generator, the server, others.

Decides what counts as the server: the tree of processes below its roots, which are given, or
whatever listens on its port. A server on another machine has none here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.bench.conditions import others_cpu_s

_PROC = Path("/proc")
_LISTEN = "0A"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds used so far."""

    machine: float
    own: float
    server: dict[int, float]
    """By process; those that ended meanwhile are missing."""


def usage(server_pids: Iterable[int]) -> Usage:
    """Look now."""
    own = os.times()
    server = {pid: cpu for pid in server_pids if (cpu := _cpu_s(pid)) is not None}
    return Usage(others_cpu_s(), own.user + own.system, server)


def others_cores(before: Usage, after: Usage, seconds: float) -> float:
    """Return the cores that neither generator nor server used, on average."""
    used = after.machine - before.machine - (after.own - before.own)
    used -= server_cpu_s(before, after)
    return max(0.0, used / max(seconds, 1e-9))


def server_cpu_s(before: Usage, after: Usage) -> float:
    """Return the CPU seconds of the server's processes in between."""
    return sum(cpu - before.server.get(pid, 0.0) for pid, cpu in after.server.items())


def affinity(server_pids: Iterable[int]) -> dict[str, list[int]]:
    """Return the cores that each of the server's processes may use, by name and pid."""
    found = {}
    for pid in server_pids:
        try:
            cores = sorted(os.sched_getaffinity(pid))
            name = (_PROC / str(pid) / "comm").read_text().strip()
        except OSError:
            continue
        found[f"{name}/{pid}"] = cores
    return found


def tree(roots: Iterable[int]) -> list[int]:
    """Return the roots that live, and all their descendants."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        fields = _stat(pid)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(pid)
    found: list[int] = []
    left = [pid for pid in roots if (_PROC / str(pid)).exists()]
    while left:
        pid = left.pop()
        if pid not in found:
            found.append(pid)
            left += children.get(pid, [])
    return found


def listeners(port: int) -> list[int]:
    """Return the processes of this machine that listen on a TCP port."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return [pid for pid in _pids() if inodes & set(_links(pid))] if inodes else []


def _links(pid: int) -> Iterator[str]:
    try:
        descriptors = os.listdir(_PROC / str(pid) / "fd")
    except OSError:
        return
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            yield os.readlink(_PROC / str(pid) / "fd" / descriptor)


def _pids() -> list[int]:
    return [int(path.name) for path in _PROC.iterdir() if path.name.isdigit()]


def _stat(pid: int) -> list[str] | None:
    """Return the fields after the name: state, parent, ..."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _cpu_s(pid: int) -> float | None:
    fields = _stat(pid)
    return None if fields is None else (int(fields[11]) + int(fields[12])) / _TICKS
