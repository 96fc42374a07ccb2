"""A cluster to be measured, started and stopped through the command line.

Decides nothing about what is measured. Everything is read from outside: HTTP, metrics, logs.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

COMMAND = [sys.executable, "-m", "baton.cli.main"]


class BenchError(RuntimeError):
    """The cluster could not be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class BenchCluster:
    """A running cluster."""

    port: int
    run_dir: Path
    model: str
    settings: dict[str, str]
    environ: dict[str, str]

    def processes(self, up_s: float = 0.0) -> dict[str, int]:
        """Return the pid of each process that is ready and up for ``up_s``, by its name."""
        rows = json.loads(self.baton("status", "--json").stdout)["processes"]
        reports = {row["process"]: (row["pid"], row["report"] or {}) for row in rows}
        return {
            name: pid
            for name, (pid, report) in reports.items()
            if report.get("ready") and report["uptime_s"] >= up_s
        }

    def supervisor_pid(self) -> int:
        """Return the process below which all others are."""
        found: int = json.loads((self.run_dir / "cluster.json").read_text())["supervisor_pid"]
        return found

    def baton(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `baton` on this cluster."""
        return subprocess.run(
            [*COMMAND, *arguments], env=self.environ, capture_output=True, text=True, check=False
        )

    def metrics(self) -> dict[tuple[str, str], float]:
        """Return (sample name, worker) -> value, summed over all other labels."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    continue
                key = (sample.name, sample.labels.get("worker", ""))
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def counts_by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the samples of one counter, summed by ``label``."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    value = sample.labels.get(label, "")
                    found[value] = found.get(value, 0.0) + sample.value
        return found

    def events(self, worker_id: str, event: str) -> list[dict[str, object]]:
        """Return the log events of that name of one worker, oldest first."""
        lines = (self.run_dir / "logs" / f"{worker_id}.log").read_text().splitlines()
        found = [json.loads(line) for line in lines if f'"event":"{event}"' in line]
        return [entry for entry in found if entry["event"] == event]


@contextmanager
def bench_cluster(**settings: str) -> Iterator[BenchCluster]:
    """Start a cluster with these ``BATON_*`` settings; stop it, and fail if something is left.

    Raises:
        BenchError: it did not start.
    """
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        run_dir = Path(folder) / "run"
        port = _free_port()
        environ = {
            **os.environ,
            "BATON_CLUSTER_RUN_DIR": str(run_dir),
            "BATON_CLUSTER_NAME": f"bench-{os.getpid()}",
            "BATON_GATEWAY_PORT": str(port),
            **settings,
        }
        done = subprocess.run(
            [*COMMAND, "up"], env=environ, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise BenchError(f"the cluster did not start:\n{done.stdout}{done.stderr}")
        try:
            yield BenchCluster(port, run_dir, _model(port), settings, environ)
        finally:
            done = subprocess.run(
                [*COMMAND, "down"], env=environ, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise BenchError(f"the cluster did not stop:\n{done.stdout}{done.stderr}")


def _model(port: int) -> str:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/v1/models")
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return str(answer["data"][0]["id"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
