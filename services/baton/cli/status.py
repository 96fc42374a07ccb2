"""`baton status`: who runs, who holds a lease, what each has to do.

Decides how three sources are put side by side: supervisor's processes, the ledger's leases and each
process's own report. A process that one source knows and another does not is shown all the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from baton.cli.client import no_cluster, reach
from baton.cli.cluster import Cluster, worker_pid
from baton.cli.record import ClusterRecord
from baton.cli.reports import LedgerSilent, Registered, ask, read_members
from baton.cli.supervisor import SERVERS, Supervisor, spare
from baton.cli.terminal import ExitCode, counted, say, table, warn
from baton.core.ids import Role, WorkerRole
from baton.engine.info import ModelNotPrepared, read_info
from baton.runtime.dirs import cache_dir, ledger_url
from baton.runtime.model import FAKE_FOLDER, kernel_choice
from baton.runtime.roles import kept_role
from baton.runtime.settings import Config

COLUMNS = ("process", "role", "state", "pid", "incarnation", "lease ms", "step", "blocks", "work")

# Every row has the same keys, so that scripts that read the JSON need not ask which are there.
NO_PROCESS = {"state": "elsewhere", "pid": None, "guard": None, "exit_code": None, "up_s": None}
NOT_REGISTERED = {"incarnation": None, "lease_ms": None, "report": None, "silent": None}


def status(config: Config, *, as_json: bool) -> int:
    """Show the cluster; exit code 0 only if it can serve."""
    cluster = Cluster(config, os.environ, warn)
    found = cluster.running()
    if found is None:
        raise no_cluster(config)
    picture = gather(cluster, found, cluster.started_with())
    if as_json:
        say(json.dumps(picture, indent=2))
    else:
        show(picture, found)
    return ExitCode.OK if picture["ready"] else ExitCode.FAILED


def gather(cluster: Cluster, found: ClusterRecord, config: Config) -> dict[str, Any]:
    """Return everything that is known, ready for JSON."""
    ready, words = cluster.client(found).health()
    trouble = [] if ready else [f"gateway: {words}"]
    registered: list[Registered] = []
    try:
        registered = read_members(ledger_url(config, cluster.run_dir), config.ledger.pool)
    except LedgerSilent as error:
        trouble.append(f"ledger: {error}")
    reports = ask([one.member for one in registered], "status", config.limits)
    return {
        "ready": ready,
        "trouble": trouble,
        "model": _served_name(found, config),
        "kernels": _kernels(found, config, registered),
        "cluster": msgspec.to_builtins(found),
        "run_dir": str(cluster.run_dir),
        "processes": _merge(
            _supervised(cluster, spare(config)), registered, reports, cluster.run_dir
        ),
    }


def _served_name(found: ClusterRecord, config: Config) -> str:
    """Return the name that clients use; the prepared folder's has a digest at its end."""
    folder = Path(found.model)
    if config.engine.kind == "fake":
        folder = Path(config.cluster.run_dir) / FAKE_FOLDER
    try:
        return config.model.name or read_info(folder).name
    except (OSError, ModelNotPrepared):
        return folder.name


def _kernels(found: ClusterRecord, config: Config, registered: list[Registered]) -> dict[str, Any]:
    """Return the kernel sets that run, and why nothing faster does."""
    workers = (one.member for one in registered if one.member.role in (Role.PREFILL, Role.DECODE))
    running = sorted({member.compat.kernels for member in workers if member.compat})
    note = ""
    if config.engine.kind != "fake":
        folder = Path(found.model)
        try:
            choice = kernel_choice(config, folder, read_info(folder), cache_dir(config))
            note = choice.note
        except (OSError, ModelNotPrepared) as error:
            note = str(error)
    return {"running": running, "note": note}


def _supervised(cluster: Cluster, spare: str) -> dict[str, dict[str, Any]]:
    try:
        processes = Supervisor(cluster.run_dir).processes()
    except OSError:
        return {}
    return {
        str(info["name"]): {
            "state": str(info["statename"]).lower(),
            "pid": worker_pid(info),
            "guard": int(info["pid"]) or None,
            "exit_code": int(info["exitstatus"]) if info["statename"] == "EXITED" else None,
            "up_s": int(info["now"]) - int(info["start"]) if info["pid"] else None,
        }
        for info in processes
        # The spare gateway is there for a restart only.
        if info["name"] != spare or info["pid"]
    }


def _merge(
    supervised: Mapping[str, Mapping[str, Any]],
    registered: list[Registered],
    reports: Mapping[Any, Any],
    run_dir: Path,
) -> list[dict[str, Any]]:
    rows = []
    for one in registered:
        peer = one.member.peer
        report = reports.get(peer)
        rows.append(
            {
                **supervised.get(peer.worker_id, {**NO_PROCESS, "pid": one.member.pid}),
                "process": peer.worker_id,
                "role": str(one.member.role),
                "incarnation": peer.incarnation,
                "lease_ms": one.lease_ms,
                "report": report if isinstance(report, dict) else None,
                "silent": report if isinstance(report, str) else None,
            }
        )
    known = {row["process"] for row in rows}
    for name, process in supervised.items():
        if name not in known:
            kept = kept_role(run_dir, name)
            role = kept.process.value if kept else name.rpartition("-")[0] or name
            rows.append({**process, "process": name, "role": role, **NOT_REGISTERED})
    return sorted(rows, key=lambda row: str(row["process"]))


@dataclass(frozen=True, slots=True)
class Readiness:
    """How many workers serve; a cluster is ready with one of each kind."""

    ready: int
    late: tuple[str, ...]
    """Those that do not serve: they start, were drained or have ended."""

    def __str__(self) -> str:
        return f"{self.ready} of {counted(self.ready + len(self.late), 'worker')} ready"


def readiness(rows: Sequence[Mapping[str, Any]]) -> Readiness:
    """Return which prefill and decode workers serve, from the rows of :func:`gather`."""
    workers = [row for row in rows if row["role"] in (Role.PREFILL, Role.DECODE)]
    late = [row["process"] for row in workers if not (row["report"] or {}).get("ready")]
    return Readiness(len(workers) - len(late), tuple(late))


def show(picture: Mapping[str, Any], found: ClusterRecord) -> None:
    """Draw the table."""
    workers = readiness(picture["processes"])
    table(
        f"{found.name} at {reach(found.url)}: {found.mode}, {picture['model']}, "
        + ("ready" if picture["ready"] else "NOT ready")
        + (f", {workers}" if workers.late else ""),
        COLUMNS,
        [_line(row) for row in picture["processes"]],
    )
    kernels = picture["kernels"]
    if kernels["running"]:
        note = f" ({kernels['note']})" if kernels["note"] else ""
        say(f"kernels: {', '.join(kernels['running'])}{note}")
    if words := huge_pages(picture["processes"]):
        say(f"huge pages: {words}")
    if lent := _lent(picture["processes"]):
        say(f"cores that may be borrowed while their owner computes nothing: {lent}")
    for line in picture["trouble"]:
        warn(line)


def huge_pages(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how much of each worker's weights and arena lies in them, as far as they say."""
    words = []
    for row in rows:
        report = row["report"] or {}
        shares = {name: (report.get(name) or {}).get("huge_share") for name in ("weights", "arena")}
        told = [f"{name} {share:.0%}" for name, share in shares.items() if share is not None]
        if told:
            words.append(f"{row['process']} {', '.join(told)}")
    return "; ".join(words)


def _lent(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which worker may borrow which cores, by the kernel's numbers."""
    found = ((row["process"], (row["report"] or {}).get("may_borrow")) for row in rows)
    return ", ".join(f"{name} core {' '.join(map(str, cores))}" for name, cores in found if cores)


def _line(row: Mapping[str, Any]) -> tuple[object, ...]:
    report = row["report"] or {}
    state = row["state"]
    if row["exit_code"] is not None:
        state = f"{state} {row['exit_code']}"
    return (
        row["process"],
        role_of(row),
        state,
        row["pid"] or "-",
        row["incarnation"] or "-",
        "-" if row["lease_ms"] is None else row["lease_ms"],
        report.get("step", "-"),
        blocks(report),
        row["silent"] or _work_of(row, report),
    )


def role_of(row: Mapping[str, Any]) -> str:
    """Return what a process does now; its name says what it was started as."""
    return WorkerRole.MIXED if (row["report"] or {}).get("mixed") else row["role"]


def _work_of(row: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    if row["state"] == "running" and row["lease_ms"] is None and row["role"] not in SERVERS:
        return "starting"  # it is up, and loads or waits for the ledger; nobody knows it yet
    if row["state"] == "stopped":
        return f"baton start {row['process']}"
    return work(report)


def blocks(report: Mapping[str, Any]) -> str:
    """Return ``used/all`` of a decode worker; free and cached blocks are not in use."""
    counts = report.get("blocks")
    if not isinstance(counts, dict):
        return "-"
    total = sum(counts.values())
    return f"{total - counts.get('free', 0) - counts.get('cached', 0)}/{total}"


def work(report: Mapping[str, Any]) -> str:
    """Return in a few words what a process has to do."""
    words = []
    if report.get("draining"):
        words.append("draining")
    for name in ("sequences", "requests", "phases"):
        counts = report.get(name)
        if isinstance(counts, dict):
            words += [f"{count} {state}" for state, count in counts.items() if count]
    for name, noun, more in (
        ("jobs", "job", ""),
        ("queued_tokens", "token", " queued"),
        ("tickets", "ticket", ""),
    ):
        if report.get(name):
            words.append(counted(report[name], noun) + more)
    if report.get("sessions") and not report.get("phases"):
        words.append(counted(report["sessions"], "session"))
    return ", ".join(words) or ("idle" if report else "-")
