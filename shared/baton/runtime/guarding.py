"""What a guard does for its worker, as a pure machine: start, watch, kill, start again, follow.

Decides when the next incarnation is started and after which pause, when a worker counts as frozen
and is killed (``docs/adr/0016-guards.md``), and with which code the guard itself ends. It does not
know what the worker is: only its pulse, and how it ended. ``baton.runtime.guard`` is its shell.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, assert_never

from baton.core.lifecycles import WORKER_MOVES, WorkerState, become
from baton.core.limits import Limits
from baton.core.pauses import FINAL_CODES, STEADY_S, pause_s
from baton.ports.driving import EXIT_ROLE, Exit, Note
from baton.runtime.service import EX_AGAIN, EX_OK
from baton.runtime.starvation import Starvation, ThreadLook

#: How often a guard looks at the pulse of its worker.
LOOK_S = 0.1
#: A guard that looked later than this did not run itself (stopped, starved, the machine slept): how
#: old the worker's pulse is then says nothing, and counting begins anew.
OWN_GAP_S = 0.5
#: From then on it also looks at what the threads of a worker whose loop stands still do.
WATCH_S = 0.3
#: A start yields to those that serve for this long at most: on a full machine it would never end.
YIELD_S = 10.0
#: What a worker may still do after the death of its guard's parent: within the 5 s promised.
GRACE_S = 3.0
#: After so many failures in a row the guard ends too: what it holds may be their reason, and a
#: start from nothing is the only cure left. It ends after the pause, since it begins to count anew.
COLD_AFTER = 8

#: Asks a worker to end in order because nobody is left to restart it.
ORPHANED = signal.SIGHUP
#: Asks a guard to load everything anew, and then its worker to end where its successor goes on.
RESTART = signal.SIGUSR2
#: Makes a worker write the stacks of all its threads into its log.
TRACE = signal.SIGUSR1


class Condition(StrEnum):
    """What a service manager is told."""

    READY = "ready"
    STOPPING = "stopping"


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """Everything heavy is loaded: the first worker may start."""

    adopts: bool = False
    """There is one already: this guard was started in the place of an older one, for a restart."""
    alone: bool = False
    """The whole cluster starts: there is nobody to yield to."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The guard looked at its worker's pulse."""

    beat: float
    """When the worker's event loop last ran; 0.0: it never has."""
    ready: bool
    """It can do its work."""
    pid: int = 0
    threads: tuple[ThreadLook, ...] = ()
    """What they do, if it was asked for (:attr:`GuardMachine.watches`) and the kernel tells."""


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """The worker's end was seen, and its process is reaped."""

    code: int
    """Exit code; a signal's number, negative, if one ended it."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """SIGTERM or SIGINT."""

    number: int


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """SIGUSR2: what is on disk may be newer than what is loaded."""


@dataclass(frozen=True, slots=True)
class ParentGone:
    """Whoever started the guard is dead."""


# --- commands (beside Note and Exit) --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Fork the next incarnation."""

    yielding: bool
    """It lets those that serve run first until it is ready; otherwise requests wait for it."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Become a new guard, in this very process, that adopts the worker."""


@dataclass(frozen=True, slots=True)
class HurryWorker:
    """It has yielded long enough."""


@dataclass(frozen=True, slots=True)
class SignalWorker:
    """Send a signal to the worker that runs."""

    number: int


@dataclass(frozen=True, slots=True)
class TellManager:
    """Tell systemd."""

    condition: Condition


Event = Began | Looked | WorkerEnded | StopAsked | RestartAsked | ParentGone
Command = StartWorker | Renew | HurryWorker | SignalWorker | TellManager | Note | Exit
Do = Callable[[Command], None]


class GuardMachine:
    """The guard of one worker. ``Machine[Event, Command]``, but that time comes with a look."""

    def __init__(self, limits: Limits, *, kill: Literal["stale", "never"]) -> None:
        self.state = WorkerState.ABSENT
        self.failures = 0
        """In a row."""
        self._kill = kill
        self._lease_s = limits.lease_ttl_ms / 1000
        self._frozen_s = (limits.lease_ttl_ms + limits.frozen_margin_ms) / 1000
        self._start_s = limits.start_ms / 1000
        self._looked_at = 0.0
        self._count_from = 0.0
        """Nothing before this counts against the worker: the guard did not see it."""
        self._started_at = 0.0
        self._start_due: float | None = None
        self._cold_code: int | None = None
        """The guard ends with it when its worker would be started next."""
        self._hurry_due: float | None = None
        self._kill_due: float | None = None
        self._was_ready = False
        self._stop_asked = False
        self._orphaned = False
        self._traced = False
        self._told_frozen = False
        self._starvation = Starvation()
        self._spared_until: float | None = None
        """It stood still for want of a core; it has so much more time."""
        self.watches = False
        """The next look should tell what the worker's threads do."""
        self._replacing = False
        """It was asked to make room for its successor."""
        self._over = False

    # --- the machine ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; return what to do, in order."""
        commands: list[Command] = []
        do = commands.append
        assert not self._over, "the guard has ended"
        match event:
            case Began(adopts, alone):
                self._looked_at = now
                if adopts:
                    self._adopt(now, do)
                else:
                    self._start(now, do, yielding=not alone)
            case Looked():
                self._looked(event, now, do)
            case WorkerEnded(code):
                self._ended(code, now, do)
            case StopAsked(number):
                self._stop(number, do)
            case RestartAsked():
                if not (self._stop_asked or self._orphaned):
                    do(Renew())
            case ParentGone():
                self._orphan(now, do)
            case _:
                assert_never(event)
        return commands

    def deadline(self) -> float:
        """Return when to look next."""
        due = self._looked_at + LOOK_S
        return due if self._start_due is None else min(due, self._start_due)

    def check(self) -> None:
        """Assert what always holds."""
        absent = self.state is WorkerState.ABSENT
        assert absent or self._start_due is None, "a second worker would be started"
        assert not absent or self._over or self._start_due is not None, "would never start one"

    # --- decisions --------------------------------------------------------------------------------

    def _start(self, now: float, do: Do, *, yielding: bool) -> None:
        self._begin(now)
        self._hurry_due = now + YIELD_S if yielding else None
        do(StartWorker(yielding))

    def _adopt(self, now: float, do: Do) -> None:
        """It serves on while its new guard loaded; now it makes room."""
        self._begin(now)
        self._replacing = True
        do(SignalWorker(RESTART))

    def _begin(self, now: float) -> None:
        self._become(WorkerState.STARTING)
        self._started_at = self._count_from = now
        self._start_due = self._kill_due = self._hurry_due = None
        self._was_ready = self._traced = self._told_frozen = self._replacing = False
        self._moves()

    def _looked(self, look: Looked, now: float, do: Do) -> None:
        beat = look.beat
        if now - self._looked_at > OWN_GAP_S:
            self._count_from = now
        self._looked_at = now
        if self.state is WorkerState.ABSENT:
            if self._start_due is not None and now >= self._start_due:
                if self._cold_code is None:
                    self._start(now, do, yielding=False)
                else:
                    self._end(self._cold_code, "a start from nothing may help", do)
            return
        if self.state is WorkerState.STARTING and beat:
            self._become(WorkerState.SERVING)
        if look.ready and not self._was_ready:
            self._was_ready = True
            do(TellManager(Condition.READY))
        if self._hurry_due is not None and now >= self._hurry_due:
            self._hurry_due = None
            if self.state is WorkerState.STARTING:
                do(HurryWorker())
        if self.state is not WorkerState.KILLED:
            self._mind(look, now, do)

    def _mind(self, look: Looked, now: float, do: Do) -> None:
        """Kill what has stood still for too long."""
        beat = look.beat
        if self._kill_due is not None and now >= self._kill_due:
            self._end_by_force("it outlives the process that started it", now - beat, do)
            return
        # Before its first beat a worker loads, allocates and warms up, which blocks its loop.
        still_s = now - max(beat, self._count_from) if beat else now - self._started_at
        self.watches = bool(beat) and still_s >= WATCH_S
        if not self.watches:
            self._moves()
        elif look.threads:
            self._starvation.looked(look.threads, now)
        if beat and still_s < self._lease_s:
            self._traced = self._told_frozen = False
            return
        if beat and not self._traced:
            self._traced = True
            do(SignalWorker(TRACE))
        if still_s < (self._frozen_s if beat else self._start_s):
            return
        if beat and self._spares(look.pid, still_s, now, do):
            return
        why = "its event loop stands still" if beat else "it does not become ready"
        if self._kill == "stale":
            self._end_by_force(why, still_s, do)
        elif not self._told_frozen:
            self._told_frozen = True
            do(Note("worker_frozen", {"reason": why, "seconds": round(still_s, 3)}, "warning"))

    def _moves(self) -> None:
        """Its loop runs, or nobody knows yet that it does not."""
        self._starvation.forget()
        self._spared_until = None

    def _spares(self, pid: int, still_s: float, now: float, do: Do) -> bool:
        """Give a worker that gets no core one lease more, once: it would go on by itself, and its
        successor would get none either."""
        if self._spared_until is None and self._starvation.starves(pid):
            self._spared_until = now + self._lease_s
            fields = {"seconds": round(still_s, 3), "spared_s": self._lease_s}
            do(Note("worker_starved", fields, "warning"))
        return self._spared_until is not None and now < self._spared_until

    def _end_by_force(self, why: str, still_s: float, do: Do) -> None:
        self._become(WorkerState.KILLED)
        do(Note("worker_killed", {"reason": why, "seconds": round(still_s, 3)}, "error"))
        do(SignalWorker(signal.SIGKILL))

    def _ended(self, code: int, now: float, do: Do) -> None:
        self._become(WorkerState.ABSENT)
        if self._orphaned:
            self._end(EX_AGAIN, "the process that started this one is gone", do)
        elif self._stop_asked:
            code = EX_OK if code == EXIT_ROLE else code  # it had drained for another reason
            self._end(code if code >= 0 else 128 - code, "stopped", do)
        elif code in FINAL_CODES:
            self._end(code, "its worker is not to be started again", do)
        elif code == EXIT_ROLE:
            do(Note("worker_changes_role"))
            self._start(now, do, yielding=False)
        elif self._replacing and code == EX_AGAIN:
            do(Note("worker_replaced"))
            self._start(now, do, yielding=False)
        else:
            self._failed(code, now, do)

    def _failed(self, code: int, now: float, do: Do) -> None:
        steady = self._was_ready and now - self._started_at >= STEADY_S
        self.failures = 1 if steady else self.failures + 1
        pause = pause_s(self.failures)
        cold = self.failures >= COLD_AFTER
        how = {"code": code} if code >= 0 else {"signal": signal.Signals(-code).name}
        fields = {"failures": self.failures, "restart_in_s": pause, "from_nothing": cold}
        do(Note("worker_ended", {**how, **fields}, "warning"))
        if cold:
            self._cold_code = code if code > 0 else EX_AGAIN
        if pause:
            self._start_due = now + pause
        else:
            self._start(now, do, yielding=False)

    def _stop(self, number: int, do: Do) -> None:
        first, self._stop_asked = not self._stop_asked, True
        if self.state is WorkerState.ABSENT:
            self._end(EX_OK, "stopped", do)
            return
        if first:
            do(TellManager(Condition.STOPPING))
            if self.state is not WorkerState.KILLED:
                self._become(WorkerState.ENDING)
        do(SignalWorker(number))

    def _orphan(self, now: float, do: Do) -> None:
        self._orphaned = True
        if self.state is WorkerState.ABSENT:
            self._end(EX_AGAIN, "the process that started this one is gone", do)
            return
        if self.state in (WorkerState.STARTING, WorkerState.SERVING):
            self._become(WorkerState.ENDING)
        if self.state is not WorkerState.KILLED:
            self._kill_due = now + GRACE_S
            do(SignalWorker(ORPHANED))

    def _end(self, code: int, reason: str, do: Do) -> None:
        self._over = True
        self._start_due = None
        do(Exit(code, reason))

    def _become(self, state: WorkerState) -> None:
        self.state = become(WORKER_MOVES, self.state, state)
