"""What the kernel says about this host and its processes.

Decides how a process names its boot, its incarnation and its time, and how the death of another
process is seen. That is a hint to act early, never the proof that memory may be reused
(DESIGN 4.5).
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

_RANDOM_BITS = 20


def boottime() -> float:
    """Return seconds since boot, suspend included (CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return kernel boot and pid namespace: pids of two processes compare only if it is equal."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def new_incarnation() -> int:
    """Return a number for this start: greater than that of any earlier start, below 2**62.

    Milliseconds of the wall clock (42 bits last until 2109) above random bits, so two starts
    differ even where a clock was set back.
    """
    return (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when ``pid`` ends, ``None`` if not to be had.

    Raises:
        ProcessLookupError: there is no such process (any more).
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, OverflowError):
        # Another user's process, a kernel without pidfds, no descriptors left, or a number that no
        # process has (a peer says what it likes of itself): silence will tell.
        return None
