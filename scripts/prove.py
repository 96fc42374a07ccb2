"""Runs the tests: three pytest processes side by side, because many tests mostly wait.

    python scripts/prove.py [pytest's arguments]

Tests that start clusters wait for processes, timers and signals; the others compute, and those of
the simulation on a clock of their own. Run one after the other they take the sum of all. Whose
clock is the machine's goes first: the computing ones at a lower priority, so that no test with a
clock in it starves, and the simulation with what is left over. What these two say is printed when
all have ended. With a path or `-k` among the arguments it is one pytest as usual.

The exit code is 0 only if all were. A SIGTERM or Ctrl-C ends all in order, clusters and all: then
it is 143 or 130.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
WAITING = ("tests/integration", "tests/e2e")
SIMULATED = ("tests/sim",)
#: Everything else: a new folder of tests is run without being named here.
COMPUTING = tuple(
    sorted(
        {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
        - {*WAITING, *SIMULATED}
    )
)
#: How much each lets others go first, and its folders. 5 is not so much that a computing test with
#: a timeout starves; a simulation has none.
PARTS = ((0, WAITING), (5, COMPUTING), (15, SIMULATED))


class Parts:
    """The processes, and the signal that ends them.

    They hear signals from here alone, each once: in this process group a Ctrl-C, or `timeout`,
    would reach them as well, and the second one would break off the ending of their clusters.
    """

    def __init__(self) -> None:
        self.ended_by = 0
        self._told = False
        self._children: list[subprocess.Popen[bytes]] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def run(self, commands: Sequence[Sequence[str]], outputs: Sequence[IO[str] | None]) -> int:
        """Run them to their ends; return the first exit code that is not 0."""
        self._children = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output and subprocess.STDOUT,
                process_group=0,
            )
            for command, output in zip(commands, outputs, strict=True)
        ]
        if self.ended_by and not self._told:
            self._tell()
        return next(filter(None, [child.wait() for child in self._children]), 0)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.ended_by = number
        self._tell()

    def _tell(self) -> None:
        for child in self._children:
            self._told = True
            child.send_signal(signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Run what the arguments ask for; return the exit code."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    paths = [ROOT / each.split("::")[0] for each in arguments if not each.startswith("-")]
    if any(each.startswith("-k") for each in arguments) or any(path.exists() for path in paths):
        os.execv(sys.executable, pytest)
    began, parts = time.monotonic(), Parts()
    with ExitStack() as files:
        said = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in PARTS[1:]]
        commands = [["nice", "-n", str(nice), *pytest, *folders] for nice, folders in PARTS]
        code = parts.run(commands, (None, *said))
        for file in said:
            file.seek(0)
            sys.stdout.write(file.read())
    print(f"all took {time.monotonic() - began:.0f} s")
    return 128 + parts.ended_by if parts.ended_by else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
