"""A running cluster as the commands see it that change single processes of it.

Decides how a process is asked, and how long and in which words it is waited for. What is asked of
whom is decided in `baton.cli.restart` and `baton.cli.role`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.cli.client import no_cluster
from baton.cli.cluster import Cluster
from baton.cli.record import ClusterRecord
from baton.cli.rolling import ENDED, Step, is_up, stage, unmet
from baton.cli.status import gather
from baton.cli.supervisor import SERVERS, Supervisor, spare
from baton.cli.terminal import CommandError, ExitCode, say, warn
from baton.core.ids import Role
from baton.runtime.dirs import ledger_url
from baton.runtime.settings import Config

_LOOK_S = 0.2
#: Supervisor's kill comes after the drain's limit; beyond that something is wrong.
_DRAIN_MARGIN_S = 10.0


@dataclass(slots=True)
class _Progress:
    """Says how far one process is and what is waited for, once each time it changes."""

    where: str = ""
    """What stands before each line: which step of how many."""
    told: str = ""

    def tell(self, line: str) -> None:
        if line != self.told:
            say(f"{self.where}{line}")
            self.told = line


class Running:
    """A running cluster, looked at as `baton status` does."""

    def __init__(self, config: Config) -> None:
        self._cluster = Cluster(config, os.environ, warn)
        record = self._cluster.running()
        if record is None:
            raise no_cluster(config)
        self._record: ClusterRecord = record
        self.settings = self._cluster.started_with()
        self._supervisor = Supervisor(self._cluster.run_dir)
        self._where = ""
        self.picture: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.look()

    def look(self) -> None:
        """Ask everybody again."""
        self.picture = gather(self._cluster, self._record, self.settings)
        self.rows = self.picture["processes"]
        if (name := spare(self.settings)) and name not in {row["process"] for row in self.rows}:
            self.rows.append({"process": name, "role": Role.GATEWAY.value, "state": "stopped"})

    @property
    def ledger_url(self) -> str:
        """Where the cluster's ledger is."""
        return ledger_url(self.settings, self._cluster.run_dir)

    @property
    def drain_s(self) -> float:
        """How long a drain is waited for."""
        return self.settings.limits.drain_ms / 1000 + _DRAIN_MARGIN_S

    def row(self, worker: str) -> dict[str, Any]:
        """Return the row of one process of this cluster's supervisor.

        Raises:
            CommandError: there is none.
        """
        mine = {row["process"]: row for row in self.rows if row["state"] != "elsewhere"}
        if worker not in mine:
            # The spare gateway is there for a restart only; while it is down `status` has it not.
            unused = spare(self.settings)
            names = [name for name, row in mine.items() if name != unused or is_up(row)]
            raise CommandError(
                f"there is no {worker} here; there are {', '.join(names)}", ExitCode.USAGE
            )
        return mine[worker]

    # --- what is done ---------------------------------------------------------------------------

    def carry_out(self, step: Step, wait_s: float, where: str) -> None:
        """Do one step of a plan, and wait until the cluster is whole again.

        ``where`` stands before each line of progress: which step of how many it is.
        """
        self._where = where
        match step.action:
            case "start":
                self.start(step.worker, wait_s)
            case "end":
                self._supervisor.signal(step.worker, "USR2")
                patience = self.settings.limits.restart_ms / 1000 + wait_s
                self.wait(lambda: self._ended(step.worker), patience, step.worker, "still drains")
            case "restart":
                self._replace(step.worker, wait_s)

    def drain(self, worker: str, wait_s: float | None) -> None:
        """Tell it to end, and wait for that."""
        if wait_s is None:
            wait_s = self.drain_s
        self._supervisor.stop(lambda name: name == worker)
        self.wait(lambda: self._ended(worker), wait_s, worker, "still drains")
        code = self.row(worker).get("exit_code")
        if code:
            raise CommandError(
                f"{worker} ended with {code}: {self._cluster.last_words(f'{worker}.log')}"
            )

    def start(self, worker: str, wait_s: float) -> None:
        """Start it and wait until it is of use."""
        before = self._incarnation(worker)
        self._supervisor.start(worker)
        self.wait(lambda: self._serves(worker, before), wait_s, worker, "is not ready")

    def _replace(self, worker: str, wait_s: float) -> None:
        before = self._incarnation(worker)
        if worker in SERVERS:
            self.drain(worker, wait_s)
            self.start(worker, wait_s)
            return
        self._supervisor.signal(worker, "USR2")
        # A gateway ends when its last answer has, within a limit.
        patience = wait_s
        if self.row(worker)["role"] == Role.GATEWAY:
            patience += self.settings.limits.restart_ms / 1000
        self.wait(lambda: self._serves(worker, before), patience, worker, "is not ready")

    # --- what is waited for -----------------------------------------------------------------------

    def wait(self, seen: Callable[[], bool], wait_s: float, worker: str, late: str) -> None:
        progress, before = _Progress(self._where), self._incarnation(worker)
        deadline = time.monotonic() + wait_s
        while True:
            self.look()
            if seen():
                return
            waits_for = self._words(worker, before)
            if time.monotonic() >= deadline:
                raise CommandError(
                    f"{worker} {late} after {wait_s:.0f} s ({waits_for}){self._misfit(worker)}; "
                    f"nothing else was touched; see `baton status` and `baton logs {worker}`",
                    ExitCode.TEMPORARY,
                )
            progress.tell(f"{worker}: {waits_for}")
            time.sleep(_LOOK_S)

    def _misfit(self, worker: str) -> str:
        reason = self._cluster.refusal(worker, str(self._incarnation(worker)))
        return f": {reason}" if reason else ""

    def _words(self, worker: str, before: object) -> str:
        return "; ".join([stage(self.row(worker), before), *unmet(self.rows)[:3]])

    def _ended(self, worker: str) -> bool:
        return self.row(worker)["state"] in ENDED

    def _incarnation(self, worker: str) -> object:
        return self.row(worker).get("incarnation")

    def _serves(self, worker: str, before: object) -> bool:
        row = self.row(worker)
        if worker in SERVERS:
            return is_up(row) and self.is_well()
        renewed = is_up(row) and row["incarnation"] != before
        ready = bool((row["report"] or {}).get("ready"))
        return renewed and ready and self.is_well()

    def is_well(self) -> bool:
        """Whether everybody serves and has met everybody."""
        return self.picture["ready"] and not self.picture["trouble"] and not unmet(self.rows)
