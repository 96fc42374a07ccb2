"""Runs a program that the kernel ends when its parent dies.

    python -m baton.cli.pdeath SIGNAL PARENT_PID -- program arguments...

Decides nothing: it asks the kernel for SIGNAL at the parent's death, checks that the parent did
not die before that took effect, and becomes the program. `PARENT_PID` 0 means: the supervisor that
started us, if it still is our parent. It imports almost nothing, so the time in which nobody
watches is short. The kernel counts the death of the *thread* that started us, so callers start
programs from their main thread.
"""

from __future__ import annotations

import os
import signal
import sys

from baton.runtime.prctl import die_with_parent


def _supervisor() -> int:
    """Return the parent's pid, or one that nobody has: then the supervisor is dead already."""
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/cmdline", "rb") as line:
            return parent if b"supervisord" in line.read() else -1
    except OSError:
        return -1


def main(arguments: list[str]) -> None:
    """Set the signal and become the program."""
    name, parent, dashes, *program = arguments
    if dashes != "--" or not program:
        sys.exit("usage: pdeath SIGNAL PARENT_PID -- program arguments...")
    die_with_parent(signal.Signals[f"SIG{name}"], int(parent) or _supervisor())
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
