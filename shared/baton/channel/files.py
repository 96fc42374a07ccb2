"""Arena files: their names, opening them without trust, and removing those nobody holds.

Decides when a file may be removed: by its owner, or when nobody holds the owner's lock. A file gets
its name only once it is complete and locked (O_TMPFILE, then a link), so a named file is never half
written, and one that a killed process had not named yet vanishes with it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.channel import locks
from baton.channel.layout import PAGE, BadHeader, Header, unpack_header
from baton.core.ids import Compat
from baton.ports.channel import ArenaGone, ArenaInUse
from baton.ports.engine import KVLayout

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def arena_path(directory: Path, cluster: str, worker_id: str) -> Path:
    """Return where the arena of ``worker_id`` lies."""
    for name in (cluster, worker_id):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot be part of a file name: letters, digits, _ . - only")
    return directory / f"baton-{cluster}-{worker_id}.arena"


def open_arena(path: Path | str, *, writable: bool = True) -> int:
    """Open an arena file, refusing what another user may have put there.

    Raises:
        PermissionError: a link, not a regular file, or not this user's.
        FileNotFoundError: no such file.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | flags)
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise PermissionError(f"{path} cannot be an arena: {error.strerror}") from error
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(f"{path} is not a regular file of this user")
    return fd


def read_header(fd: int) -> Header:
    """Return the header of an open file, checked against the file's length.

    Raises:
        BadHeader: it is not an arena of this version.
    """
    header = unpack_header(os.pread(fd, PAGE, 0))
    size = os.fstat(fd).st_size
    if size != header.file_bytes:
        raise BadHeader(f"file has {size} bytes, its header says {header.file_bytes}")
    return header


def check_fit(
    path: str, theirs: KVLayout, their_compat: Compat, mine: KVLayout, my_compat: Compat
) -> None:
    """Refuse an arena whose bytes do not mean what this process's mean.

    Raises:
        ArenaGone: with every difference.
    """
    if found := differences(theirs, their_compat, mine, my_compat):
        raise ArenaGone(f"{path} does not fit: {'; '.join(found)}")


def differences(
    theirs: KVLayout, their_compat: Compat, mine: KVLayout, my_compat: Compat
) -> list[str]:
    """Return in words how the bytes of two arenas differ in meaning."""
    found = their_compat.differences(my_compat)
    if theirs != mine:
        found.append(f"KV layout: {theirs.describe()} != {mine.describe()}")
    return found


def names(path: Path | str, fd: int) -> bool:
    """Whether ``path`` still names the open file."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)


@contextmanager
def unowned(path: Path) -> Iterator[None]:
    """Keep the file at ``path``, whose owner is dead, from being removed or taken by others.

    Raises:
        ArenaInUse: its owner lives, or another process is replacing it right now.
        FileNotFoundError: there is none.
    """
    while True:
        # A description of its own: what it locks goes when it is closed, and nothing else does.
        fd = open_arena(path)
        try:
            if not locks.lock(fd, locks.REPLACE_BYTE):
                raise ArenaInUse(f"{path} is being replaced by another process")
            if not names(path, fd):
                continue  # replaced between opening and locking: look at the new one
            _refuse_if_owned(path, fd)
            yield
            return
        finally:
            os.close(fd)


def remove_unowned(path: Path) -> bool:
    """Remove the arena file at ``path`` if its owner is dead; return whether there was one.

    Writers that still hold locks in it keep their pages until they unmap them, which harms nobody.

    Raises:
        ArenaInUse: its owner lives, or another process is replacing it right now.
    """
    try:
        with unowned(path):
            os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _refuse_if_owned(path: Path, fd: int) -> None:
    try:
        header = read_header(fd)
    except BadHeader:
        # Another version's file: which byte is the owner's is unknown, so any lock protects it.
        if locks.is_any_locked(fd):
            raise ArenaInUse(f"{path} is held by a process of another version") from None
        return
    if locks.is_locked(fd, header.owner.incarnation):
        raise ArenaInUse(f"{path} belongs to {header.owner}, pid {header.pid}, which is running")


def reclaim_unlocked(directory: Path, cluster: str) -> list[Path]:
    """Remove the cluster's arena files in which nobody holds any lock; return their paths.

    Files whose header is unreadable are left alone: they may be another version's.
    """
    removed = []
    for path in sorted(directory.glob(f"baton-{cluster}-*.arena")):
        try:
            fd = open_arena(path)
        except OSError:
            continue  # gone, or another user's
        try:
            # Cluster "a" must not take the files of cluster "a-b": the header decides.
            if read_header(fd).cluster != cluster or locks.is_any_locked(fd):
                continue
            if locks.lock(fd, locks.REPLACE_BYTE) and names(path, fd):
                os.unlink(path)
                removed.append(path)
        except BadHeader:
            continue
        finally:
            os.close(fd)
    return removed
