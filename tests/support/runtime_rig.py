"""Real processes of the runtime, one by one, around a small scripted machine; and their logs."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import orjson

from support.ledger_server import LedgerServer

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0


class Process:
    """One started process; its log lines arrive as they are written."""

    def __init__(self, command: list[str], environ: Mapping[str, str]) -> None:
        self.popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=dict(environ)
        )
        self.lines: list[dict[str, object]] = []
        self.raw = b""

    def until(self, event: str) -> dict[str, object]:
        """Return the log line of ``event``, waiting for it."""
        self._read(lambda: self.seen(event) is not None, event)
        line = self.seen(event)
        assert line is not None
        return line

    def until_after(self, seen: int, event: str) -> dict[str, object]:
        """Return the newest log line of ``event``, waiting until there are more than ``seen``."""
        self._read(lambda: self.count(event) > seen, event)
        return [line for line in self.lines if line["event"] == event][-1]

    def count(self, event: str) -> int:
        """Return how many lines of ``event`` were read already."""
        return sum(line["event"] == event for line in self.lines)

    def until_links(self, count: int, or_event: str = "") -> None:
        """Wait until ``count`` links have been opened."""
        self._read(
            lambda: (
                sum(line["event"] == "peer_up" for line in self.lines) >= count
                or self.seen(or_event) is not None
            ),
            "links",
        )

    def _read(self, enough: Callable[[], bool], event: str) -> None:
        assert self.popen.stderr is not None
        deadline = time.monotonic() + PATIENCE_S
        while not enough():
            left = deadline - time.monotonic()
            assert select.select([self.popen.stderr], [], [], left)[0], self.story(event)
            read = os.read(self.popen.stderr.fileno(), 1 << 16)
            assert read, self.story(event)
            self._take(read)

    def seen(self, event: str) -> dict[str, object] | None:
        """Return the log line of ``event`` if it was read already."""
        return next((line for line in self.lines if line["event"] == event), None)

    @property
    def worker(self) -> int:
        """The pid of the newest worker that was heard of."""
        self.until("process_starting")
        pids = [line["pid"] for line in self.lines if line["event"] == "process_starting"]
        return int(str(pids[-1]))

    def wait(self) -> int:
        """Return the exit code, having read the rest of the log."""
        assert self.popen.stderr is not None
        _, rest = self.popen.communicate(timeout=PATIENCE_S)
        self._take(rest)
        return self.popen.returncode

    def story(self, event: str) -> str:
        """Describe what was seen instead of ``event``."""
        return f"no {event}; exit code {self.popen.poll()}; log:\n{self.raw.decode()}"

    def _take(self, read: bytes) -> None:
        self.raw += read
        self.lines = [
            orjson.loads(line)
            for line in self.raw.splitlines(keepends=True)
            if line.startswith(b"{") and line.endswith(b"\n")
        ]

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        assert self.popen.stderr is not None
        self.popen.stderr.close()


class Rig:
    """A run directory with a ledger, and processes in it."""

    def __init__(self, server: LedgerServer) -> None:
        self.server = server
        self.run_dir = server.run_dir
        self.config = self.run_dir / "baton.toml"
        self.config.write_text(f'[cluster]\nrun_dir = "{self.run_dir}"\n[limits]\ndrain_ms = 300\n')
        self.started: list[Process] = []

    def environ(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("BATON_", "NOTIFY"))}
        path = os.pathsep.join(str(ROOT / name) for name in ("shared", "services", "tests"))
        return {**kept, "PYTHONPATH": path, "BATON_CHECK": "1", "BATON_CORES_PIN": "off", **more}

    def command(self, worker_id: str, role: str = "router") -> list[str]:
        program = [sys.executable, "-m", "support.runtime_program", role]
        return [*program, "--worker-id", worker_id, "--config", str(self.config)]

    def start(self, worker_id: str, role: str = "router", **environ: str) -> Process:
        process = Process(self.command(worker_id, role), self.environ(**environ))
        self.started.append(process)
        return process


@contextmanager
def started_rig() -> Iterator[Rig]:
    """A ledger and nothing else; whatever was started is gone afterwards."""
    with LedgerServer() as server:
        made = Rig(server)
        yield made
        for process in made.started:
            process.close()
