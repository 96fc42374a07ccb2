"""A guarded program ends when its parent dies, however early the parent dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

PDEATH = [sys.executable, "-m", "baton.cli.pdeath"]
#: Starts a guarded `sleep`, tells its pid, and waits to be killed.
PARENT = """
import subprocess, sys, os
child = subprocess.Popen([*sys.argv[1:], str(os.getpid()), "--", "sleep", "600"])
print(child.pid, flush=True)
child.wait()
"""


def _wait_gone(pid: int, seconds: float) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


def test_the_program_ends_with_its_parent() -> None:
    """kill -9 of the parent ends the guarded program within two seconds."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *PDEATH, "TERM"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    # Ready when the wrapper became `sleep`: before that the race check below is what counts.
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert _wait_gone(pid, 5.0)


def test_a_parent_that_died_before_the_guard_is_noticed() -> None:
    """A program whose parent is gone already never starts."""
    done = subprocess.run([*PDEATH, "KILL", "1", "--", "sleep", "600"], timeout=20, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_parent_that_is_no_supervisor_is_not_the_one_that_started_us() -> None:
    """With 0 for the parent: whoever adopted us after supervisor's death is not taken for it."""
    command = [*PDEATH, "KILL", "0", "--", "sleep", "600"]
    done = subprocess.run(command, timeout=20, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_program_that_does_not_exist_is_named() -> None:
    """The error names the program."""
    done = subprocess.run(
        [*PDEATH, "TERM", str(os.getpid()), "--", "/no/such/program"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1
    assert "/no/such/program" in done.stderr
