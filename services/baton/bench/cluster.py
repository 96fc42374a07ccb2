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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.bench.ends import term_interrupts, undisturbed

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
        found: dict[tuple[str, str], float] = {}
        for sample in self._samples():
            if not sample.name.endswith("_bucket"):
                key = (sample.name, sample.labels.get("worker", ""))
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def counts_by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the samples of one counter, summed by ``label``."""
        found: dict[str, float] = {}
        for sample in self._samples():
            if sample.name == name:
                value = sample.labels.get(label, "")
                found[value] = found.get(value, 0.0) + sample.value
        return found

    def _samples(self) -> Iterator[Sample]:
        text = _get(self.port, "/metrics").decode()
        for family in text_string_to_metric_families(text):
            yield from family.samples

    def events(self, worker_id: str, event: str) -> list[dict[str, object]]:
        """Return the log events of that name of one worker, oldest first."""
        lines = (self.run_dir / "logs" / f"{worker_id}.log").read_text().splitlines()
        found = [json.loads(line) for line in lines if f'"event":"{event}"' in line]
        return [entry for entry in found if entry["event"] == event]


@contextmanager
def bench_cluster(
    command: Sequence[str] = (*COMMAND, "up"), **settings: str
) -> Iterator[BenchCluster]:
    """Start a cluster with these ``BATON_*`` settings; stop it, and fail if something is left.

    SIGTERM ends the block as Ctrl-C does. Neither reaches the command that takes the cluster down,
    nor the wait for it: what was started is gone afterwards.

    Raises:
        BenchError: it did not start.
    """
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        run_dir = Path(folder) / "run"
        port = int(settings.get("BATON_GATEWAY_PORT", 0)) or free_port()
        environ = {
            **os.environ,
            "BATON_CLUSTER_RUN_DIR": str(run_dir),
            "BATON_CLUSTER_NAME": f"bench-{os.getpid()}",
            "BATON_GATEWAY_PORT": str(port),
            **settings,
        }
        with term_interrupts():
            started = False
            try:
                _run(environ, command, "start")
                started = True
                yield BenchCluster(port, run_dir, _model(port), settings, environ)
            finally:
                # Why it did not start is what there is to say, not why it could not be stopped.
                with undisturbed(), nullcontext() if started else suppress(BenchError):
                    _run(environ, (*COMMAND, "down"), "stop")


def _run(environ: dict[str, str], command: Sequence[str], word: str) -> None:
    done = subprocess.run(
        command,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        # Ctrl-C at the terminal is this process's to handle.
        start_new_session=True,
    )
    if done.returncode != 0:
        raise BenchError(f"the cluster did not {word}:\n{done.stdout}{done.stderr}")


def _model(port: int) -> str:
    return str(json.loads(_get(port, "/v1/models"))["data"][0]["id"])


def _get(port: int, path: str) -> bytes:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    body = connection.getresponse().read()
    connection.close()
    return body


def free_port() -> int:
    """Return a port at 127.0.0.1 that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
