"""`baton drain`, `baton start` and `baton restart`: single processes of a running cluster.

Decides what is asked of whom; what a restart of all consists of is decided in `baton.cli.rolling`.
Draining is SIGTERM: a process takes nothing new, gives away
or ends what runs, and exits 0. A restart is SIGUSR2: the process ends where its successor goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from baton.cli.rolling import LAST_MEANS, is_up, others_up, plan, strangers
from baton.cli.running import Running
from baton.cli.settings_file import differences
from baton.cli.supervisor import SERVERS, spare
from baton.cli.terminal import CommandError, ExitCode, say
from baton.runtime.settings import Config


def drain(config: Config, worker: str, *, wait_s: float | None, force: bool) -> int:
    """Have one process end in order and stay down."""
    found = Running(config)
    row = found.row(worker)
    if row["role"] in SERVERS:
        raise CommandError(
            f"the {worker} cannot drain: everybody needs it; `baton restart {worker}` replaces it"
        )
    if not is_up(row):
        raise CommandError(f"{worker} does not run ({row['state']}); see `baton status`")
    if not others_up(found.rows, worker) and not force:
        raise CommandError(
            f"{worker} is the last {row['role']} that takes anything: {LAST_MEANS[row['role']]}. "
            f"Start another one first, or say --force"
        )
    found.drain(worker, wait_s)
    say(f"{worker} is drained and has ended; `baton start {worker}` brings it back")
    return ExitCode.OK


def start(config: Config, worker: str, wait_s: float) -> int:
    """Start a process that is down, and wait until the others have met it."""
    found = Running(config)
    row = found.row(worker)
    if row["state"] in ("running", "starting"):
        say(f"{worker} runs already (pid {row['pid']})")
        return ExitCode.OK
    found.start(worker, wait_s)
    say(f"{worker} serves")
    return ExitCode.OK


def restart(config: Config, workers: Sequence[str], *, rolling: bool, wait_s: float) -> int:
    """Replace processes one by one, each ready before the next; clients notice nothing."""
    if bool(workers) == rolling:
        raise CommandError(
            "name the processes to restart, or say --rolling for all of them", ExitCode.USAGE
        )
    found = Running(config)
    for worker in workers:
        found.row(worker)
    if others := strangers(found.rows):
        more = f" (and {len(others) - 1} more)" if others[1:] else ""
        raise CommandError(
            f"nothing was restarted, because {others[0]}{more}. Processes of different versions "
            "refuse each other, so a rolling restart would take the cluster apart: use `baton "
            "down` and `baton up`"
        )
    if changed := differences(config, found.settings):
        raise CommandError(
            "nothing was restarted, because a restart keeps the settings of the cluster's start, "
            f"and these are others: {'; '.join(changed)}. Use `baton down` and `baton up`, or "
            "leave them out",
            ExitCode.CONFIG,
        )
    every = workers or [row["process"] for row in found.rows if is_up(row)]
    steps = plan(found.rows, every, spare(found.settings))
    began = time.monotonic()
    for number, step in enumerate(steps, 1):
        since, where = time.monotonic(), f"[{number}/{len(steps)}] "
        found.carry_out(step, wait_s, where)
        say(f"{where}{step.worker}: {_DONE[step.action]}, {time.monotonic() - since:.1f} s")
    say(f"done in {time.monotonic() - began:.1f} s")
    return ExitCode.OK


_DONE = {"start": "started", "restart": "restarted", "end": "ended"}
