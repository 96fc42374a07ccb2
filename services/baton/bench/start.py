"""How long a cluster takes from its command to the first token, and what memory its processes have.

A client asks from the moment of the command on, again every 20 ms until it is answered: so the last
figure is what a user waits who asks as soon as possible. What happened in between stands in the
logs of the processes, on the clock that the client reads too. Everything is installed, converted
and in the page cache.

Own memory is what a process has in pages that nobody else maps, without those of arenas and model
files. A worker is forked from its guard, so what both read is no page of one alone: *the pair*
counts each of their pages once, by the share that others have in it (PSS).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from baton.bench.asker import random_prompt
from baton.bench.cluster import COMMAND, BenchCluster, BenchError, bench_cluster, free_port
from baton.bench.figures import quantile, table
from baton.bench.streams import streams
from baton.runtime.config import load

PATIENCE_S = 120.0
#: Between two tries of the client.
PAUSE_S = 0.02
QUESTION = {
    "stream": True,
    "temperature": 0,
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "Name three rivers in France."}],
}
#: Work before memory is looked at: what only a long prompt or a full batch needs is there then.
PROMPT_TOKENS, ANSWER_TOKENS, STREAMS = 1000, 32, 8
#: In the order in which they come on an idle machine.
PHASES = {
    "supervisor": "supervisor runs",
    "ledger": "ledger answers the first process",
    "gateway": "gateway listens",
    "prefill": "prefill is ready",
    "decode": "decode is ready",
    "met": "prefill has mapped decode's arena",
    "first_token": "first token at the client",
    "returned": "the command returns",
}
"""What is waited for, and its words."""


def measure(*, repeats: int) -> dict[str, object]:
    """Return the phases of every start, in seconds since the command, and the memory."""
    result: dict[str, object] = {"repeats": repeats, "up": _series([*COMMAND, "up"], repeats)}
    if Path("Makefile").is_file() and Path(".venv/stamp.baton").is_file():
        result["make up"] = _series(["make", "up"], repeats)
    return result


def _series(command: Sequence[str], repeats: int) -> dict[str, object]:
    # The first one fills the page cache, for itself too: it is no figure.
    _, *runs = [_start(command, works=number == repeats) for number in range(repeats + 1)]
    return {"starts": [run.phases for run in runs], "memory_mb": runs[-1].memory_mb}


@dataclass(frozen=True, slots=True)
class Run:
    """One start."""

    phases: dict[str, float]
    """Seconds since the command."""
    memory_mb: dict[str, dict[str, float]]
    """Own memory by process; empty unless the cluster has worked."""


def _start(command: Sequence[str], *, works: bool) -> Run:
    port = free_port()
    began = time.time()
    client = _Client(port)
    client.start()
    with bench_cluster(command=command, BATON_GATEWAY_PORT=str(port)) as cluster:
        returned = time.time()
        client.join()
        if not client.first_at:
            raise BenchError(f"no token after {PATIENCE_S:.0f} s: {client.trouble}")
        at = _moments(cluster) | {"first_token": client.first_at, "returned": returned}
        phases = {phase: round(at[phase] - began, 3) for phase in PHASES}
        return Run(phases, _memory_after_work(cluster) if works else {})


class _Client(threading.Thread):
    """Asks until it is answered; notes when the first piece of text came."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.first_at = 0.0
        self.trouble = "never asked"
        self._port = port

    def run(self) -> None:
        deadline = time.time() + PATIENCE_S
        while not self.first_at and time.time() < deadline:
            try:
                self._ask()
            except (OSError, HTTPException) as error:
                self.trouble = str(error)
            time.sleep(PAUSE_S)

    def _ask(self) -> None:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            connection.request("GET", "/v1/models")
            model = json.loads(connection.getresponse().read())["data"][0]["id"]
            body = json.dumps({**QUESTION, "model": model})
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                self.trouble = answer.read().decode()[:200]
                return
            while line := answer.readline():
                if line.startswith(b"data: {") and _text(json.loads(line[6:])):
                    self.first_at = self.first_at or time.time()
        finally:
            connection.close()


def _text(event: dict[str, object]) -> str:
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise BenchError(f"the first request failed: {event}")
    return "".join(choice.get("delta", {}).get("content") or "" for choice in choices)


def _moments(cluster: BenchCluster) -> dict[str, float]:
    """Return when what happened, as the logs say it."""

    def first(worker_id: str, event: str) -> float:
        return datetime.fromisoformat(str(cluster.events(worker_id, event)[0]["ts"])).timestamp()

    return {
        "supervisor": _supervisor_at(cluster.run_dir / "logs" / "supervisord.log"),
        "ledger": min(
            first(worker, "lease_changed")
            for worker in ("router-0", "gateway-0", "prefill-0", "decode-0")
        ),
        "gateway": first("gateway-0", "listening"),
        "prefill": first("prefill-0", "process_ready"),
        "decode": first("decode-0", "process_ready"),
        "met": first("decode-0", "writer_ready"),
    }


def _supervisor_at(log: Path) -> float:
    """Return when supervisor began to start processes; it logs local time."""
    for line in log.read_text().splitlines():
        if "supervisord started" in line:
            return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    raise BenchError(f"{log} does not say that supervisor started")


def _memory_after_work(cluster: BenchCluster) -> dict[str, dict[str, float]]:
    """Have all processes do what they are for, and return the memory of each."""
    with streams(cluster) as client:
        begun = [
            client.begin(random_prompt(PROMPT_TOKENS, number), ANSWER_TOKENS)
            for number in range(STREAMS)
        ]
        for stream in begun:
            if error := stream.wait().error:
                raise BenchError(error)
    config = load(cluster.run_dir / "settings.toml", {})
    shared = Shared.of(Path(config.arena.dir), config.model.cache_dir)
    return {name: _memory(pid, shared) for name, pid in sorted(cluster.processes().items())}


@dataclass(frozen=True, slots=True)
class Shared:
    """The files that do not count as a process's own memory."""

    arenas: frozenset[int]
    """Inodes: an arena gets its name after it is mapped, so its owner's mappings do not show it."""
    models: str
    """The folder of prepared models, kernels and packed weights."""

    @classmethod
    def of(cls, arena_dir: Path, models: str) -> Shared:
        """Look up the arenas that there are now."""
        return cls(frozenset(path.stat().st_ino for path in arena_dir.glob("*.arena")), models)

    def has(self, inode: int, path: str) -> bool:
        """Whether a mapping is of such a file."""
        return inode in self.arenas or path.startswith(f"{self.models}/")


def _memory(worker: int, shared: Shared) -> dict[str, float]:
    """Return MiB of a worker and its guard that are neither arena nor model file."""
    guard = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    of_worker, of_guard = own_memory(worker, shared), own_memory(guard, shared)
    return {
        "worker": round(of_worker.private_kb / 1024, 1),
        "guard": round(of_guard.private_kb / 1024, 1),
        "pair": round((of_worker.shares_kb + of_guard.shares_kb) / 1024, 1),
    }


@dataclass(slots=True)
class Own:
    """A process's memory without files that do not count."""

    private_kb: int = 0
    """Pages that nobody else maps."""
    shares_kb: int = 0
    """Its share of all pages: 1/n of one that n processes map."""


def own_memory(pid: int, shared: Shared) -> Own:
    """Add up a process's mappings (``/proc/pid/smaps``) but those of ``shared``."""
    own, counts = Own(), True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *rest = line.split(maxsplit=5)
        if not name.endswith(":"):
            inode, path = int(rest[3]), rest[4] if len(rest) > 4 else ""
            counts = not shared.has(inode, path)
        elif counts and name in ("Private_Clean:", "Private_Dirty:"):
            own.private_kb += int(rest[0])
        elif counts and name == "Pss:":
            own.shares_kb += int(rest[0])
    return own


def page(result: dict[str, object]) -> str:
    """Return the tables."""
    parts = []
    for command in ("up", "make up"):
        series = result.get(command)
        if isinstance(series, dict):
            name = f"baton {command}" if command == "up" else command
            parts += [f"## {name}", _phases(series["starts"]), _memories(series["memory_mb"])]
    return "\n\n".join(parts)


def _phases(starts: Sequence[dict[str, float]]) -> str:
    rows = []
    for phase, words in PHASES.items():
        seconds = [start[phase] for start in starts]
        rows.append((words, len(seconds), *(f"{x:.2f}" for x in _least_median_most(seconds))))
    header = ("seconds since the command", "n", "least", "median", "most")
    return table(header, rows)


def _least_median_most(seconds: Sequence[float]) -> tuple[float, float, float]:
    return min(seconds), quantile(seconds, 0.5), max(seconds)


def _memories(memory: dict[str, dict[str, float]]) -> str:
    rows = [
        (name, figures["worker"], figures["guard"], figures["pair"])
        for name, figures in memory.items()
    ]
    header = (
        "own memory, MiB, without arena and model files",
        "worker alone",
        "its guard alone",
        "the pair (PSS)",
    )
    return table(header, rows)
