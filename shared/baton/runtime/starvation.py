"""Whether a process that stands still wants to run and gets no core.

Decides by what the kernel counts for each of its threads, between two looks. A thread that waits on
a run queue is starved: the kernel adds that time up when the thread gets a core (``schedstat``);
until then it shows as runnable and as not having run. A thread that sleeps, is stopped, or runs and
comes to no end is not: more time would not help it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: Of the time looked at, so much has to be waiting on a run queue.
STARVED_SHARE = 0.75
#: An event loop's thread that ran for so much of it had its chance.
RAN_SHARE = 0.5
#: Less than this says nothing.
LEAST_S = 0.3


@dataclass(frozen=True, slots=True)
class ThreadLook:
    """One thread at one moment; both times count from its start, in seconds."""

    tid: int
    runnable: bool
    ran_s: float
    waited_s: float
    """On a run queue, while others ran. Added up when it got a core."""


def look_at(pid: int, proc: Path = Path("/proc")) -> tuple[ThreadLook, ...]:
    """Return the threads of a process; nothing if it is gone, or its kernel does not count."""
    found = []
    try:
        for task in (proc / str(pid) / "task").iterdir():
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            ran, waited, _ = map(int, (task / "schedstat").read_text().split())
            found.append(ThreadLook(int(task.name), state == "R", ran / 1e9, waited / 1e9))
    except (OSError, ValueError, IndexError):
        # A thread that ended just now: the next look is as good.
        return ()
    # A kernel without these figures shows zeros, and then a thread that runs looks like one that
    # waits.
    return tuple(found) if any(thread.ran_s for thread in found) else ()


@dataclass(slots=True)
class _Sum:
    """What one thread did since the first look."""

    last: ThreadLook
    ran_s: float = 0.0
    waited_s: float = 0.0

    def add(self, look: ThreadLook, seconds: float) -> None:
        ran_s = look.ran_s - self.last.ran_s
        waited_s = look.waited_s - self.last.waited_s
        if look.runnable and self.last.runnable:
            waited_s = max(waited_s, seconds - ran_s)
        self.ran_s += max(0.0, ran_s)
        # What it is credited with when it gets a core was counted while it waited.
        self.waited_s += min(seconds, max(0.0, waited_s))
        self.last = look


class Starvation:
    """What the threads of one process did while it stood still."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sum] = {}
        """Of the threads that were there at the last look."""
        self._since: float | None = None
        self._until = 0.0

    def forget(self) -> None:
        """It does not stand still."""
        self._sums.clear()
        self._since = None

    def looked(self, threads: Iterable[ThreadLook], now: float) -> None:
        """Take one look."""
        if self._since is None:
            self._since = self._until = now
        seconds, self._until = now - self._until, now
        sums = {}
        for thread in threads:
            known = self._sums.get(thread.tid)
            if known is None:
                known = _Sum(thread)
            else:
                known.add(thread, seconds)
            sums[thread.tid] = known
        self._sums = sums

    def starves(self, pid: int) -> bool:
        """Return whether the process ``pid``, whose first thread has the event loop, got no core.

        Any thread may be the starved one: who waits for a lock, or for the interpreter, waits for
        whoever holds it."""
        seconds = 0.0 if self._since is None else self._until - self._since
        if seconds < LEAST_S:
            return False
        loop = self._sums.get(pid)
        if loop is not None and loop.ran_s >= RAN_SHARE * seconds:
            return False
        return any(each.waited_s >= STARVED_SHARE * seconds for each in self._sums.values())
