"""Event loops before computing, where both share a core.

Decides how long a thread may run before one that has waited for something may take its place. A
loop that is woken beside a thread that computes would wait until that one has used its slice up (a
millisecond or more): the kernel (Linux 6.12 and newer) lets the thread with the shorter slice go
first. Both get the same share of the core as before. An older kernel takes the wish and does
nothing about it.
"""

from __future__ import annotations

import ctypes
import platform
import struct

#: The least that the kernel takes.
SHORT_NS = 100_000

_SET, _GET = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (0, 0))
_RESET_ON_FORK = 1
#: ``struct sched_attr`` (see sched_setattr(2)): size, policy, flags, nice, priority, runtime,
#: deadline, period.
_ATTR = struct.Struct("=IIQiIQQQ")


def wake_first(*, alone: bool = False) -> bool:
    """Give the calling thread, and all that it starts from now on unless it is to be ``alone``, a
    short slice; return whether the kernel took it."""
    if not _SET:
        return False
    libc = ctypes.CDLL(None)
    known = ctypes.create_string_buffer(_ATTR.size)
    if libc.syscall(_GET, 0, known, _ATTR.size, 0) != 0:
        return False
    size, policy, flags, nice, priority, _, deadline, period = _ATTR.unpack(known.raw)
    flags |= _RESET_ON_FORK if alone else 0
    wanted = _ATTR.pack(size, policy, flags, nice, priority, SHORT_NS, deadline, period)
    done: int = libc.syscall(_SET, 0, wanted, 0)
    return done == 0
