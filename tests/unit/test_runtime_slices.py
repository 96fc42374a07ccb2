"""Short slices: taken by the thread that asks and those it starts, whatever the kernel."""

from __future__ import annotations

import subprocess
import sys

from support.engine_steps import child_env

PROGRAM = """
import os, threading
from baton.runtime import slices
policy, nice = os.sched_getscheduler(0), os.nice(0)
taken = slices.wake_first()
same = (os.sched_getscheduler(0), os.nice(0)) == (policy, nice)
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(taken, slices.wake_first() == taken, same, found == [policy])
"""

ALONE = """
import ctypes, subprocess, sys
from baton.runtime import slices
def slice_ns():
    known = ctypes.create_string_buffer(slices._ATTR.size)
    ctypes.CDLL(None).syscall(slices._GET, 0, known, slices._ATTR.size, 0)
    return slices._ATTR.unpack(known.raw)[5]
if sys.argv[1:]:
    print(slice_ns())
else:
    before, taken = slice_ns(), slices.wake_first(alone=True)
    print(before, taken, slice_ns(), flush=True)
    subprocess.run([sys.executable, "-c", sys.orig_argv[2], "child"], check=True)
"""


def test_nothing_but_the_slice_changes() -> None:
    """Policy and niceness stay; asking twice is like once; a kernel that refuses is no error."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=child_env(), capture_output=True, text=True, check=True
    )
    taken, *rest = done.stdout.split()
    assert taken in ("True", "False") and rest == ["True"] * 3


def test_what_is_started_may_keep_its_own() -> None:
    """A load generator that goes first starts clusters that do not."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=child_env(), capture_output=True, text=True, check=True
    )
    before, taken, mine, childs = done.stdout.split()
    assert childs == before
    if before != "0" and taken == "True":  # the kernel tells slices
        assert mine == "100000"
