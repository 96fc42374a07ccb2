"""A process that starts lets those that serve run first.

Decides how: off the cores of decode, and in the kernel's idle class, where a thread runs only when
nobody else wants the core. Importing a numeric library beside a decode worker doubled its step for
five seconds; in the idle class it did not. Whoever enters that class may not always leave it (it
takes RLIMIT_NICE or CAP_SYS_NICE, see sched(7)): that is tried out first, in another process.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from baton.runtime.cores import Placement

_PLAIN = os.sched_param(0)


class Yielding:
    """How this process and those forked from it yield while they start."""

    def __init__(self, rest: Placement) -> None:
        """``rest``: the cores that are not decode's."""
        self._rest = rest
        self._idle = _may_leave()

    def begin(self) -> None:
        """Yield from now on; before anything heavy is done, with no other thread running."""
        if self._rest.cores:
            os.sched_setaffinity(0, self._rest.cores)
        if self._idle:
            os.sched_setscheduler(0, os.SCHED_IDLE, _PLAIN)

    def end_after(self, seconds: float) -> None:
        """End it by itself then: on a machine without idle time a start would never end."""

        def hurry(number: int, frame: FrameType | None) -> None:
            end(os.getpid(), self._rest)

        signal.signal(signal.SIGALRM, hurry)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def end(pid: int, placement: Placement) -> None:
    """Let every thread of ``pid`` run where it belongs and like any other."""
    # A thread that is made meanwhile by one that still yields is found in the next round.
    while pending := [tid for tid in _threads(pid) if not _runs_as(tid, placement)]:
        for tid in pending:
            try:
                if placement.cores:
                    os.sched_setaffinity(tid, placement.cores)
                if os.sched_getscheduler(tid) == os.SCHED_IDLE:
                    os.sched_setscheduler(tid, os.SCHED_OTHER, _PLAIN)
            except ProcessLookupError:
                continue


def _runs_as(tid: int, placement: Placement) -> bool:
    try:
        there = not placement.cores or os.sched_getaffinity(tid) == set(placement.cores)
        return there and os.sched_getscheduler(tid) != os.SCHED_IDLE
    except ProcessLookupError:
        return True


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return []


def _may_leave() -> bool:
    child = os.fork()
    if child == 0:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, _PLAIN)
            os.sched_setscheduler(0, os.SCHED_OTHER, _PLAIN)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0
