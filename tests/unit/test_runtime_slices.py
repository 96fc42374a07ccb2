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


def test_nothing_but_the_slice_changes() -> None:
    """Policy and niceness stay; asking twice is like once; a kernel that refuses is no error."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=child_env(), capture_output=True, text=True, check=True
    )
    taken, *rest = done.stdout.split()
    assert taken in ("True", "False") and rest == ["True"] * 3
