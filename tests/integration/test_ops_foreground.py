"""`make run`: a terminal's Ctrl-C ends it with exit code 0; a killed make takes all with it."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli.processes import ProcessName, name_of
from support.ops_cluster import BATON, OpsCluster, ops_cluster, wait_until
from support.ops_terminal import exit_code, read_until

MAKE = shutil.which("make")
MAKEFILE = "run:\n\t@exec {python} -m baton.cli.main run --end-with-parent\n"

pytestmark = pytest.mark.skipif(MAKE is None, reason="make is not on this machine")


def _makefile(folder: Path) -> Path:
    path = folder / "Makefile"
    path.write_text(MAKEFILE.format(python=sys.executable))
    return path


def _start_in_terminal(cluster: OpsCluster, makefile: Path) -> tuple[int, int]:
    """Run make as a shell's foreground job in a terminal of its own; return pid and terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cluster.cwd)
        assert MAKE is not None
        os.execve(MAKE, ["make", "-f", str(makefile), "run"], cluster.env())
    return pid, terminal


def test_ctrl_c_in_a_terminal_ends_make_run_with_exit_code_0(tmp_path: Path) -> None:
    """An answer streams, Ctrl-C stops everything in order, make reports success."""
    with ops_cluster() as cluster:
        pid, terminal = _start_in_terminal(cluster, _makefile(tmp_path))
        try:
            shown = read_until(terminal, "Ctrl-C stops everything", 60)
            assert "tokens/s" in shown
            assert f"http://127.0.0.1:{cluster.port}/v1" in shown
            os.write(terminal, b"\x03")
            read_until(terminal, "nothing is left behind", 30)
            assert exit_code(pid, terminal) == 0
        finally:
            os.close(terminal)
        assert cluster.left_behind() == []


def test_ctrl_c_while_it_starts_ends_it_too(tmp_path: Path) -> None:
    """Ctrl-C before the cluster is ready leaves nothing and is no error."""
    with ops_cluster() as cluster:
        pid, terminal = _start_in_terminal(cluster, _makefile(tmp_path))
        try:
            read_until(terminal, "decode-0 starting", 60)
            os.write(terminal, b"\x03")
            assert exit_code(pid, terminal) == 0
        finally:
            os.close(terminal)
        assert cluster.left_behind() == []


def _start(cluster: OpsCluster, makefile: Path, output: Path) -> subprocess.Popen[bytes]:
    """Run make without a terminal, as CI does, and wait until it serves."""
    assert MAKE is not None
    with output.open("wb") as out:
        make = subprocess.Popen(
            [MAKE, "-f", str(makefile), "run"],
            env=cluster.env(),
            cwd=cluster.cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    wait_until(
        lambda: "Ctrl-C stops everything" in output.read_text() or make.poll() is not None,
        60.0,
        "make run serves",
    )
    assert make.poll() is None, output.read_text() + cluster.logs()
    return make


def test_everything_ends_with_a_killed_make(tmp_path: Path) -> None:
    """kill -9 of make: no process of the cluster 5 s later."""
    with ops_cluster() as cluster:
        make = _start(cluster, _makefile(tmp_path), tmp_path / "out")
        make.kill()
        make.wait()
        wait_until(
            lambda: not [p for p in cluster.left_behind() if p.startswith("pid")],
            5.0,
            "all processes end",
        )
        cluster.up()
        assert cluster.down().returncode == 0
        assert cluster.left_behind() == []


def _command(make: subprocess.Popen[bytes]) -> ProcessName:
    """Return the process that make runs: `baton run`."""
    children = Path(f"/proc/{make.pid}/task/{make.pid}/children").read_text().split()
    found = name_of(int(children[0]))
    assert found is not None
    return found


def test_everything_ends_with_the_killed_command(tmp_path: Path) -> None:
    """kill -9 of `baton run` itself: no process of the cluster 5 s later."""
    with ops_cluster() as cluster:
        make = _start(cluster, _makefile(tmp_path), tmp_path / "out")
        _command(make).send(signal.SIGKILL)
        assert make.wait(timeout=10) != 0
        wait_until(
            lambda: not [p for p in cluster.left_behind() if p.startswith("pid")],
            5.0,
            "all processes end",
        )
        assert cluster.down().returncode == 0
        assert cluster.left_behind() == []


def test_a_restart_is_told_and_an_interrupt_without_a_terminal_ends_with_exit_code_0(
    tmp_path: Path,
) -> None:
    """Whoever looks at the terminal reads which process ended and was started again. SIGINT to the
    command itself, as CI sends it: everything stops, make reports success."""
    with ops_cluster() as cluster:
        output = tmp_path / "out"
        make = _start(cluster, _makefile(tmp_path), output)
        prefill = cluster.process("prefill-0")
        prefill.send(signal.SIGKILL)
        told = f"prefill-0 (pid {prefill.pid}) was started again"
        wait_until(lambda: told in output.read_text(), 20.0, told)
        _command(make).send(signal.SIGINT)
        assert make.wait(timeout=30) == 0
        assert "requests that run may end within 2 s" in output.read_text()
        assert "nothing is left behind" in output.read_text()
        assert cluster.left_behind() == []


def test_one_shot_stops_after_the_answer() -> None:
    """`baton run --oneshot` answers, stops and exits 0."""
    with ops_cluster() as cluster:
        done = cluster.baton("run", "--oneshot", "--prompt", "Hello")
        assert done.returncode == 0, done.stdout + done.stderr + cluster.logs()
        assert "tokens" in done.stdout
        assert cluster.left_behind() == []


def test_one_core_is_enough() -> None:
    """On one core nothing is pinned, and an answer streams all the same."""
    one = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    with ops_cluster() as cluster:
        done = subprocess.run(
            [sys.executable, "-c", one, *BATON, "run", "--oneshot", "--prompt", "Hello"],
            env=cluster.env(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr + cluster.logs()
        assert cluster.left_behind() == []
