"""The right to bind an ``ipc://`` endpoint: a locked file beside its socket.

ZeroMQ unlinks whatever socket file is in the way before it binds, so a second process with the
same path would silently take a living one's place. The lock is taken first; the kernel drops it
with the process, so what a dead process left is simply replaced. (This lock guards a path, not
memory: ``flock`` is enough, and it is never proof of anybody's death.)
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from baton.ports.transport import EndpointInUse

IPC = "ipc://"
#: Unix socket names end at 107 bytes; the run directory keeps them shorter.
PATH_BYTES_MAX = 107


class EndpointLock:
    """The held lock; :meth:`release` removes socket and lock file."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def take(cls, endpoint: str) -> EndpointLock | None:
        """Lock ``endpoint``; ``None`` where the kernel itself refuses a second bind (TCP).

        Raises:
            EndpointInUse: another live process holds it; the text names its pid.
            OSError: the path is too long, or its directory is missing.
        """
        if not endpoint.startswith(IPC):
            return None
        path = Path(endpoint.removeprefix(IPC))
        if len(os.fsencode(path)) > PATH_BYTES_MAX:
            text = f"longer than {PATH_BYTES_MAX} bytes, set cluster.run_dir to a shorter path"
            raise OSError(errno.ENAMETOOLONG, text, str(path))
        lock = _lock_path(path)
        while True:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _locked(fd, lock, path):
                    os.ftruncate(fd, 0)
                    os.write(fd, str(os.getpid()).encode())
                    return cls(path, fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def release(self) -> None:
        """Remove the socket and give the endpoint up. Only after ZeroMQ let go of it."""
        self._path.unlink(missing_ok=True)
        _lock_path(self._path).unlink(missing_ok=True)
        os.close(self._fd)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _locked(fd: int, lock: Path, path: Path) -> bool:
    """Lock ``fd``; return False if its file was removed meanwhile, so that a new one counts."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace") or "unknown"
        text = f"held by the living process with pid {holder}"
        raise EndpointInUse(errno.EADDRINUSE, text, str(path)) from None
    try:
        return os.path.samestat(os.fstat(fd), os.stat(lock))
    except FileNotFoundError:
        return False
