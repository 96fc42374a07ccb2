"""Named places at which a test holds, kills or breaks a real process.

Decides how a trigger is written down: a file named after the point in the worker's trigger folder,
holding one word and, optionally, the request id it is meant for:

- ``hold``: the caller waits until the file ``<point>.reached`` is removed;
- ``kill``: SIGKILL of this process;
- ``raise``: :class:`StopPointHit`;
- ``exit``: ``os._exit(70)``.

A trigger fires once: reaching the point renames it to ``<point>.reached``, atomically, and then
writes into it who reached it: ``pid request_id``. That is how a test sees that the point was
reached, and by whom. No folder, no cost: production never sets one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_POLL_S = 0.002


class StopPointHit(RuntimeError):
    """A test asked for this failure."""


class StopPoints(Protocol):
    """Told of every named point; may wait, raise, or end the process."""

    def at(self, point: str, request_id: str) -> None: ...


class NoStopPoints:
    """Production: nothing ever happens."""

    def at(self, point: str, request_id: str) -> None:
        """Do nothing."""


class FileStopPoints:
    """Triggers from files in ``folder``; several threads may pass at once, one takes a trigger."""

    def __init__(self, folder: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        self._folder = folder
        self._sleep = sleep

    def at(self, point: str, request_id: str) -> None:
        """Take the trigger for ``point``, if there is one for this request."""
        trigger = self._folder / point
        try:
            action, *wanted = trigger.read_text().split()
        except (FileNotFoundError, ValueError):  # absent, or not written completely yet
            return
        if wanted and wanted[0] != request_id:
            return
        reached = self._folder / f"{point}.reached"
        try:
            trigger.rename(reached)
        except FileNotFoundError:
            return  # another thread or process took it
        # Whole or not at all, and nothing if the test has taken the mark away already.
        told = self._folder / f".{point}.{os.getpid()}"
        told.write_text(f"{os.getpid()} {request_id}")
        if reached.exists():
            told.replace(reached)
        self._act(action, point, reached)

    def _act(self, action: str, point: str, reached: Path) -> None:
        match action:
            case "hold":
                while reached.exists():
                    self._sleep(_POLL_S)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(70)
            case "raise":
                raise StopPointHit(f"stop point {point}")
            case _:
                raise ValueError(f"stop point {point}: unknown action {action!r}")
