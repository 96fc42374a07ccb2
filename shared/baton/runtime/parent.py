"""Notices the death of the process that started this one, from the first moment on.

Decides that a guard whose supervisor was killed ends: nobody would restart or stop it any more. It
imports next to nothing, because it is the first thing a process does; the kernel tells by a signal
(``baton.runtime.prctl``), so that it is noticed while everything else is still being imported.

pid 1 is not watched (an init or systemd outlives us), nor is anybody with ``BATON_ORPHAN=stay``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from baton.runtime.prctl import die_with_parent

EXIT_CODE = 75
#: Sent by the kernel. Also when only the parent's *thread* that started us ended, so it is no more
#: than a reason to look.
TOLD_BY = signal.SIGRTMIN
#: Whoever starts a cluster has started all of it before it is this old.
YOUNG_S = 3.0


class Parent:
    """The process that started this one; :func:`watch_parent` makes it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def is_gone(self) -> bool:
        """Whether somebody else has adopted us."""
        return bool(self._pid) and os.getppid() != self._pid

    def is_young(self) -> bool:
        """Whether it has just begun itself: the whole cluster starts, and nobody serves yet."""
        try:
            text = Path(f"/proc/{self._pid}/stat").read_text()
        except OSError:
            return False
        # The name in parentheses may itself hold spaces and parentheses.
        began_s = int(text[text.rindex(")") + 2 :].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s < YOUNG_S


def watch_parent(worker_id: str, environ: Mapping[str, str] = os.environ) -> Parent:
    """Begin to watch; exit at once if the parent is dead already, or dies while we load."""
    pid = os.getppid()
    if environ.get("BATON_ORPHAN") == "stay":
        return Parent(0)
    if environ.get("SUPERVISOR_PROCESS_NAME") == worker_id and not _is_supervisor(pid):
        # It died before we looked: whoever is our parent now has adopted us.
        os._exit(EXIT_CODE)
    if pid <= 1:
        return Parent(0)
    parent = Parent(pid)

    def look(number: int, frame: FrameType | None) -> None:
        if parent.is_gone():
            os._exit(EXIT_CODE)

    signal.signal(TOLD_BY, look)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {TOLD_BY})  # a former guard here had it blocked
    die_with_parent(TOLD_BY, pid)
    return parent


def _is_supervisor(pid: int) -> bool:
    try:
        return b"supervisord" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
