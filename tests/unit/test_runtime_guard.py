"""A guard and its worker as real processes: killed, frozen, stopped, orphaned."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from baton.runtime.starvation import look_at
from support.runtime_rig import Process, Rig

#: Short leases, so that a frozen worker is dealt with soon.
SHORT = {"BATON_LIMITS_LEASE_TTL_MS": "1000", "BATON_LIMITS_LEASE_RENEW_MS": "250"}
LEASE_S = 1.0
ENDS_WITHIN_S = 5.0


def children(pid: int) -> dict[int, str]:
    """Return the children of a process and their states; a zombie's is Z."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found[int(entry)] = fields[0]
    return found


def ends(pidfd: int, seconds: float) -> bool:
    return bool(select.select([pidfd], [], [], seconds)[0])


def serving(rig: Rig, **environ: str) -> Process:
    process = rig.start("router-0", **environ)
    process.until("process_ready")
    return process


def test_a_killed_worker_is_back_under_the_same_guard(rig: Rig) -> None:
    """kill -9 again and again: another pid, a greater incarnation, ready soon, no zombie."""
    process = serving(rig)
    incarnations = [int(str(process.until("process_starting")["incarnation"]))]
    for count in (1, 2):
        killed, began = process.worker, time.monotonic()
        os.kill(killed, signal.SIGKILL)
        process.until_after(count, "process_ready")
        assert time.monotonic() - began < 3.0
        assert process.worker != killed
        line = process.until_after(count, "process_starting")
        incarnations.append(int(str(line["incarnation"])))
        (only,) = children(process.popen.pid).items()
        assert only[0] == process.worker
        assert only[1] != "Z"
    assert incarnations == sorted(set(incarnations))
    ended = [line for line in process.lines if line["event"] == "worker_ended"]
    assert [line["signal"] for line in ended] == ["SIGKILL", "SIGKILL"]
    assert process.popen.poll() is None


@pytest.mark.parametrize("frozen", [False, True])
def test_a_killed_guard_takes_its_worker_along(rig: Rig, frozen: bool) -> None:
    """kill -9 of the guard: its worker is gone within five seconds, also one that is stopped."""
    process = serving(rig)
    pidfd = os.pidfd_open(process.worker)
    try:
        if frozen:
            os.kill(process.worker, signal.SIGSTOP)
        process.popen.kill()
        assert ends(pidfd, ENDS_WITHIN_S)
    finally:
        os.close(pidfd)


def test_a_stopped_worker_is_killed_and_replaced(rig: Rig) -> None:
    """SIGSTOP: killed when its lease must have run out, and soon after the next one is ready."""
    process = serving(rig, **SHORT)
    began = time.monotonic()
    os.kill(process.worker, signal.SIGSTOP)
    line = process.until("worker_killed")
    assert line["reason"] == "its event loop stands still"
    assert time.monotonic() - began >= LEASE_S
    process.until_after(1, "process_ready")
    assert time.monotonic() - began < LEASE_S + 3.0


def test_a_busy_loop_is_killed_and_says_where_it_was(rig: Rig) -> None:
    """An endless loop in the machine: the log has its stack, and the next one serves."""
    once = rig.run_dir / "once"
    once.touch()
    process = rig.start("router-0", TEST_BEHAVIOUR="spin", TEST_ONCE=str(once), **SHORT)
    process.until("worker_killed")
    process.until("process_ready")
    assert b"_spin_once" in process.raw


#: With so many beside it, a thread of SCHED_IDLE (weight 3 of 65,539) gets its next turn after
#: about a minute; with half a dozen it may come to beat in time again and again.
HOGS = 64
HOG = f"""
import os
for _ in range({HOGS - 1}):
    if not os.fork():
        break
while True:
    pass
"""


def test_a_starved_worker_is_not_killed(rig: Rig) -> None:
    """On a core that others keep busy it does not come to beat: it gets more time, the log says
    why, and when they are gone the same worker goes on."""
    process = serving(rig, **SHORT)
    worker = process.worker
    if not look_at(worker):
        pytest.skip("this kernel does not count what threads wait")
    core = min(os.sched_getaffinity(0))
    threads = [int(tid) for tid in os.listdir(f"/proc/{worker}/task")]
    for tid in threads:
        os.sched_setaffinity(tid, {core})
        os.sched_setscheduler(tid, os.SCHED_IDLE, os.sched_param(0))
    # Children of this session: where sessions share a core as groups, weights count within one.
    hog = ["taskset", "-c", str(core), sys.executable, "-c", HOG]
    with subprocess.Popen(hog, process_group=0) as hogs:
        try:
            process.until("worker_starved")
        finally:
            os.killpg(hogs.pid, signal.SIGKILL)
            with suppress(PermissionError):  # a user may lower a thread, and raise none
                for tid in threads:
                    os.sched_setscheduler(tid, os.SCHED_OTHER, os.sched_param(0))
    select.select([], [], [], 2 * LEASE_S)
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert process.count("worker_killed") == 0
    assert process.worker == worker


def test_with_fence_kill_never_a_stopped_worker_lives(rig: Rig) -> None:
    """It is told, and not killed; when it goes on it serves again."""
    process = serving(rig, BATON_FENCE_KILL="never", **SHORT)
    worker = process.worker
    os.kill(worker, signal.SIGSTOP)
    process.until("worker_frozen")
    pidfd = os.pidfd_open(worker)
    try:
        assert not ends(pidfd, LEASE_S)
        os.kill(worker, signal.SIGCONT)
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert ends(pidfd, 0.0)
    finally:
        os.close(pidfd)
    assert process.count("worker_killed") == 0


def test_a_stopped_guard_harms_nobody(rig: Rig) -> None:
    """Stopped for longer than a lease, it does not count what it did not see: nothing is done."""
    process = serving(rig, **SHORT)
    worker = process.worker
    process.popen.send_signal(signal.SIGSTOP)
    os.kill(worker, signal.SIGSTOP)
    # Both stand still, as in a suspend; the guard goes on first.
    select.select([], [], [], 2 * LEASE_S)
    process.popen.send_signal(signal.SIGCONT)
    select.select([], [], [], LEASE_S / 2)
    os.kill(worker, signal.SIGCONT)
    select.select([], [], [], 2 * LEASE_S)
    assert children(process.popen.pid).keys() == {worker}
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert process.count("worker_killed") == 0


def test_failures_of_the_start_are_tried_again_after_pauses(rig: Rig) -> None:
    """A worker that fails while it is built: at once, then later and later."""
    process = rig.start("router-0", TEST_BEHAVIOUR="build_bug")
    process.until_after(2, "worker_ended")
    ended = [line for line in process.lines if line["event"] == "worker_ended"]
    assert [line["restart_in_s"] for line in ended] == [0.0, 0.5, 1.0]
    assert [line["code"] for line in ended] == [70, 70, 70]
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_wrong_settings_of_the_worker_stay_down(rig: Rig) -> None:
    """Exit code 78 is the guard's too, after one start."""
    process = rig.start("router-0", TEST_BEHAVIOUR="no_model")
    assert process.wait() == 78
    assert process.count("process_starting") == 1


def test_a_loading_guard_ends_with_its_parent_and_with_a_signal(rig: Rig) -> None:
    """While it loads nothing is forked yet; it can be stopped all the same."""
    process = rig.start("router-0", TEST_BEHAVIOUR="slow_preload")
    process.until("preloading")
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_a_ctrl_c_at_the_terminal_reaches_the_worker_once(rig: Rig) -> None:
    """A signal to the guard's process group is passed on, not doubled: the drain is not cut."""
    process = serving(rig, TEST_BEHAVIOUR="never_drained")
    assert os.getpgid(process.worker) == process.worker
    process.popen.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert process.until("process_ending")["reason"] == "the drain took too long"


def test_a_start_yields_until_it_is_ready(rig: Rig) -> None:
    """Its threads are in the kernel's idle class while it is built, and none is when it serves."""
    if os.geteuid() != 0:
        pytest.skip("whoever may not leave the idle class does not enter it")
    building = rig.start("router-1", TEST_BEHAVIOUR="slow")
    worker = int(str(building.until("process_starting")["pid"]))
    assert os.sched_getscheduler(worker) == os.SCHED_IDLE
    assert os.sched_getscheduler(building.popen.pid) == os.SCHED_OTHER
    process = serving(rig)
    assert policies(process.worker) == {os.SCHED_OTHER}
    os.kill(process.worker, signal.SIGKILL)
    process.until_after(1, "process_ready")
    assert policies(process.worker) == {os.SCHED_OTHER}


def policies(pid: int) -> set[int]:
    return {os.sched_getscheduler(int(tid)) for tid in os.listdir(f"/proc/{pid}/task")}


def test_nothing_of_the_guard_is_more_than_memory(rig: Rig) -> None:
    """A guard has one thread and no socket, lock or file that it could pass on: but the pulse."""
    process = serving(rig)
    guard = process.popen.pid
    assert len(os.listdir(f"/proc/{guard}/task")) == 1
    folder = Path(f"/proc/{guard}/fd")
    held = {int(path.name): os.readlink(path) for path in folder.iterdir()}
    assert {fd for fd, what in held.items() if "memfd:pulse" not in what} == {0, 1, 2}
    assert len(held) > 3, "the pulse"


def test_a_restart_loads_anew_while_the_worker_serves(rig: Rig) -> None:
    """SIGUSR2: the guard begins anew in its own process, and only then the worker makes room."""
    process = serving(rig)
    guard, first = process.popen.pid, process.worker
    for count in (1, 2):
        os.kill(guard, signal.SIGUSR2)
        process.until_after(count, "process_ready")
        assert process.count("preloaded") == count + 1
    events = [line["event"] for line in process.lines]
    second = events.index("preloaded", events.index("guard_renewed"))
    assert events.index("restart_requested") > second
    assert process.count("worker_replaced") == 2
    assert process.count("worker_ended") == 0
    assert process.worker != first
    assert children(guard).keys() == {process.worker}
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_a_worker_killed_while_its_guard_loads_anew_is_replaced(rig: Rig) -> None:
    """The new guard adopts a dead worker: it is reaped, and the next one starts."""
    process = serving(rig)
    os.kill(process.popen.pid, signal.SIGUSR2)
    process.until("guard_renewed")
    os.kill(process.worker, signal.SIGKILL)
    process.until_after(1, "process_ready")
    assert children(process.popen.pid).keys() == {process.worker}


def test_a_guard_that_was_renewed_still_sees_a_frozen_worker(rig: Rig) -> None:
    """The pulse is handed on: a worker that stands still instead of making room is killed."""
    process = serving(rig, **SHORT)
    os.kill(process.worker, signal.SIGSTOP)
    os.kill(process.popen.pid, signal.SIGUSR2)
    process.until("worker_killed")
    process.until_after(1, "process_ready")
