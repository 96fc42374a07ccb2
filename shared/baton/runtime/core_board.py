"""The file of the core board: what the workers of a host tell each other of their cores.

Decides where it lies and what of it is trusted. A first line says what the file is, then there is
one for each core, with a word that only the core's owner stores (``engine/native/board.h``). It is
made by whoever comes first; all write the same first line. A worker that was killed in the middle
of a step leaves its cores taken; its successor frees them when it starts.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from baton.ports.engine import CORE_LINE_BYTES

#: Versions of Baton that do not know each other's words do not share a file.
FILE = "cores-1.board"
#: More cores than any setting can name.
CORES_MAX = 4096
_SIZE = (1 + CORES_MAX) * CORE_LINE_BYTES
_MARK = b"baton core board 1\n".ljust(CORE_LINE_BYTES, b"\0")
#: The word of a core whose owner computes nothing. Without an owner it is 0, and nobody borrows it:
#: nor from a worker that still looks at a file which somebody has removed since.
_IDLE = struct.pack("=Q", 1)


class NoCoreBoard(Exception):
    """What lies in its place is something else; the text is for people."""


def open_core_board(path: Path, own: Iterable[int]) -> memoryview:
    """Return the lines of all cores, mapped; those of ``own`` now say that nothing is computed.

    Raises:
        NoCoreBoard: the file is not this user's, or was not written by this version.
        OSError: it cannot be made or mapped.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o600)
    except OSError as error:
        if path.is_symlink() or path.exists():
            raise NoCoreBoard(f"{path} is no core board: {error.strerror}{_ADVICE}") from error
        raise
    try:
        _check(path, file)
        for core in own:
            # Through the file: on a full disk this is an error, a store into the mapping a signal.
            os.pwrite(file, _IDLE, (1 + core) * CORE_LINE_BYTES)
        memory = mmap.mmap(file, _SIZE)
    finally:
        os.close(file)
    return memoryview(memory)[CORE_LINE_BYTES:]


_ADVICE = "; remove it while no worker runs"


def _check(path: Path, file: int) -> None:
    """Make the file what it has to be if it is new, and refuse one that is something else."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise NoCoreBoard(f"{path} is not a regular file of this user{_ADVICE}")
    if found.st_size not in (0, _SIZE):
        raise NoCoreBoard(f"{path} has {found.st_size} bytes instead of {_SIZE}{_ADVICE}")
    # Two that start at once do the same.
    os.ftruncate(file, _SIZE)
    mark = os.pread(file, CORE_LINE_BYTES, 0)
    if mark == bytes(CORE_LINE_BYTES):
        os.pwrite(file, _MARK, 0)
    elif mark != _MARK:
        raise NoCoreBoard(f"{path} was not written by this version of Baton{_ADVICE}")
