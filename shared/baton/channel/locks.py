"""Proof of life and death: one byte of an arena file, locked per incarnation (ADR 0003).

Decides the lock's exact form, nothing about who asks. An *open file description lock* belongs to
the open description, not to the process: it goes when the last reference goes, that is when every
descriptor is closed **and** the mapping made through it is torn down. The kernel unmaps a killed
process after its threads have stopped, so a lock seen gone means that no store can follow.

Rules kept here and in the two modules that map:

- the byte is ``2**62 + incarnation``, far behind any data;
- it is locked on the same open description that is mapped, before it is mapped;
- it is never unlocked: no F_UNLCK, lockf or flock, only closing;
- O_CLOEXEC, MADV_DONTFORK and MADV_DONTDUMP; a child forked in spite of that gives the description
  up at once (:func:`hold_across_fork`), or it would keep its parent looking alive.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct

from baton.core.ids import INCARNATION_MAX

LOCK_BASE = 2**62
#: Incarnations are > 0, so this byte is nobody's: whoever replaces an unowned file holds it.
REPLACE_BYTE = 0

#: ``struct flock`` of 64-bit Linux: type, whence, (pad), start, length, pid, (pad). 32 bytes.
_FLOCK = struct.Struct("@hhqqi0q")
assert _FLOCK.size == 32


def lock(fd: int, byte: int) -> bool:
    """Lock ``byte`` (an incarnation) for as long as this open description lives.

    Returns:
        Whether it was free.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, byte, 1))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_locked(fd: int, byte: int) -> bool:
    """Whether another open description holds ``byte``. One's own lock is not seen."""
    return _held(fd, byte, 1)


def is_any_locked(fd: int) -> bool:
    """Whether another open description holds the byte of any incarnation, or is replacing."""
    return _held(fd, REPLACE_BYTE, 0)


def holders(fd: int) -> list[int]:
    """Return the incarnations whose byte another open description holds, in order."""
    found: list[int] = []
    ranges = [(REPLACE_BYTE + 1, INCARNATION_MAX + 1)]
    while ranges:
        first, end = ranges.pop()
        if first >= end:
            continue
        byte = _first_held(fd, first, end - first)
        if byte is None:
            continue
        # The kernel names one of the locks in a range, and not always the lowest.
        found.append(byte)
        ranges += [(first, byte), (byte + 1, end)]
    return sorted(found)


def _held(fd: int, byte: int, length: int) -> bool:
    return _first_held(fd, byte, length) is not None


def _first_held(fd: int, byte: int, length: int) -> int | None:
    """Return the first byte of a lock in the range; ``None``: nobody holds any of it."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte, length))
    # The pid in the answer is -1 for such locks: the kernel does not know "the" process.
    kind, _, start, _, _ = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else max(int(start) - LOCK_BASE, byte)


def _flock(kind: int, byte: int, length: int) -> bytes:
    assert 0 <= byte <= INCARNATION_MAX
    return _FLOCK.pack(kind, os.SEEK_SET, LOCK_BASE + byte, length, 0)


# --- what a mapping needs so that the lock means what it says -------------------------------------


def shield(mapping: mmap.mmap) -> None:
    """Keep a mapping out of forked children and core dumps."""
    mapping.madvise(mmap.MADV_DONTFORK)
    mapping.madvise(mmap.MADV_DONTDUMP)


#: (device, inode) of every arena this process has open.
_open_files: set[tuple[int, int]] = set()


def hold_across_fork(device: int, inode: int) -> None:
    """Let forked children give this file up (for the rest of the process's life).

    A mapping is not inherited (MADV_DONTFORK) but descriptors are, mmap's own duplicate included,
    and each would keep the lock after the parent is gone. Programs started by ``exec`` never have
    them (O_CLOEXEC).
    """
    _open_files.add((device, inode))


def _give_up_in_child() -> None:
    """Point every inherited arena descriptor at /dev/null: closing them would free the numbers
    while mmap objects still intend to close them."""
    if not _open_files:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            stat = os.fstat(fd)
        except OSError:
            continue  # the directory's own descriptor, closed since
        if (stat.st_dev, stat.st_ino) in _open_files:
            os.dup2(null, fd, inheritable=False)
    os.close(null)
    _open_files.clear()


os.register_at_fork(after_in_child=_give_up_in_child)
