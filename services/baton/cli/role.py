"""`baton role`: a worker does other work from now on; no process is started anew, no request lost.

Decides what is refused before the worker is asked, and what is waited for. The worker has the last
word (`baton.runtime.roles`); it drains, and comes back as what it was told to be.
"""

from __future__ import annotations

import time

from baton.cli.reports import Registered, change_role, read_members
from baton.cli.rolling import is_up, others_up
from baton.cli.running import Running
from baton.cli.status import role_of
from baton.cli.terminal import CommandError, ExitCode, say
from baton.core.ids import WorkerRole
from baton.runtime.roles import why_not
from baton.runtime.settings import Config


def role(config: Config, worker: str, wanted: WorkerRole, *, wait_s: float | None) -> int:
    """Change the role of one worker, and wait until it serves as that."""
    found = Running(config)
    row = found.row(worker)
    workers = [each for each in found.rows if each["role"] in ("prefill", "decode")]
    if row not in workers:
        names = ", ".join(each["process"] for each in workers)
        raise CommandError(
            f"{worker} is a {row['role']}; only these have a role to change: {names}",
            ExitCode.USAGE,
        )
    if not is_up(row):
        raise CommandError(f"{worker} does not run ({row['state']}); see `baton status`")
    now = WorkerRole(role_of(row))
    if now is wanted:
        say(f"{worker} is {wanted} already")
        return ExitCode.OK
    others = bool(others_up(found.rows, worker))
    mode = found.settings.cluster.mode
    refused = why_not(worker, now, wanted, mode, others=others)
    refused = refused or change_role(_member(found, worker).member, wanted, found.settings.limits)
    if refused:
        raise CommandError(f"{worker} stays {now}: {refused}")
    began, before = time.monotonic(), row["incarnation"]
    if wait_s is None:
        wait_s = found.drain_s
    seen = lambda: _serves(found, worker, wanted, before)  # noqa: E731
    found.wait(seen, wait_s, worker, f"is not {wanted}")
    say(f"{worker} is {wanted}; it took {time.monotonic() - began:.1f} s")
    return ExitCode.OK


def _serves(found: Running, worker: str, wanted: WorkerRole, before: int) -> bool:
    row = found.row(worker)
    report = row["report"]
    if not is_up(row) or not report or not report["ready"]:
        return False
    now = WorkerRole(role_of(row))
    if now.process is not wanted.process and row["incarnation"] != before:
        raise CommandError(
            f"{worker} could not become {wanted} and is {now} again; see `baton logs {worker}`"
        )
    return now is wanted and not report["draining"] and found.is_well()


def _member(found: Running, worker: str) -> Registered:
    registered = read_members(found.ledger_url, found.settings.ledger.pool)
    (one,) = (each for each in registered if each.member.peer.worker_id == worker)
    return one
