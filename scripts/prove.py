"""Runs the tests: two pytest processes side by side, because half of the tests mostly wait.

    python scripts/prove.py [pytest's arguments]

Tests that start clusters wait for processes, timers and signals; the others compute. Run one after
the other they take the sum of both. The computing ones go at a lower priority, so that no test
with a clock in it starves; what they say is printed when both have ended. With a path or `-k`
among the arguments it is one pytest as usual.

The exit code is 0 only if both were.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
WAITING = ("tests/integration", "tests/e2e")
#: Everything else: a new folder of tests is run without being named here.
COMPUTING = tuple(
    sorted(
        {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
        - set(WAITING)
    )
)
#: Enough to let the others go first, not so much that a computing test with a timeout starves.
NICE = 5


def main(arguments: list[str]) -> int:
    """Run what the arguments ask for; return the exit code."""
    pytest = [sys.executable, "-m", "pytest"]
    paths = [ROOT / each.split("::")[0] for each in arguments if not each.startswith("-")]
    if any(each.startswith("-k") for each in arguments) or any(path.exists() for path in paths):
        os.execv(sys.executable, [*pytest, *arguments])
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        computing = subprocess.Popen(
            ["nice", "-n", str(NICE), *pytest, *arguments, *COMPUTING],
            cwd=ROOT,
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            waiting = subprocess.run([*pytest, *arguments, *WAITING], cwd=ROOT, check=False)
            computing.wait()
        except KeyboardInterrupt:
            return 130
        finally:
            if computing.poll() is None:
                computing.send_signal(signal.SIGINT)
                computing.wait()
        said.seek(0)
        sys.stdout.write(said.read())
    print(f"both took {time.monotonic() - began:.0f} s")
    return waiting.returncode or computing.returncode


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main(sys.argv[1:]))
