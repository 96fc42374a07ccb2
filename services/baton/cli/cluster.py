"""Starts and stops a cluster on this host.

Decides the order: check, reclaim what a killed cluster left, write what supervisor reads, start it,
wait until the gateway can serve; and at the end gateways first (they drain), then workers and
routers, then the ledger, then a look whether anything is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from baton.cli import leftovers, models, record, settings_file, supervisor
from baton.cli.client import UNIX_SCHEME, GatewayClient
from baton.cli.processes import listener, started, worker_of
from baton.cli.record import ClusterRecord
from baton.cli.supervisor import Supervisor
from baton.cli.terminal import CommandError, ExitCode
from baton.core.ids import Role
from baton.ledger.embedded import LedgerBinaryMissing, SocketPathTooLong
from baton.runtime.config import load, worker_ids
from baton.runtime.cores import plan_cores
from baton.runtime.dirs import arenas_name, cache_dir, run_dir, run_dir_path
from baton.runtime.settings import Config

#: Orphans of a killed supervisor end by themselves in 5 s; this is more than that.
_ORPHANS_S = 8.0
_CONFIG_EXIT = 78
#: Supervisor's words for a process that still is one.
_ALIVE = frozenset({"STARTING", "RUNNING", "STOPPING", "BACKOFF"})

Tell = Callable[[str], object]


@dataclass(slots=True)
class Patience:
    """How long a stop may take; a second Ctrl-C sets it to nothing."""

    deadline: float = field(default=float("inf"))

    def limit(self, seconds: float) -> None:
        """Allow at most that long from now."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline


class Cluster:
    """The cluster that belongs to one configuration and place."""

    def __init__(self, config: Config, environ: Mapping[str, str], tell: Tell) -> None:
        self.config = config
        self.run_dir = run_dir_path(config, environ)
        if self.run_dir.exists():
            # Looked at before anything in it is believed; made only by a start.
            run_dir(config, environ)
        self._environ = environ
        self._tell = tell
        self._source = str(config.path or "")
        self._child: subprocess.Popen[bytes] | None = None

    def running(self) -> ClusterRecord | None:
        """Return the record of the cluster if it runs."""
        found = record.read(self.run_dir)
        return found if found is not None and found.is_running() else None

    def client(self, found: ClusterRecord) -> GatewayClient:
        """Return a client for the cluster's gateway, with a key if it wants one."""
        keys = self.started_with().gateway.api_keys
        return GatewayClient(found.url, keys[0] if keys else "")

    def started_with(self) -> Config:
        """Return the settings of the cluster's start: they count, not what is said now."""
        return load(self.run_dir / supervisor.SETTINGS_NAME, {})

    def drain_words(self) -> str:
        """Return how long a stop may take, in words: nobody waits without knowing why."""
        seconds = self.config.limits.drain_ms / 1000
        return f"requests that run may end within {seconds:g} s"

    def pids(self) -> dict[str, int]:
        """Return the process id of every worker that runs; empty if supervisor is silent."""
        try:
            found = Supervisor(self.run_dir).processes()
        except OSError:
            return {}
        pids = {str(info["name"]): worker_pid(info) for info in found}
        return {name: pid for name, pid in pids.items() if pid is not None}

    # --- start ----------------------------------------------------------------------------------

    def start(self, *, in_foreground: bool) -> ClusterRecord:
        """Start supervisor and all processes; does not wait until they can serve.

        Args:
            in_foreground: the cluster ends when this process does, however it ends.

        Raises:
            CommandError: a port is taken, or something of an older cluster lives.
        """
        run_dir(self.config, self._environ)
        with self._locked():
            if self.running() is not None:
                raise CommandError(
                    "a cluster already runs here; look at it with `make status` or `baton status`, "
                    "stop it with `make down` or `baton down`"
                )
            plan_cores(self.config)
            self._reclaim()
            self._check_port()
            self.config = settings_file.write(
                settings_file.resolve(self.config, self.run_dir, *self._model()),
                self.run_dir / supervisor.SETTINGS_NAME,
            )
            (self.run_dir / supervisor.CONFIG_NAME).write_text(supervisor.render(self.config))
            (self.run_dir / leftovers.LOGS).mkdir(mode=0o700, exist_ok=True)
            return self._launch(in_foreground)

    def _model(self) -> tuple[Path | None, Path | None]:
        """Return the prepared model's folder and the cache, made ready if need be."""
        if self.config.engine.kind == "fake":
            return None, None
        cache = cache_dir(self.config, self._environ)
        folder = models.ensure_prepared(self.config.model.path, cache)
        models.ensure_kernels(self.config, folder, cache)
        return folder, cache

    def _environment(self) -> dict[str, str]:
        try:
            return supervisor.environment(self.config, self.run_dir, self._environ)
        except (LedgerBinaryMissing, SocketPathTooLong) as error:
            raise CommandError(str(error), ExitCode.CONFIG) from None

    def _launch(self, in_foreground: bool) -> ClusterRecord:
        command = supervisor.command(self.run_dir)
        if in_foreground:
            guard = [sys.executable, "-m", "baton.cli.pdeath", "KILL", str(os.getpid()), "--"]
            command = [*guard, *command]
        with (self.run_dir / leftovers.LOGS / "supervisord.out").open("wb") as output:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                # Ctrl-C at the terminal is ours to handle; the workers must not see it.
                start_new_session=True,
            )
        made = self._record(self._child.pid)
        record.write(self.run_dir, made)
        return made

    def _record(self, pid: int) -> ClusterRecord:
        gateway = self.config.gateway
        host = f"[{gateway.host}]" if ":" in gateway.host else gateway.host
        host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        return ClusterRecord(
            name=self.config.cluster.name,
            mode=self.config.cluster.mode,
            model=self.config.model.path,
            url=f"{UNIX_SCHEME}://{gateway.uds}"
            if gateway.uds
            else f"http://{host}:{gateway.port}",
            arena_dir=self.config.arena.dir,
            arenas=arenas_name(self.config.cluster.name, self.run_dir),
            supervisor_pid=pid,
            supervisor_started=started(pid) or 0,
            boot_id=record.boot_id(),
            baton_version=baton_version(),
            settings_source=self._source,
        )

    def _reclaim(self) -> None:
        """Take away what a killed cluster left, after its last process ended."""
        stubborn = leftovers.end_members(self.run_dir, _ORPHANS_S, self._tell)
        if stubborn:
            raise CommandError(f"processes of an older cluster live: {', '.join(stubborn)}")
        old = record.read(self.run_dir)
        if old is not None:
            self._tell("reclaiming what a killed cluster left here")
            workers = {worker_id for _, worker_id in worker_ids(self.config)}
            leftovers.remove_arenas(old, keep=workers)
        leftovers.clear(self.run_dir, keep_ledger=True)

    def _check_port(self) -> None:
        gateway = self.config.gateway
        if gateway.uds or gateway.port == 0:
            return
        family = socket.AF_INET6 if ":" in gateway.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((gateway.host, gateway.port))
            except OSError as error:
                who = listener(gateway.host, gateway.port)
                raise CommandError(
                    f"cannot listen on {gateway.host}:{gateway.port} ({error.strerror})"
                    + (f", {who} does" if who else "")
                    + "; choose another port: BATON_GATEWAY_PORT=8001 (or [gateway] port)",
                    ExitCode.TEMPORARY,
                ) from None

    def wait_ready(self, found: ClusterRecord, timeout_s: float, stop: Callable[[], bool]) -> bool:
        """Wait until the gateway can serve; ``False`` if ``stop`` became true before.

        Raises:
            CommandError: a process refused its configuration, supervisor ended, or time is up.
        """
        client, asked = self.client(found), Supervisor(self.run_dir)
        deadline = time.monotonic() + timeout_s
        told = words = ""
        while time.monotonic() < deadline:
            if stop():
                return False
            ready, words = client.health()
            if ready:
                return True
            if not self._supervisor_lives(found):
                raise CommandError(f"supervisor ended: {self.last_words('supervisord.out')}")
            states = self._states(asked)
            self._check_refusals(states)
            line = progress(states, words)
            if line and line != told:
                self._tell(line)
                told = line
            time.sleep(0.1)
        raise CommandError(
            f"not ready after {timeout_s:.0f} s: {self._complaints(asked) or words}; "
            f"see {self.run_dir / leftovers.LOGS}",
            ExitCode.TEMPORARY,
        )

    def _complaints(self, asked: Supervisor) -> str:
        """Return what the processes that are down said last."""
        return "; ".join(
            f"{name} ended with {code}: {self.last_words(f'{name}.log')}"
            for name, (state, code) in self._states(asked).items()
            if state in {"EXITED", "FATAL"}
        )

    def _supervisor_lives(self, found: ClusterRecord) -> bool:
        return self._child.poll() is None if self._child else found.supervisor.is_alive()

    def _states(self, asked: Supervisor) -> dict[str, tuple[str, int]]:
        """Return state and exit code of every program; empty while supervisor is not up."""
        try:
            return {
                str(info["name"]): (str(info["statename"]), int(info["exitstatus"]))
                for info in asked.processes()
            }
        except OSError:
            return {}

    def _check_refusals(self, states: Mapping[str, tuple[str, int]]) -> None:
        for name, (state, code) in states.items():
            if state == "EXITED" and code == _CONFIG_EXIT:
                raise CommandError(f"{name}: {self.last_words(f'{name}.log')}", ExitCode.CONFIG)

    def last_words(self, file: str) -> str:
        """Return why a process gave up, or the last line of its log."""
        path = self.run_dir / leftovers.LOGS / file
        try:
            lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            return f"no log {path}"
        if not lines:
            return f"nothing in {path}"
        for line in reversed(lines[-20:]):
            if '"start_failed"' in line:
                return str(json.loads(line)["reason"])
        return lines[-1]

    def refusal(self, worker: str, incarnation: str) -> str:
        """Return in what an incarnation and another process differ; empty: in nothing known."""
        path = self.run_dir / leftovers.LOGS / f"{worker}.log"
        for line in reversed(path.read_text(errors="replace").splitlines()):
            if '"event":"peer_refused"' in line and f'"incarnation":"{incarnation}"' in line:
                with contextlib.suppress(ValueError):  # a line that a kill has cut
                    return str(json.loads(line)["reason"])
        return ""

    # --- stop -----------------------------------------------------------------------------------

    def stop(self, patience: Patience) -> list[str]:
        """Stop everything and return, in words, what is left all the same (nothing, normally)."""
        if not self.run_dir.exists():
            return []
        with self._locked():
            found = record.read(self.run_dir)
            if found is None or not found.is_running():
                return self._bury(found)
            # Nobody waits longer than the workers' own drain and supervisor's kill after it.
            patience.limit(3 * (self.config.limits.drain_ms / 1000 + 10))
            crashed = leftovers.ownerless(self.run_dir, found)
            self._stop_in_order(found, patience)
            killed = self._supervisor_lives(found)
            if killed:
                self._tell("stopping takes too long: killing what is left")
                found.supervisor.send(signal.SIGKILL)
            if self._child is not None:
                self._child.wait()
            return self._bury(found) if killed else self._after_stop(found, crashed)

    def _stop_in_order(self, found: ClusterRecord, patience: Patience) -> None:
        asked = Supervisor(self.run_dir)
        # Nobody is to start again what ends now; then gateways (they drain), then all but the
        # ledger, which notes the others' end, and the keeper, which is told to forget. These are
        # stopped from here as well: supervisor, told to end, sleeps up to a second for each group
        # that it looks at before.
        groups: tuple[Callable[[str], bool], ...] = (
            lambda name: name == supervisor.RESTARTER,
            lambda name: name.startswith(f"{Role.GATEWAY.value}-"),
            lambda name: name not in supervisor.SERVERS,
            lambda name: True,
        )
        # A supervisor that ends (or was killed) in the middle answers no more: then wait for it.
        with contextlib.suppress(OSError):
            for group in groups:
                asked.stop(group)
                self._wait_stopped(asked, group, patience)
            asked.shutdown()
        while self._supervisor_lives(found) and not patience.is_over():
            time.sleep(0.05)

    def _wait_stopped(
        self, asked: Supervisor, group: Callable[[str], bool], patience: Patience
    ) -> None:
        while not patience.is_over():
            states = {name: state for name, (state, _) in self._states(asked).items()}
            if not any(state in _ALIVE for name, state in states.items() if group(name)):
                return
            time.sleep(0.05)

    def _after_stop(self, found: ClusterRecord, crashed: Collection[leftovers.Known]) -> list[str]:
        # The kernel needs a moment to take down the last process's memory.
        deadline = time.monotonic() + 1
        while (left := leftovers.found_after_stop(self.run_dir, found, crashed)) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return left + [line for line in self._bury(found) if line not in left]

    def _bury(self, found: ClusterRecord | None) -> list[str]:
        """Take away what a cluster without a supervisor left; return what resists."""
        left = leftovers.end_members(self.run_dir, _ORPHANS_S, self._tell)
        if found is not None:
            left += leftovers.remove_arenas(found)
        if not left:
            leftovers.clear(self.run_dir)
        return left

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep a second `up` or `down` for this run directory waiting."""
        directory = os.open(self.run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)


def worker_pid(info: Mapping[str, Any]) -> int | None:
    """Return the pid of a program's worker; ``None``: it is down, or between two incarnations.

    Supervisor knows the guard (``baton.runtime.guard``); ledger and keeper have none.
    """
    pid = int(info["pid"])
    if not pid or info["name"] in supervisor.SERVERS:
        return pid or None
    return worker_of(pid)


def progress(states: Mapping[str, tuple[str, int]], words: str) -> str:
    """Return what a start waits for: processes first, then what the gateway still misses."""
    if states and all(state == "RUNNING" for state, _ in states.values()):
        # Workers load the model for some seconds: nobody is to wait without knowing for whom.
        return f"waiting: {words.partition(' (')[0]}"
    return ", ".join(f"{name} {state.lower()}" for name, (state, _) in states.items())


def baton_version() -> str:
    """Return the installed version, or that of a checkout that is not installed."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "unknown (not installed)"
