"""Yielding: a cluster that starts as a whole does not; who may not leave the idle class never
enters it; and cores are right in the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.runtime.parent import Parent

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
#: Begins and ends, with a thread made in between; prints policy and cores of all threads each time.
PROGRAM = """
import os, resource, sys, threading, time
from baton.runtime import yielding
from baton.runtime.cores import Placement

def show():
    tids = [int(tid) for tid in os.listdir("/proc/self/task")]
    policies = {os.sched_getscheduler(tid) for tid in tids}
    cores = {tuple(sorted(os.sched_getaffinity(tid))) for tid in tids}
    print(sorted(policies), sorted(cores), flush=True)

usable = sorted(os.sched_getaffinity(0))
first, last = usable[0], usable[-1]
if sys.argv[1] != "root":
    resource.setrlimit(resource.RLIMIT_NICE, (int(sys.argv[1]),) * 2)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
start = yielding.Yielding(Placement((first,), 1))
start.end_after(float(sys.argv[2]))
start.begin()
stop = threading.Event()
threading.Thread(target=stop.wait).start()
show()
if float(sys.argv[2]) < 1:
    waited_until = time.monotonic() + 25
    while os.sched_getscheduler(0) == os.SCHED_IDLE and time.monotonic() < waited_until:
        stop.wait(0.05)
else:
    yielding.end(os.getpid(), Placement((last,), 1))
show()
stop.set()
"""


def shown(rights: str, most_s: float = 60.0) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, rights, str(most_s)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


def cores() -> tuple[int, int]:
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


def _may_raise_limits() -> bool:
    (line,) = [li for li in Path("/proc/self/status").read_text().splitlines() if "CapEff" in li]
    return bool(int(line.split()[1], 16) & 1 << 24)


@ROOT_ONLY
def test_it_yields_and_then_runs_where_it_belongs() -> None:
    """In the idle class and off the worker's cores; then neither, for every thread."""
    first, last = cores()
    before, after = shown("root")
    assert before == f"[{os.SCHED_IDLE}] [({first},)]"
    assert after == f"[{os.SCHED_OTHER}] [({last},)]"


@ROOT_ONLY
def test_without_the_right_to_come_back_only_the_cores_change() -> None:
    """A user without RLIMIT_NICE would stay in the idle class for ever: it does not enter it."""
    first, last = cores()
    before, after = shown("0")
    assert before == f"[{os.SCHED_OTHER}] [({first},)]"
    assert after == f"[{os.SCHED_OTHER}] [({last},)]"


@ROOT_ONLY
def test_with_a_limit_any_user_may_come_back() -> None:
    """RLIMIT_NICE 20 (LimitNICE=+0 of systemd) is enough."""
    if not _may_raise_limits():
        pytest.skip("raising RLIMIT_NICE takes CAP_SYS_RESOURCE, which this root does not have")
    before, after = shown("20")
    assert before.startswith(f"[{os.SCHED_IDLE}]")
    assert after.startswith(f"[{os.SCHED_OTHER}]")


def test_it_ends_by_itself() -> None:
    """Also when nobody ends it: a start on a full machine gets its turn."""
    before, after = shown("root", 0.2)
    assert after.startswith(f"[{os.SCHED_OTHER}]"), before


def test_who_starts_with_its_supervisor_knows_that_nobody_serves() -> None:
    """A parent that has just begun is young; init, and whoever is watched by nobody, is not."""
    parent = subprocess.Popen(["sleep", "60"])
    try:
        assert Parent(parent.pid).is_young()
    finally:
        parent.kill()
        parent.wait()
    assert not Parent(parent.pid).is_young(), "it is gone"
    assert not Parent(0).is_young()
    if float(Path("/proc/uptime").read_text().split()[0]) > 60:
        assert not Parent(1).is_young()
