"""The cluster under chaos: two of each, a ledger of its own behind a proxy, and a door for clients.

Decides how each thing is broken and mended. Workers are supervisor's; the ledger's server is this
run's own, so that it can be wiped, rolled back and cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import redis

from baton.cli.audit import Verdict, watch
from baton.cli.processes import ProcessName, members, name_of
from baton.cli.record import ClusterRecord, read
from baton.cli.records import Record, read_record
from baton.cli.reports import LedgerSilent, Registered, ask, read_members
from baton.cli.sample import Sample, take
from baton.cli.supervisor import SETTINGS_NAME, Supervisor
from baton.core.ids import Role
from baton.core.limits import Limits
from baton.ledger.keys import Keys
from baton.runtime.config import load
from baton.runtime.settings import Config
from chaos.heard import HOST
from chaos.proxy import Proxy, Streams
from support.ledger_server import LedgerServer
from support.ops_cluster import OpsCluster

POOL = "default"
WORKERS = tuple(
    f"{role.value}-{number}"
    for role in (Role.ROUTER, Role.DECODE, Role.PREFILL, Role.GATEWAY)
    for number in (0, 1)
)
#: Four processes load a model on few cores.
START_S = 180.0
#: Where prepared models lie is this machine's business, not the run's.
_KEPT = ("BATON_MODEL_CACHE_DIR", "BATON_MODEL_PATH")
#: A drain that lasts longer than any answer: nobody fails because a process was asked to end.
DRAIN_MS = 15_000


class Place:
    """One run's cluster."""

    def __init__(self, cluster: OpsCluster, server: LedgerServer) -> None:
        self.cluster = cluster
        self.server = server
        self.direct_url = server.url
        """Past the proxy: what the run itself looks at."""
        self.limits = Limits()
        self.ledger_proxy = Proxy(self._to_ledger)
        self.client_proxy = Proxy(self._to_gateway)
        self.client_port = 0
        self.server_turn = asyncio.Lock()
        """Faults of the ledger's server that overlap take turns."""
        self.stops = cluster.run_dir.parent / "stops"
        self.restarts_wanted: set[str] = set()

    async def _to_ledger(self) -> Streams:
        return await asyncio.open_unix_connection(self.server.socket_path)

    async def _to_gateway(self) -> Streams:
        return await asyncio.open_connection(HOST, self.cluster.port)

    # --- looking --------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        return self.cluster.port

    @property
    def logs(self) -> Path:
        return self.cluster.run_dir / "logs"

    def registered(self) -> dict[str, Registered]:
        """Return who is registered, by name; nobody while the ledger is away."""
        try:
            return {one.member.peer.worker_id: one for one in read_members(self.direct_url, POOL)}
        except LedgerSilent:
            return {}

    def process(self, worker_id: str) -> ProcessName | None:
        """Return a worker's process, if it is there."""
        found = self.registered().get(worker_id)
        return name_of(found.member.pid) if found is not None else None

    def owned(self) -> dict[str, set[str]]:
        """Return the requests of every process, by its whole name; the ledger's own index."""
        found: dict[str, set[str]] = defaultdict(set)
        server = redis.Redis.from_url(self.direct_url, socket_timeout=2.0)
        with contextlib.suppress(redis.RedisError, OSError), server:
            entries: Any = server.zrange(Keys(POOL).owners, 0, -1)
            for entry in entries:
                peer, _, request_id = entry.decode().partition(" ")
                found[peer].add(request_id)
        return found

    def record(self, request_id: str) -> Record | None:
        """Return a request's record, if the ledger has it and answers."""
        try:
            return read_record(self.direct_url, POOL, request_id)
        except LedgerSilent:
            return None

    def gateway_of(self, request_id: str) -> str:
        """Return the whole name of the gateway that a request came to, as its log says, which no
        fault of the ledger's takes away; "" if none does (yet)."""
        needle = request_id.encode()
        for path in self.logs.glob("gateway-*.log*"):
            for line in path.read_bytes().splitlines():
                if needle in line and b'"request_submitted"' in line:
                    entry = json.loads(line)
                    return f"{entry['worker']}/{entry['incarnation']}"
        return ""

    def unready(self) -> str:
        """Return what is missing until everything is as at the start; empty: nothing."""
        registered = self.registered()
        missing = [name for name in WORKERS if name not in registered]
        if missing:
            return f"not registered: {', '.join(missing)}"
        overdue = [name for name, one in registered.items() if one.lease_ms < 0]
        if overdue:
            return f"overdue: {', '.join(overdue)}"
        dead = [name for name, one in registered.items() if name_of(one.member.pid) is None]
        if dead:
            return f"dead: {', '.join(dead)}"
        reports = ask([one.member for one in registered.values()], "status", self.limits)
        by_name = {peer.worker_id: report for peer, report in reports.items()}
        silent = [name for name, report in by_name.items() if not isinstance(report, dict)]
        if silent:
            return f"silent: {', '.join(silent)}"
        peers = {name: str(one.member.peer) for name, one in registered.items()}
        return _apart(by_name, peers)

    # --- breaking and mending -------------------------------------------------------------------

    def start(self, worker_id: str) -> None:
        """Start a worker that ended because it was asked to; nothing if it runs."""
        with contextlib.suppress(ConnectionError):
            Supervisor(self.cluster.run_dir).start(worker_id)

    def state(self, worker_id: str) -> str:
        """Return supervisor's word for a worker."""
        for info in Supervisor(self.cluster.run_dir).processes():
            if info["name"] == worker_id:
                return str(info["statename"])
        return ""

    def restart_ledger(self) -> None:
        """Kill the ledger's server and start it on the same data."""
        self.server.kill()
        self.server.start()

    def keep_ledger(self) -> Path:
        """Copy the ledger's data as they are now; return the copy."""
        copy = self.server.run_dir / "kept"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.server.data_dir, copy)
        return copy

    def roll_back_ledger(self, copy: Path) -> None:
        """Kill the ledger's server and start it with data of the past."""
        self.server.kill()
        shutil.rmtree(self.server.data_dir)
        copy.rename(self.server.data_dir)
        self.server.start()

    def wipe_ledger(self) -> None:
        """Empty the ledger under everybody."""
        self.server.command("FLUSHALL")

    # --- auditing -------------------------------------------------------------------------------

    def audit(self) -> Verdict:
        """Run `baton audit` on this cluster."""
        found, config = self._found()
        return watch(lambda: take(self.cluster.run_dir, found, config), config.limits)

    def sample(self) -> Sample:
        """Take one look at everything."""
        found, config = self._found()
        return take(self.cluster.run_dir, found, config)

    def _found(self) -> tuple[ClusterRecord, Config]:
        found = read(self.cluster.run_dir)
        assert found is not None, "the cluster's record is gone"
        return found, load(self.cluster.run_dir / SETTINGS_NAME, {})


def _apart(reports: dict[str, Any], peers: dict[str, str]) -> str:
    """Return who has not met whom yet."""
    for name, report in reports.items():
        if not report["ready"]:
            return f"{name} is not ready"
    prefills = {peers[name] for name in WORKERS if name.startswith("prefill")}
    for name in ("decode-0", "decode-1"):
        if not prefills <= set(reports[name]["writers"]):
            return f"{name} has not seen both prefill workers"
    workers = {peers[n] for n in WORKERS if n.startswith(("decode", "prefill"))}
    for name in ("router-0", "router-1"):
        views = reports[name]["workers"]
        if not workers <= views.keys():
            return f"{name} is not linked to all workers"
        shut = [each for each in workers if not views[each]["accepting"]]
        if shut:
            return f"{name} thinks that {shut[0]} accepts nothing"
    for name in ("gateway-0", "gateway-1"):
        if not set(peers.values()) - {peers["gateway-0"], peers["gateway-1"]} <= set(
            reports[name]["peers"]
        ):
            return f"{name} is not linked to everybody"
    return ""


@contextlib.asynccontextmanager
async def place(model_settings: dict[str, str]) -> AsyncIterator[Place]:
    """Start ledger, proxies and cluster; end them all, however the run went."""
    with _folder() as folder, LedgerServer() as server:
        cluster = OpsCluster(folder / f"r-{os.urandom(4).hex()}", _free_port())
        there = Place(cluster, server)
        there.stops.mkdir()
        ledger_port = await there.ledger_proxy.start()
        there.client_port = await there.client_proxy.start()
        cluster.environ = {
            "BATON_MODEL_NAME": "m",
            "BATON_LEDGER_URL": f"redis://{HOST}:{ledger_port}",
            "BATON_CLUSTER_ROUTERS": "2",
            "BATON_CLUSTER_PREFILL": "2",
            "BATON_CLUSTER_DECODE": "2",
            "BATON_CLUSTER_GATEWAYS": "2",
            "BATON_LIMITS_DRAIN_MS": str(DRAIN_MS),
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            **model_settings,
            "BATON_FAKE_STOPS_DIR": str(there.stops),
        }
        try:
            await asyncio.to_thread(cluster.up, START_S)
            there.limits = there._found()[1].limits
            yield there
        finally:
            there.ledger_proxy.let_go()
            there.client_proxy.let_go()
            with contextlib.suppress(ProcessLookupError, AssertionError):
                server.thaw()
            for process in members(cluster.run_dir):
                process.send(signal.SIGCONT)
            await asyncio.to_thread(cluster.end)
            await there.ledger_proxy.close()
            await there.client_proxy.close()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-c-", dir="/tmp") as name:
        yield Path(name)


def _free_port() -> int:
    from baton.cli.settings_file import free_port

    return free_port(HOST)
