"""What a restart of one process after the other does, in which order, and when the next may begin.

Decides purely, from the rows of `baton status`. `baton.cli.restart` carries it out.

Prefill comes first: it holds nothing, so if its successor does not fit the others (another model,
other code) decode computes the prompts and no client notices. Then decode, whose successor takes
its memory over, routers, and gateways, which end when their clients have their answers. Keeper and
ledger come last, when everybody else is known to be well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from baton.cli.status import work
from baton.cli.supervisor import SERVERS
from baton.core.ids import Role

Row = Mapping[str, Any]

ORDER = (Role.PREFILL, Role.DECODE, Role.ROUTER, Role.GATEWAY, *reversed(SERVERS))

#: States of a process that does not run, and does not start by itself just now.
ENDED = ("stopped", "exited", "fatal")

#: What it means when the last one of a kind takes nothing any more.
LAST_MEANS = {
    Role.GATEWAY: "clients cannot connect",
    Role.ROUTER: "nothing new is placed, and nothing is retried",
    Role.DECODE: "nothing can be served: what runs there ends or fails, it has nowhere to go",
    Role.PREFILL: "decode computes prompts between its steps, and /health says not ready",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do, complete before the next."""

    action: Literal["start", "restart", "end"]
    worker: str


def is_up(row: Row) -> bool:
    """Whether the process runs and is known to the others."""
    return row["state"] == "running" and (row["incarnation"] is not None or row["role"] in SERVERS)


def others_up(rows: Sequence[Row], worker: str) -> list[str]:
    """Return who else does the work of ``worker``."""
    (role,) = {row["role"] for row in rows if row["process"] == worker}
    return [
        row["process"]
        for row in rows
        if row["role"] == role and row["process"] != worker and is_up(row) and not _drains(row)
    ]


def plan(rows: Sequence[Row], workers: Sequence[str], spare: str) -> list[Step]:
    """Return the steps that restart ``workers``, in order.

    ``spare`` is a gateway that does not run: it takes the new connections while the only gateway
    waits for its clients' answers to end. Empty: there is none.
    """
    role_of = {row["process"]: row["role"] for row in rows}
    steps: list[Step] = []
    for role in ORDER:
        mine = sorted(worker for worker in workers if role_of[worker] == role)
        restarts = [Step("restart", worker) for worker in mine]
        if role is Role.GATEWAY and mine and spare and not others_up(rows, mine[0]):
            restarts = [Step("start", spare), *restarts, Step("end", spare)]
        steps += restarts
    return steps


def strangers(rows: Sequence[Row]) -> list[str]:
    """Return, in words, the running processes with which this version cannot speak."""
    return [
        f"{row['process']}: {row['silent']}"
        for row in rows
        if row["state"] == "running" and row["silent"]
    ]


def unmet(rows: Sequence[Row]) -> list[str]:
    """Return, in words, which running processes have not met each other yet."""
    up = [row for row in rows if is_up(row) and row["role"] not in SERVERS]
    missing = [f"{row['process']} does not answer" for row in up if not row["report"]]
    names = {f"{row['process']}/{row['incarnation']}": row["role"] for row in up}
    prefills = {name for name, role in names.items() if role == Role.PREFILL}
    known = {row["process"]: _knows(row, prefills) for row in up if row["report"]}
    for row in up:
        name = f"{row['process']}/{row['incarnation']}"
        missing += [
            f"{other['process']} has not met {row['process']}"
            for other in up
            if row["role"] in _MUST_KNOW[other["role"]]
            and name not in known.get(other["process"], {name})
        ]
    return missing


def stage(row: Row, before: object) -> str:
    """Return, in words, how far a process is on its way from its incarnation ``before``."""
    report = row["report"] or {}
    if row["role"] in SERVERS:
        return f"is {row['state']}"
    if row["state"] in ENDED:
        return f"has ended ({row['state']})"
    if row["incarnation"] is None or row["state"] != "running":
        return "it starts" if before is None else "the old incarnation has ended"
    if row["incarnation"] == before:
        return f"the old incarnation still runs ({work(report)})"
    if not report.get("ready"):
        return "the new incarnation is not ready yet"
    return f"the new incarnation serves ({work(report)})"


#: Who must know whom before both are of use.
_MUST_KNOW: Mapping[str, tuple[str, ...]] = {
    Role.GATEWAY: (Role.ROUTER, Role.DECODE, Role.PREFILL),
    Role.ROUTER: (Role.GATEWAY, Role.DECODE, Role.PREFILL),
    Role.DECODE: (Role.GATEWAY, Role.ROUTER, Role.PREFILL),
    Role.PREFILL: (Role.ROUTER, Role.DECODE),
}


def _knows(row: Row, prefills: set[str]) -> set[str]:
    """Return the peers with which it can work now; ``prefills`` are all prefill workers."""
    report = row["report"]
    if row["role"] == Role.ROUTER:
        accepting = {name for name, status in report["workers"].items() if status["accepting"]}
        return accepting | set(report["gateways"])
    peers = set(report["peers"])
    if row["role"] == Role.DECODE:
        # A prefill worker that has not mapped this arena gets no ticket.
        return (peers - prefills) | set(report["writers"])
    return peers


def _drains(row: Row) -> bool:
    return bool((row["report"] or {}).get("draining"))
