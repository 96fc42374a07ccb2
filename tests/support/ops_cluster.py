"""Clusters of real processes with the fake engine, driven through the command as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.cli.cluster import Cluster, Patience
from baton.cli.processes import ProcessName, members, name_of
from baton.cli.settings_file import free_port
from baton.cli.status import gather
from baton.runtime.config import load
from baton.runtime.dirs import arenas_name

ROOT = Path(__file__).resolve().parents[2]
BATON = [sys.executable, "-m", "baton.cli.main"]
#: What `baton down --now` allows a drain.
END_S = 4.0


@dataclass
class OpsCluster:
    """One place where a cluster may run. ``environ`` holds its settings."""

    run_dir: Path
    port: int
    environ: dict[str, str] = field(default_factory=dict)
    cwd: Path = ROOT

    def env(self, **settings: str) -> dict[str, str]:
        """Return the environment of a command for this cluster."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("BATON_", "MAKE"))}
        path = os.pathsep.join(str(ROOT / part) for part in ("shared", "services"))
        return {
            **kept,
            "PYTHONPATH": path,
            "BATON_ENGINE_KIND": "fake",
            "BATON_ARENA_SIZE_MB": "8",
            "BATON_LIMITS_DRAIN_MS": "2000",
            "BATON_CLUSTER_RUN_DIR": str(self.run_dir),
            "BATON_GATEWAY_PORT": str(self.port),
            **self.environ,
            **settings,
        }

    def baton(
        self, *arguments: str, timeout_s: float = 90, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        return subprocess.run(
            [*BATON, *arguments],
            env=self.env(**settings),
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def up(self, wait_s: float = 60, **settings: str) -> None:
        """Start it; fail with the command's words."""
        done = self.baton("up", "--wait", str(wait_s), timeout_s=wait_s + 30, **settings)
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.baton("down")

    def status(self) -> dict[str, Any]:
        """Return what `baton status --json` prints, without a process of its own for it.

        Tests look while something goes on; on a busy machine the start of a command takes longer
        than what they look at."""
        cluster = Cluster(load(None, self.env()), self.env(), str)
        found = cluster.running()
        assert found is not None, f"no cluster runs {self.logs()}"
        picture: dict[str, Any] = json.loads(
            json.dumps(gather(cluster, found, cluster.started_with()))
        )
        return picture

    def process(self, name: str) -> ProcessName:
        """Return a living process of the cluster by its name: a worker, not its guard."""
        found: list[ProcessName] = []

        def there() -> bool:
            (row,) = [row for row in self.status()["processes"] if row["process"] == name]
            alive = row["pid"] and name_of(row["pid"])
            found.extend([alive] if alive else [])
            return bool(found)

        wait_until(there, 10, f"{name} runs")
        return found[0]

    def supervisor(self) -> ProcessName:
        record = json.loads((self.run_dir / "cluster.json").read_text())
        return ProcessName(record["supervisor_pid"], record["supervisor_started"])

    def ask(self, question: str = "Hello") -> str:
        """Stream one answer through the command; fail unless it is whole."""
        done = subprocess.run(
            [*BATON, "chat", "--max-tokens", "16"],
            env=self.env(),
            cwd=self.cwd,
            input=question + "\n",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout

    def reports(self) -> dict[str, dict[str, Any]]:
        """Return what each process says of itself; who does not answer now says nothing."""
        return {row["process"]: row["report"] or {} for row in self.status()["processes"]}

    def left_behind(self) -> list[str]:
        """Return processes, sockets and arenas of this cluster that are there now."""
        found = [f"pid {process.pid}" for process in members(self.run_dir)]
        found += [str(path) for path in self.run_dir.glob("*") if path.name != "logs"]
        return found + [str(path) for path in self.arenas()]

    def arenas(self) -> list[Path]:
        """Return the arena files of this cluster."""
        name = arenas_name("*", self.run_dir)
        return sorted(Path("/dev/shm").glob(f"baton-{name}-*.arena"))

    def logs(self) -> str:
        """Return the end of every log, for a failed assertion."""
        parts = []
        for path in sorted((self.run_dir / "logs").glob("*")):
            parts.append(f"\n== {path.name}\n" + path.read_text(errors="replace")[-1500:])
        return "".join(parts)

    def end(self) -> None:
        """Take everything away, however the test went.

        Without a process of the command: it takes its time on a busy machine, after every test."""
        if self.left_behind():
            patience = Patience()
            patience.limit(END_S)
            Cluster(load(None, self.env()), self.env(), str).stop(patience)
        for process in members(self.run_dir):
            process.send(signal.SIGKILL)


@contextmanager
def ops_cluster(**environ: str) -> Iterator[OpsCluster]:
    """Give a place for one cluster; whatever ran there has ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="baton-t-", dir="/tmp") as folder:
        # The last part of the name tells the arenas of two clusters apart.
        place = Path(folder) / f"r-{os.urandom(4).hex()}"
        # Most tests are about hand-overs; by default the router may do without.
        settings = {"BATON_CLUSTER_MODE": "split", **environ}
        cluster = OpsCluster(place, free_port("127.0.0.1"), settings)
        try:
            yield cluster
        finally:
            cluster.end()


def wait_until(seen: Callable[[], bool], seconds: float, what: str) -> float:
    """Return after how many seconds ``seen`` was true; fail after ``seconds``."""
    started = time.monotonic()
    while not seen():
        waited = time.monotonic() - started
        assert waited < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - started
