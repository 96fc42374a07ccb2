"""Breaks connections between living processes of the cluster, in the kernel, under their owners.

Decides whose they are: a socket accepted at ``<run dir>/<name>.sock`` belongs to that process, the
kernel names who dialled it. A copy of the descriptor (``pidfd_getfd``) then cuts the connection,
takes bytes out of it, or puts some into it, at any byte of any message.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_PIDFD_GETFD = 438
_CONNECTED = "03"
#: How long bytes are taken out: some messages, none of them whole to its reader.
_SWALLOW_S = 0.25
_GARBAGE_BYTES = 300

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of a connection between two processes of the cluster."""

    owner: str
    """Who accepted it."""
    dialler_pid: int
    end: socket.socket
    """A copy of the owner's descriptor."""


@contextlib.contextmanager
def connections(run_dir: Path, pids: Mapping[str, int], victim: str) -> Iterator[list[Connection]]:
    """Give every connection between ``victim`` and other processes in ``pids``, by name.

    Raises:
        PermissionError: this kernel does not let us take another process's descriptors.
    """
    found: list[Connection] = []
    try:
        for owner, pid in pids.items():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                found += _accepted(owner, pid, run_dir / f"{owner}.sock")
        mine = pids.get(victim, 0)
        others = set(pids.values()) - {mine}
        yield [
            each
            for each in found
            if (each.owner == victim and each.dialler_pid in others) or each.dialler_pid == mine
        ]
    finally:
        for each in found:
            each.end.close()


def _accepted(owner: str, pid: int, path: Path) -> list[Connection]:
    inodes = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[5] == _CONNECTED and fields[7] == str(path):
            inodes.add(f"socket:[{fields[6]}]")
    found = []
    pidfd = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                inode = os.readlink(f"/proc/{pid}/fd/{name}")
                if inode in inodes:
                    inodes.discard(inode)
                    end = _copy(pidfd, int(name))
                    if end is not None:
                        found.append(Connection(owner, _dialler(end), end))
    finally:
        os.close(pidfd)
    return found


def _copy(pidfd: int, number: int) -> socket.socket | None:
    """Return a copy of a descriptor, ``None`` if it was closed meanwhile."""
    copied = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if copied >= 0:
        return socket.socket(fileno=copied)
    error = ctypes.get_errno()
    if error == 9:  # EBADF
        return None
    raise OSError(error, os.strerror(error), "pidfd_getfd")


def _dialler(end: socket.socket) -> int:
    pid: int = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def cut(some: list[Connection]) -> None:
    """Reset them, on both sides."""
    for each in some:
        with contextlib.suppress(OSError):
            each.end.shutdown(socket.SHUT_RDWR)


def swallow(some: list[Connection]) -> None:
    """Take bytes away from under the reader: messages are truncated, and what follows is none."""
    until = time.monotonic() + _SWALLOW_S
    while time.monotonic() < until:
        for each in some:
            with contextlib.suppress(OSError):
                each.end.recv(1 << 16, socket.MSG_DONTWAIT)
        time.sleep(0.001)


def garble(some: list[Connection], chance: random.Random) -> None:
    """Put bytes that mean nothing between what their owner sends."""
    for each in some:
        with contextlib.suppress(OSError):
            each.end.send(chance.randbytes(_GARBAGE_BYTES), socket.MSG_DONTWAIT)
