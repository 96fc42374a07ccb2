"""What leases do when the processors are busy, and what processors do when nobody asks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.cli.processes import members
from support.cluster_client import Answer, complete, metric
from support.engine_fixtures import model_dir  # noqa: F401 - a fixture
from support.ops_cluster import OpsCluster, ops_cluster

BUSY_S = 45.0
IDLE_S = 20.0
TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def _stress() -> Iterator[None]:
    """One process that does nothing but compute, for each core."""
    cores = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.model
def test_no_lease_is_lost_on_a_busy_host(model_dir: Path) -> None:  # noqa: F811
    """(107) Prompts of 2,000 tokens on all cores, beside processes that take every cycle they get:
    nobody's lease is lost, and every answer comes."""
    with ops_cluster(
        BATON_ENGINE_KIND="torch",
        BATON_MODEL_PATH=str(model_dir),
        BATON_MODEL_NAME="m",
        BATON_ARENA_SIZE_MB="400",
    ) as cluster:
        cluster.up()
        answers: list[Answer] = []
        until = time.monotonic() + BUSY_S

        def client(number: int) -> None:
            turn = 0
            while time.monotonic() < until:
                prompt = [
                    1_000 + (number * 7919 + turn * 131 + at * 17) % 20_000 for at in range(2000)
                ]
                turn += 1
                answers.append(complete(cluster.port, "m", prompt, max_tokens=8, ignore_eos=True))

        with _stress():
            clients = [threading.Thread(target=client, args=(number,)) for number in range(2)]
            for each in clients:
                each.start()
            for each in clients:
                each.join()
        assert answers
        assert all(answer.error is None and len(answer.ids) == 8 for answer in answers)
        assert metric(cluster.port, "baton_leases_lost_total") == 0, cluster.logs()


@pytest.mark.slow
def test_an_idle_cluster_costs_next_to_nothing() -> None:
    """(137) Nobody spins: a process with nothing to do takes less than two percent of a core."""
    with ops_cluster(BATON_CLUSTER_DECODE="2") as cluster:
        cluster.up()
        time.sleep(3.0)
        before = _ticks(cluster)
        time.sleep(IDLE_S)
        spent = {pid: (ticks - before[pid]) / TICKS for pid, ticks in _ticks(cluster).items()}
        assert len(spent) >= 5
        assert max(spent.values()) < 0.02 * IDLE_S, spent


def _ticks(cluster: OpsCluster) -> dict[int, int]:
    """Return the CPU time of every process of the cluster."""
    found = {}
    for process in members(cluster.run_dir):
        text = Path(f"/proc/{process.pid}/stat").read_text()
        fields = text[text.rindex(")") + 2 :].split()
        found[process.pid] = int(fields[11]) + int(fields[12])
    return found
