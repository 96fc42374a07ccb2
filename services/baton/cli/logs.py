"""`baton logs`: what all processes of the cluster have logged, as one story.

Decides where a line stands among those of other files: by its own time, in whichever form its
writer gives it. A line without one (a traceback) stays behind the line before it.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from baton.cli.cluster import Cluster
from baton.cli.leftovers import LOGS
from baton.cli.terminal import CommandError, ExitCode, say
from baton.runtime.settings import Config

#: New lines are looked for this often.
_LOOK_S = 0.25
#: A worker's JSON, the restarter and supervisor; then the ledger's server.
_ISO = re.compile(r'(?:\{"ts":")?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?)')
_SERVER = re.compile(r"\d+:\w (\d\d \w{3} \d{4} \d\d:\d\d:\d\d\.\d{3})")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log."""

    at: float
    """Unix time; never before that of the line above it."""
    name: str
    text: str


def logs(config: Config, worker: str | None, lines: int, *, follow: bool) -> int:
    """Print the newest lines of one log or of all; go on with what comes if ``follow``."""
    folder = Cluster(config, os.environ, say).run_dir / LOGS
    every = sorted(folder.glob("*.log"))
    if not every:
        raise CommandError(f"no logs in {folder}: no cluster has run here")
    if worker not in (None, *(path.stem for path in every)):
        names = ", ".join(path.stem for path in every)
        raise CommandError(f"no log of {worker}; there are {names}")
    tails = {path: Tail(path) for path in every if worker in (None, path.stem)}
    width = 0 if worker else max(len(path.stem) for path in every)
    newest = [deque(tail.read(whole=not follow), maxlen=lines) for tail in tails.values()]
    read_on = _print(merged(newest), width)
    with suppress(KeyboardInterrupt):  # that is how one ends it
        while follow and read_on:
            time.sleep(_LOOK_S)
            if worker is None:
                for path in sorted(folder.glob("*.log")):
                    tails.setdefault(path, Tail(path))
            read_on = _print(merged(tail.read() for tail in tails.values()), width)
    return ExitCode.OK


def merged(files: Iterable[Iterable[Line]]) -> list[Line]:
    """Return the lines of all files by time; those of one file keep their order."""
    return sorted((line for lines in files for line in lines), key=lambda line: line.at)


def _print(lines: Iterable[Line], width: int) -> bool:
    """Print them, with their files' names if ``width`` is not 0; whether somebody reads."""
    return all(say(f"{line.name:{width}}  {line.text}" if width else line.text) for line in lines)


class Tail:
    """A log file that grows; supervisor puts it aside when it is long, and begins anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._begun = b""
        self._at = 0.0

    def read(self, *, whole: bool = False) -> Iterator[Line]:
        """Give what came since the last call; a line that has no end yet only if ``whole``."""
        yield from self._lines()
        if self._was_put_aside():
            if self._file is not None:
                self._file.close()
            self._file = None
            yield from self._lines()
        if whole and self._begun:
            yield self._line(self._begun)
            self._begun = b""

    def _lines(self) -> Iterator[Line]:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return  # between two files; the next look finds the new one
        for piece in self._file:
            self._begun += piece
            if piece.endswith(b"\n"):
                yield self._line(self._begun)
                self._begun = b""

    def _was_put_aside(self) -> bool:
        if self._file is None:
            return False
        mine = os.fstat(self._file.fileno())
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False
        return now.st_ino != mine.st_ino or now.st_size < self._file.tell()

    def _line(self, data: bytes) -> Line:
        text = data.decode(errors="replace").rstrip("\n")
        self._at = max(self._at, time_of(text) or 0.0)
        return Line(self._at, self._path.stem, text)


def time_of(text: str) -> float | None:
    """Return the Unix time with which a line begins; ``None``: it has none."""
    try:
        if found := _ISO.match(text):
            return datetime.fromisoformat(found[1].replace(",", ".")).timestamp()
        if found := _SERVER.match(text):
            return datetime.strptime(found[1], "%d %b %Y %H:%M:%S.%f").timestamp()
    except ValueError:
        pass  # it looks like a time and is none
    return None
