"""What /proc says: is that process still the same one, whose is it, who listens on that port.

Decides nothing. A pid is named together with its start time, because pids are used again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.cli.supervisor import MARK
from baton.runtime.dirs import LEDGER_SOCKET

_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class ProcessName:
    """One process beyond doubt, as long as the machine is not booted again."""

    pid: int
    started: int
    """Start time in clock ticks since boot."""

    def is_alive(self) -> bool:
        """Whether it runs; an unreaped zombie does not."""
        return started(self.pid) == self.started

    def send(self, number: int) -> None:
        """Send a signal to this process and to none that took its pid."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # The pidfd pins the process: what is alive after it was opened is what it names.
            if self.is_alive():
                signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return
        finally:
            os.close(fd)


def started(pid: int) -> int | None:
    """Return when ``pid`` started, in ticks since boot; ``None``: no such process, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def worker_of(guard: int) -> int | None:
    """Return the pid of the worker that runs under ``guard``; ``None``: none does right now."""
    for pid in _pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (OSError, UnicodeDecodeError):
            continue
        if fields[0] not in "ZX" and int(fields[1]) == guard:
            return pid
    return None


def name_of(pid: int) -> ProcessName | None:
    """Return the process that has ``pid`` now."""
    ticks = started(pid)
    return None if ticks is None else ProcessName(pid, ticks)


def describe(pid: int) -> str:
    """Return a few words about a process for a message."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return f"pid {pid}"
    return f"pid {pid} ({' '.join(words).strip()[:100]})"


def members(run_dir: Path) -> list[ProcessName]:
    """Return every process that was started for the cluster in ``run_dir``, but this one."""
    mark = f"{MARK}={run_dir}".encode()
    # The ledger's server writes its title over its environment.
    title = f"unixsocket:{run_dir / LEDGER_SOCKET}".encode()
    found = []
    for pid in _pids():
        if pid == os.getpid():
            continue
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if mark in environ.split(b"\0") or title in line:
            name = name_of(pid)
            if name is not None:
                found.append(name)
    return found


def listener(host: str, port: int) -> str | None:
    """Return who listens on that TCP port, in words; ``None``: nobody that we may see."""
    del host  # A listener on any address of the port is what stands in the way.
    inodes = {line[9] for line in _tcp_lines() if line[3] == _LISTEN and _port(line[1]) == port}
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in _pids():
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(entry.path) in wanted:
                    return describe(pid)
        except OSError:
            continue
    return "a process of another user"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _tcp_lines() -> Iterator[list[str]]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        yield from (line.split() for line in lines)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
