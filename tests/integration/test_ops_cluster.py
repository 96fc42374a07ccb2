"""A cluster of real processes: up, status, chat, restarts, down, and what kills leave behind."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from baton.cli.client import GatewayClient
from support.ops_cluster import BATON, OpsCluster, ops_cluster, wait_until

ENDS_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[OpsCluster]:
    """One running cluster for the tests that leave it as it was."""
    with ops_cluster() as cluster:
        cluster.up()
        yield cluster


def _serves(cluster: OpsCluster) -> bool:
    return GatewayClient(f"http://127.0.0.1:{cluster.port}").health()[0]


def test_a_cluster_answers_and_status_tells_about_every_process(
    shared_cluster: OpsCluster,
) -> None:
    """An answer streams; each process has a pid, a lease and a report of its own."""
    assert "tokens" in shared_cluster.ask()
    picture = shared_cluster.status()
    assert picture["ready"]
    rows = {row["process"]: row for row in picture["processes"]}
    assert set(rows) == {"gateway-0", "router-0", "prefill-0", "decode-0", "ledger"}
    for name in ("gateway-0", "router-0", "prefill-0", "decode-0"):
        assert rows[name]["state"] == "running"
        assert rows[name]["lease_ms"] > 0
        assert rows[name]["report"]["worker_id"] == name
    printed = json.loads(shared_cluster.baton("status", "--json").stdout)
    assert {row["process"]: set(row) for row in printed["processes"]} == {
        name: set(row) for name, row in rows.items()
    }
    assert len({frozenset(row) for row in printed["processes"]}) == 1, "the same keys in each"
    table = shared_cluster.baton("status")
    assert table.returncode == 0
    for name in rows:
        assert name in table.stdout


def test_up_leaves_a_running_cluster_alone(shared_cluster: OpsCluster) -> None:
    """A second `up` is fine and starts nothing."""
    before = shared_cluster.supervisor()
    done = shared_cluster.baton("up")
    assert done.returncode == 0
    assert "already running" in done.stdout
    assert shared_cluster.supervisor() == before


def test_settings_that_differ_from_those_of_the_start_are_told_not_taken(
    shared_cluster: OpsCluster,
) -> None:
    """`up` names them and ends with 1, `restart` refuses with 78, and nobody is touched."""
    before = {row["process"]: row["pid"] for row in shared_cluster.status()["processes"]}
    for command, code in (
        (("up",), 1),
        (("restart", "--rolling"), 78),
        (("restart", "ledger"), 78),
    ):
        done = shared_cluster.baton(*command, BATON_ENGINE_WEIGHTS="int4")
        assert done.returncode == code
        assert 'engine.weights = "int4"' in done.stderr
        assert 'it runs with "auto"' in done.stderr
    more = shared_cluster.baton("up", "--decode", "3")
    assert more.returncode == 1
    assert "cluster.decode = 3 (--decode; it runs with 1)" in more.stderr
    assert shared_cluster.baton("up", "--decode", "1").returncode == 0
    assert {r["process"]: r["pid"] for r in shared_cluster.status()["processes"]} == before


def test_errors_name_the_processes_that_status_shows(shared_cluster: OpsCluster) -> None:
    """The spare gateway is down and of no use to anybody who reads the list."""
    for command in (("role", "nobody", "decode"), ("restart", "nobody"), ("drain", "nobody")):
        done = shared_cluster.baton(*command)
        assert done.returncode == 2
        _, _, names = done.stderr.strip().partition("there are ")
        assert set(names.split(", ")) == {
            row["process"] for row in shared_cluster.status()["processes"]
        }
    done = shared_cluster.baton("role", "ledger", "decode")
    assert "only these have a role to change: decode-0, prefill-0" in done.stderr


def test_logs_are_followed_until_nobody_reads(shared_cluster: OpsCluster) -> None:
    """`baton logs -f | ...`: lines of all processes by time, new ones as they come; exit code 0."""
    process = subprocess.Popen(
        [*BATON, "logs", "-f", "-n", "1"],
        env=shared_cluster.env(),
        cwd=shared_cluster.cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        first = process.stdout.readline()
        assert first
        before = shared_cluster.process("prefill-0")
        before.send(signal.SIGKILL)
        while "process_starting" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        assert line.startswith("prefill-0 ")
        process.stdout.close()
        wait_until(lambda: _serves(shared_cluster), 30, "prefill-0 is back")
        shared_cluster.process("prefill-0").send(signal.SIGKILL)  # something more to print
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
        wait_until(lambda: _serves(shared_cluster), 30, "prefill-0 is back")
    finally:
        process.kill()
        process.wait()


def test_another_clusters_port_is_named_with_its_user(shared_cluster: OpsCluster) -> None:
    """A taken port is exit code 75 and one line with the port, the process and the way out."""
    with ops_cluster() as second:
        done = second.baton("up", BATON_GATEWAY_PORT=str(shared_cluster.port))
        assert done.returncode == 75
        assert f":{shared_cluster.port}" in done.stderr
        assert "pid" in done.stderr
        assert "BATON_GATEWAY_PORT" in done.stderr
        assert second.left_behind() == []


def test_two_clusters_live_side_by_side_and_one_that_is_down_leaves_nothing(
    shared_cluster: OpsCluster,
) -> None:
    """A second cluster of the same user serves, and its end harms nobody: its processes, sockets,
    shared memory and the ledger's data are gone; logs stay. Nobody had to wait for supervisor."""
    with ops_cluster() as second:
        second.up()
        second.ask()
        done = second.down()
        assert done.returncode == 0, done.stderr
        assert second.left_behind() == []
        logs = second.run_dir / "logs"
        assert (logs / "decode-0.log").stat().st_size > 0
        assert "to die" not in (logs / "supervisord.log").read_text(), "it had something to stop"
        assert second.down().returncode == 0
    shared_cluster.ask()


@pytest.mark.parametrize("name", ["decode-0", "prefill-0", "router-0", "gateway-0", "ledger"])
def test_a_killed_process_comes_back_by_itself(shared_cluster: OpsCluster, name: str) -> None:
    """kill -9 of any process: it is restarted and the cluster serves again, untouched."""
    before = shared_cluster.process(name)
    before.send(signal.SIGKILL)
    wait_until(lambda: not before.is_alive(), 5.0, "killed")

    def back() -> bool:
        rows = {row["process"]: row for row in shared_cluster.status()["processes"]}
        return rows[name].get("pid") not in (None, before.pid) and _serves(shared_cluster)

    wait_until(back, 30.0, f"{name} serves again{shared_cluster.logs()}")
    assert "tokens" in shared_cluster.ask()


def test_everything_ends_with_a_killed_supervisor_and_the_next_start_reclaims() -> None:
    """kill -9 of supervisor: no process 5 s later; `up` serves again; `down` leaves nothing."""
    with ops_cluster() as cluster:
        cluster.up()
        supervisor = cluster.supervisor()
        supervisor.send(signal.SIGKILL)
        wait_until(
            lambda: not [p for p in cluster.left_behind() if p.startswith("pid")],
            ENDS_WITHIN_S,
            f"the workers end{cluster.logs()}",
        )
        cluster.up()
        cluster.ask()
        assert cluster.down().returncode == 0
        assert cluster.left_behind() == []


def test_down_clears_up_after_a_killed_cluster() -> None:
    """`down` after kill -9 of supervisor removes what nobody owns any more."""
    with ops_cluster() as cluster:
        cluster.up()
        cluster.supervisor().send(signal.SIGKILL)
        assert cluster.down().returncode == 0
        assert cluster.left_behind() == []


def test_a_configuration_error_of_a_worker_is_told_and_not_retried() -> None:
    """An arena that cannot fit: exit code 78, the worker's own words, one start."""
    with ops_cluster(BATON_ARENA_SIZE_MB="900000000") as cluster:
        done = cluster.baton("up")
        assert done.returncode == 78
        assert "decode-0" in done.stderr
        log = (cluster.run_dir / "logs" / "supervisord.log").read_text()
        assert log.count("spawned: 'decode-0'") == 1
        assert cluster.left_behind() == []


def test_colocated_mode_and_a_long_path_with_spaces(tmp_path: Path) -> None:
    """From a folder of 150 characters with spaces, without a run directory of one's own."""
    folder = tmp_path / ("a folder with spaces " * 8)[: 150 - len(str(tmp_path))].strip()
    folder.mkdir()
    (folder / "baton.toml").write_text('[cluster]\nmode = "colocated"\n')
    with ops_cluster() as cluster:
        del cluster.environ["BATON_CLUSTER_MODE"]
        cluster.cwd = folder
        cluster.up()
        picture = cluster.status()
        assert picture["cluster"]["mode"] == "colocated"
        assert "prefill-0" not in {row["process"] for row in picture["processes"]}
        cluster.ask()
        assert cluster.down().returncode == 0
        assert cluster.left_behind() == []


def test_two_gateways_share_one_port() -> None:
    """With [cluster] gateways = 2 one port is served by both, and by one when the other dies."""
    with ops_cluster(BATON_CLUSTER_GATEWAYS="2") as cluster:
        cluster.up()
        cluster.process("gateway-0").send(signal.SIGKILL)
        cluster.ask()
        assert cluster.down().returncode == 0
        assert cluster.left_behind() == []


@pytest.mark.slow
def test_a_taken_port_is_tried_slowly_and_taken_when_free() -> None:
    """A port in use for 60 s: 4 to 15 starts in that time, serving within 20 s of its release.

    On IPv6, where supervisor does not hold the socket of a single gateway; taken while that one is
    drained, since a killed one is back on its port before anybody else can have it."""
    with ops_cluster(BATON_GATEWAY_HOST="::1") as cluster:
        cluster.up()
        log = cluster.run_dir / "logs" / "gateway-0.log"
        assert cluster.baton("drain", "gateway-0", "--force").returncode == 0
        with socket.socket(socket.AF_INET6) as squatter:
            squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            squatter.bind(("::1", cluster.port))
            squatter.listen()
            # It waits for the gateway for a minute, and says that it is not ready.
            assert cluster.baton("start", "gateway-0").returncode == 75
            lines = [json.loads(line) for line in log.read_text().splitlines() if line[:1] == "{"]
            failed = [line["ts"] for line in lines if line["event"] == "start_failed"]
        times = [datetime.fromisoformat(each) for each in failed]
        starts = sum(each - times[0] < timedelta(seconds=60) for each in times)
        assert 4 <= starts <= 15, failed
        client = GatewayClient(f"http://[::1]:{cluster.port}")
        wait_until(lambda: client.health()[0], 20.0, "serving again")


@pytest.mark.slow
@pytest.mark.parametrize("moment_s", [0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0])
def test_a_supervisor_killed_while_all_start_leaves_no_process(moment_s: float) -> None:
    """kill -9 of supervisor at any moment of the start: nothing runs 5 s later."""
    # So many that the last moment is one of the start on a quick machine too.
    with ops_cluster(BATON_CLUSTER_PREFILL="3", BATON_CLUSTER_DECODE="4") as cluster:
        up = subprocess.Popen(
            [*BATON, "up"],
            env=cluster.env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        record = cluster.run_dir / "cluster.json"
        wait_until(lambda: record.exists() or up.poll() is not None, 20.0, "supervisor started")
        supervisor = cluster.supervisor()
        threading.Event().wait(moment_s)
        supervisor.send(signal.SIGKILL)
        _, error = up.communicate(timeout=60)
        assert up.returncode == 1
        assert "supervisor ended" in error
        assert cluster.left_behind() == []


def test_down_while_a_killed_process_has_no_successor_yet_is_no_error() -> None:
    """What a crash left and nobody had taken over is removed without a complaint."""
    with ops_cluster(BATON_CLUSTER_DECODE="2") as cluster:
        cluster.up()
        cluster.ask()
        for name in ("gateway-0", "decode-0", "decode-1", "router-0"):
            cluster.process(name).send(signal.SIGKILL)
        done = cluster.down()
        assert done.returncode == 0, done.stderr
        assert cluster.left_behind() == []
