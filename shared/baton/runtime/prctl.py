"""Two things that only ``prctl`` can do: die with the parent, and carry a name that ``ps`` shows.

Decides nothing and imports almost nothing: it is needed in the first moments of a process.
"""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(number: int, parent_pid: int) -> None:
    """Ask for signal ``number`` when the parent dies; raise it at once if it is dead already.

    The kernel counts the death of the *thread* that started this process, so programs are started
    from a main thread. It is forgotten over ``fork``.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), number)


def set_name(name: str) -> None:
    """Be called ``name`` (its first 15 bytes) in ``ps`` and ``top``."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def _prctl(option: int, argument: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
