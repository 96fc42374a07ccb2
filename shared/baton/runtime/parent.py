"""Ends this process when the one that started it is gone, from the first moment on.

Decides that a worker whose supervisor was killed drains briefly and then ends: nobody would restart
or stop it any more. Imports next to nothing, because it is the first thing a process does: a
thread waits on the parent's pidfd while everything else is still being imported.

pid 1 is not watched (an init or systemd outlives us), nor is anybody with ``BATON_ORPHAN=stay``.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

#: What a worker may still do after its parent's death: within the 5 s that are promised.
GRACE_S = 3.0
EXIT_CODE = 75


class ParentWatch:
    """The watch of this process; :func:`watch_parent` makes it."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._told: Callable[[], None] | None = None
        self._gone = False
        self._lock = threading.Lock()
        threading.Thread(target=self._wait, name="parent-watch", daemon=True).start()

    def tell(self, gone: Callable[[], None]) -> None:
        """Call ``gone`` (from the watching thread) at the parent's death; at once if it is dead."""
        with self._lock:
            self._told = gone
            dead = self._gone
        if dead:
            gone()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll()
        with self._lock:
            self._gone = True
            told = self._told
        if told is not None:
            told()
            time.sleep(GRACE_S)
        os._exit(EXIT_CODE)


def watch_parent(worker_id: str, environ: Mapping[str, str] = os.environ) -> ParentWatch | None:
    """Begin to watch; exit at once if the parent is dead already."""
    parent = os.getppid()
    if environ.get("BATON_ORPHAN") == "stay":
        return None
    if environ.get("SUPERVISOR_PROCESS_NAME") == worker_id and not _is_supervisor(parent):
        # It died before we looked: whoever is our parent now has adopted us.
        os._exit(EXIT_CODE)
    if parent <= 1:
        return None
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(EXIT_CODE)
    if os.getppid() != parent:
        os._exit(EXIT_CODE)
    return ParentWatch(pidfd)


def _is_supervisor(pid: int) -> bool:
    try:
        return b"supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
