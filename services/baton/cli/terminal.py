"""What the command writes: plain lines to people, one clear line for an error.

Decides where text goes and when it is coloured; says nothing by itself. Tables are drawn by rich,
which is imported only when there is one to draw.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `baton`, as its `--help` tells them."""

    OK = 0
    FAILED = 1
    """What was asked for is not so: nothing runs, something was left behind, no answer."""
    USAGE = 2
    """The command line is wrong."""
    TEMPORARY = 75
    """Not now: a port is taken, a process did not become ready. Trying again may help."""
    CONFIG = 78
    """A setting or the model is wrong. Trying again does not help."""
    INTERRUPTED = 130


class CommandError(Exception):
    """Ends the command with one line that says what is wrong and what to do."""

    def __init__(self, text: str, code: int = ExitCode.FAILED) -> None:
        super().__init__(text)
        self.code = code


def say(text: str = "", *, end: str = "\n") -> bool:
    """Write to standard output at once, also through a pipe; whether somebody reads there.

    `baton status | head`: who has read enough is no error, and what a command does beside printing
    is done to its end. So nothing is raised, and what follows goes nowhere.
    """
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still in the buffer goes there too: Python would complain while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def warn(text: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return ``1 job``, ``2 jobs``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def is_interactive() -> bool:
    """Whether a person sits at both ends."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def table(title: str, columns: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """Draw a table as wide as it needs to be; numbers stand right."""
    from rich.console import Console
    from rich.table import Table

    # rich would fold a title to the table's width.
    say(title)
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    texts = [[str(cell) for cell in line] for line in lines]
    for place, column in enumerate(columns):
        cells = [line[place] for line in texts]
        numeric = bool(cells) and all(cell[:1].isdigit() or cell in {"", "-"} for cell in cells)
        drawn.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for line in texts:
        drawn.add_row(*line)
    # Through a pipe rich would cut at 80 columns; a table for grep must keep its words.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    with console.capture() as captured:
        console.print(drawn)
    for text in captured.get().splitlines():
        say(text.rstrip())
