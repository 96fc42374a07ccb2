"""The guard: the process that supervisor starts, which forks the worker and watches over it.

It has imported what is heavy and mapped the weights, so that the next incarnation of a killed
worker serves in a fraction of a second. It opens no arena, no socket and no event loop, and has one
thread: nothing of an incarnation can reach the next one. What is done when is decided in
``baton.runtime.guarding``; here are the effects: fork, signals, the pulse.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, assert_never

from baton.ports.clock import Clock
from baton.ports.driving import Exit, Note
from baton.runtime import yielding
from baton.runtime.cores import Placement
from baton.runtime.guarding import (
    RESTART,
    Began,
    Command,
    Condition,
    Event,
    GuardMachine,
    HurryWorker,
    Looked,
    ParentGone,
    Renew,
    RestartAsked,
    SignalWorker,
    StartWorker,
    StopAsked,
    TellManager,
    WorkerEnded,
)
from baton.runtime.logs import FilteringBoundLogger
from baton.runtime.notify import Notifier
from baton.runtime.parent import TOLD_BY, Parent
from baton.runtime.prctl import die_with_parent, set_name
from baton.runtime.pulse import Pulse
from baton.runtime.service import EX_BUG
from baton.runtime.starvation import look_at
from baton.runtime.yielding import Yielding

#: Names, on its command line, the worker that a guard adopts.
OPTION = "--adopt"
#: How often systemd hears that the guard does its work.
ALIVE_S = 1.0
_STOPS = frozenset({signal.SIGTERM, signal.SIGINT})
_AWAITED = _STOPS | {signal.SIGCHLD, RESTART, TOLD_BY}

Live = Callable[[Pulse, bool], int]
"""The life of one worker, in its own process: its pulse, whether it yields until it is ready; its
exit code."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A worker that an older guard in this same process has forked."""

    pid: int
    pulse_fd: int

    @classmethod
    def parse(cls, text: str) -> Adopted:
        """Read what :meth:`option` wrote."""
        pid, fd = text.split(":")
        return cls(int(pid), int(fd))

    def option(self) -> str:
        """Return the command line option that tells the next guard."""
        return f"{OPTION}={self.pid}:{self.pulse_fd}"


class Guard:
    """One guard with at most one worker."""

    def __init__(
        self,
        worker_id: str,
        machine: GuardMachine,
        live: Live,
        *,
        parent: Parent,
        placement: Placement,
        rest: Placement,
        start: Yielding,
        notifier: Notifier,
        stop_s: float,
        log: FilteringBoundLogger,
        clock: Clock,
        usable: Collection[int],
        adopted: Adopted | None,
        alone: bool,
    ) -> None:
        """Guard a worker.

        Args:
            worker_id: names it.
            machine: decides.
            live: is the worker.
            parent: who started this process.
            placement: where the worker belongs.
            rest: where the guard belongs.
            start: how a worker's start yields.
            notifier: tells systemd.
            stop_s: how long a stop takes at most.
            log: the guard's.
            clock: the machine's.
            usable: the cores this process was given.
            adopted: a worker that runs already.
            alone: nobody of this cluster serves yet.
        """
        self._worker_id = worker_id
        self._machine = machine
        self._live = live
        self._parent = parent
        self._placement = placement
        self._rest = rest
        self._start = start
        self._notifier = notifier
        self._stop_s = stop_s
        self._log = log
        self._clock = clock
        self._usable = usable
        self._pulse = Pulse(adopted.pulse_fd if adopted else None)
        self._pid = adopted.pid if adopted else 0
        self._alone = alone
        self._alive_due = 0.0
        self._code: int | None = None

    def run(self) -> int:
        """Guard until the worker's end is final; return the exit code."""
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # "ignored" is inherited, and loses exit codes
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        # What is loaded lives as long as this process. A collection that looked at it would write
        # into every page of it, in each worker, and share it no longer.
        gc.collect()
        gc.freeze()
        # It has loaded; from here on a guard must be quick, whatever its worker does.
        yielding.end(os.getpid(), self._rest)
        self._feed(Began(adopts=bool(self._pid), alone=self._alone))
        while self._code is None:
            self._await_signal()
            if self._code is None and self._clock.now() >= self._machine.deadline():
                self._look()
        return self._code

    def _await_signal(self) -> None:
        left_s = max(0.0, self._machine.deadline() - self._clock.now())
        got = signal.sigtimedwait(_AWAITED, left_s)
        if got is None:
            return
        if got.si_signo == signal.SIGCHLD:
            self._reap()
        elif got.si_signo in _STOPS:
            self._feed(StopAsked(got.si_signo))
        elif got.si_signo == RESTART:
            self._feed(RestartAsked())

    def _look(self) -> None:
        self._reap()
        if self._code is None and self._parent.is_gone():
            self._parent = Parent(0)
            self._feed(ParentGone())
        if self._code is None:
            self._tell_alive()
            watches = self._pid and self._machine.watches
            threads = look_at(self._pid) if watches else ()
            pulse = self._pulse
            self._feed(Looked(pulse.last_beat, pulse.is_ready, self._pid, threads))

    def _tell_alive(self) -> None:
        if self._clock.now() >= self._alive_due:
            self._alive_due = self._clock.now() + ALIVE_S
            self._notifier.alive()

    def _reap(self) -> None:
        """Signals of one kind are merged: look whether it ended, whatever was heard."""
        if not self._pid:
            return
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self._pid = 0
            self._feed(WorkerEnded(os.waitstatus_to_exitcode(status)))

    # --- effects ----------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        for command in self._machine.handle(event, self._clock.now()):
            self._do(command)
        self._machine.check()

    def _do(self, command: Command) -> None:
        match command:
            case StartWorker(yields):
                self._fork(yields)
            case Renew():
                self._renew()
            case HurryWorker():
                yielding.end(self._pid, self._placement)
            case SignalWorker(number):
                # Not reaped yet, so the pid is still its own.
                os.kill(self._pid, number)
            case TellManager(condition):
                self._tell(condition)
            case Note(event, fields, level):
                getattr(self._log, level)(event, pid=self._pid or None, **fields)
            case Exit(code, reason):
                self._log.info("guard_ending", code=code, reason=reason)
                self._code = code
            case _:
                assert_never(command)

    def _tell(self, condition: Condition) -> None:
        match condition:
            case Condition.READY:
                self._notifier.ready("serving")
            case Condition.STOPPING:
                self._notifier.stopping(self._stop_s)
            case _:
                assert_never(condition)

    def _renew(self) -> None:
        """Begin anew with what is on disk now; the worker serves on meanwhile."""
        command = [word for word in sys.orig_argv if not word.startswith(f"{OPTION}=")]
        if self._pid:
            os.set_inheritable(self._pulse.fd, True)
            command.append(Adopted(self._pid, self._pulse.fd).option())
        self._log.info("guard_renewed", pid=self._pid or None)
        os.sched_setaffinity(0, self._usable)
        signal.setitimer(signal.ITIMER_REAL, 0)  # it would outlive this program and end the next
        # Signals stay blocked: what comes before the new guard listens is waiting for it then.
        os.execv(sys.executable, command)

    def _fork(self, yields: bool) -> None:
        threads = _thread_names()
        assert len(threads) == 1, f"something started threads, which no fork survives: {threads}"
        self._pulse.reset()
        sys.stdout.flush()
        sys.stderr.flush()
        guard = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_worker(guard, yields)
        self._pid = pid

    def _be_worker(self, guard: int, yields: bool) -> NoReturn:
        code = EX_BUG
        try:
            die_with_parent(signal.SIGKILL, guard)
            # A signal to the guard's group (Ctrl-C, a supervisor's stop) is the guard's to pass on.
            os.setpgid(0, 0)
            set_name(self._worker_id)
            for number in _STOPS:
                signal.signal(number, _leave)
            signal.signal(TOLD_BY, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
            if yields:
                self._start.begin()
            else:
                yielding.end(os.getpid(), self._placement)
            code = self._live(self._pulse, yields)
        except BaseException:  # the worker ends here, whatever happened: it must not become a guard
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: native threads of a numeric library may still be at work, and taking the
        # interpreter apart under them is how a clean end becomes a segmentation fault.
        os._exit(code)


def _leave(number: int, frame: object) -> None:
    os._exit(0)


def _thread_names() -> list[str]:
    tasks = Path("/proc/self/task")
    return [(task / "comm").read_text().strip() for task in tasks.iterdir()]
