"""Whether a process that stands still wants to run: by figures made up, and by the kernel's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.runtime.starvation import LEAST_S, Starvation, ThreadLook, look_at

LOOP, OTHER = 7, 8
LOOK_S = 0.1


def judged(*looks: tuple[ThreadLook, ...]) -> bool:
    """What is thought of process 7 after these looks, a tenth of a second apart."""
    starvation = Starvation()
    for number, threads in enumerate(looks):
        starvation.looked(threads, 50.0 + number * LOOK_S)
    return starvation.starves(LOOP)


def thread(
    number: int,
    *,
    runnable: bool = False,
    ran: float = 0.0,
    waited: float = 0.0,
    tid: int = LOOP,
) -> ThreadLook:
    """The look ``number`` at a thread that runs and waits for these shares of the time."""
    seconds = number * LOOK_S
    return ThreadLook(tid, runnable, 5.0 + ran * seconds, 1.0 + waited * seconds)


@pytest.mark.parametrize(
    ("behaviour", "starved"),
    [
        ({"runnable": True}, True),
        ({"runnable": True, "ran": 0.05, "waited": 0.95}, True),
        ({"runnable": False, "ran": 0.05, "waited": 0.95}, True),
        ({"runnable": True, "ran": 1.0}, False),
        ({"runnable": True, "ran": 0.5, "waited": 0.5}, False),
        ({"runnable": False}, False),
        ({"runnable": False, "ran": 0.3, "waited": 0.3}, False),
    ],
    ids=[
        "never ran",
        "seldom",
        "between looks",
        "spins",
        "spins on half a core",
        "sleeps",
        "works",
    ],
)
def test_only_who_waits_for_a_core_is_starved(behaviour: dict[str, float], starved: bool) -> None:
    """Who sleeps, is stopped or burns its time is not: more of it would not help."""
    assert judged(*((thread(n, **behaviour),) for n in range(20))) is starved  # type: ignore[arg-type]


def test_the_wait_is_counted_once() -> None:
    """The kernel credits a wait when it ends: it was counted while it lasted."""
    waiting = [(thread(n, runnable=True),) for n in range(6)]
    credited = ThreadLook(LOOP, False, 5.0, 1.6)
    asleep = [(credited,)] * 10
    assert judged(*waiting)
    assert not judged(*waiting, *asleep), "a third of the time"


def test_who_waits_for_a_starved_thread_is_starved_too() -> None:
    """The loop's thread sleeps until another one gives the interpreter back, and that one gets no
    core. But a loop that spins has no excuse."""
    held = [(thread(n), thread(n, runnable=True, tid=OTHER)) for n in range(20)]
    assert judged(*held)
    spins = [(thread(n, ran=0.9), thread(n, runnable=True, tid=OTHER)) for n in range(20)]
    assert not judged(*spins)


def test_too_short_a_time_says_nothing() -> None:
    """Nor does what was before a standstill that is over."""
    looks = [(thread(n, runnable=True),) for n in range(20)]
    assert not judged(*looks[: int(LEAST_S / LOOK_S)])
    assert not judged()
    starvation = Starvation()
    for number, threads in enumerate(looks):
        starvation.looked(threads, number * LOOK_S)
    assert starvation.starves(LOOP)
    starvation.forget()
    assert not starvation.starves(LOOP)


def test_threads_come_and_go() -> None:
    """A new one is counted from when it is seen; one that ended has no say."""
    late = thread(0, runnable=True, tid=OTHER)
    assert not judged(*[(thread(n),) for n in range(15)], *[(thread(n), late) for n in range(5)])
    assert not judged(*[(thread(n), late) for n in range(15)], (thread(15),))


def test_figures_are_read_from_proc(tmp_path: Path) -> None:
    """Whatever a thread's name is; and nothing from a kernel that does not count."""
    for tid, state, figures in ((LOOP, "S", "2500000000 40000000 12"), (OTHER, "R", "0 7 1")):
        task = tmp_path / str(LOOP) / "task" / str(tid)
        task.mkdir(parents=True)
        (task / "stat").write_text(f"{tid} (a) R (b) {state} 1 7 7 0")
        (task / "schedstat").write_text(f"{figures}\n")
    found = {each.tid: each for each in look_at(LOOP, tmp_path)}
    assert found[LOOP] == ThreadLook(LOOP, False, 2.5, 0.04)
    assert found[OTHER].runnable
    (tmp_path / str(LOOP) / "task" / str(LOOP) / "schedstat").write_text("0 0 0\n")
    assert look_at(LOOP, tmp_path) == ()
    (tmp_path / str(LOOP) / "task" / str(OTHER) / "schedstat").unlink()
    assert look_at(LOOP, tmp_path) == ()
    assert look_at(99, tmp_path) == ()


# --- real processes -------------------------------------------------------------------------------

SPIN = "while True: pass"
SLEEP = "import time; time.sleep(60)"


@contextmanager
def running(code: str, *, count: int = 1) -> Iterator[list[int]]:
    """Processes of which each does nothing but ``code``, on one core."""
    core = min(os.sched_getaffinity(0))
    made = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        for each in made:
            os.sched_setaffinity(each.pid, {core})
        yield [each.pid for each in made]
    finally:
        for each in made:
            each.kill()
        for each in made:
            each.wait()


def watched(pid: int, seconds: float = 1.5) -> bool:
    """Look at a process as a guard does."""
    starvation = Starvation()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        starvation.looked(look_at(pid), time.monotonic())
        time.sleep(LOOK_S)  # the time that is looked at
    return starvation.starves(pid)


@pytest.fixture
def kernel_counts() -> None:
    if not look_at(os.getpid()):
        pytest.skip("this kernel does not count what threads wait")


@pytest.mark.usefixtures("kernel_counts")
def test_a_process_beside_busy_ones_on_its_core_is_starved() -> None:
    """In the kernel's idle class beside four that never rest; without them it is not."""
    with running(SPIN) as (pid,):
        time.sleep(0.3)  # it has started
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        with running(SPIN, count=4):
            assert watched(pid)


@pytest.mark.usefixtures("kernel_counts")
@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_that_sleeps_or_is_stopped_is_not(stopped: bool) -> None:
    """However busy its core is."""
    with running(SPIN if stopped else SLEEP) as (pid,), running(SPIN, count=2):
        time.sleep(0.5)  # it has started
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        assert not watched(pid)
