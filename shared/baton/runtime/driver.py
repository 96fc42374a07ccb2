"""Feeds events into a machine and executes its commands: the one shell of every service.

Decides order: events are handled one after the other, and the commands of one event are all
executed, in order, before the next event is taken; nothing awaits in between, so nobody sees a
machine whose commands are half done. What only tells of it (log lines, metrics) comes last, in
order as well, when nothing more waits to be done: a message that others wait for does not wait for
a line in a log. Decides nothing a machine could decide.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from baton.core.events import TimePassed
from baton.core.machine import Machine
from baton.ports.clock import Clock
from baton.ports.driving import CallLedger, Exit, LedgerAnswered, Measure, Note, Send
from baton.ports.ledger import AnyOp, Conflict, Ledger, Reply, Unavailable
from baton.ports.transport import Transport
from baton.runtime.logs import FilteringBoundLogger
from baton.runtime.metrics import Metrics

#: A machine that leaves its deadline where it was is asked again no faster than this.
_SPIN_S = 0.001

Executor = Callable[[Any], None]


class Crash(Protocol):
    """The process's one crash barrier: logs the error and ends the process with status 70."""

    def __call__(self, error: BaseException, during: str) -> None: ...


class Driver:
    """One per process, on the event loop's thread."""

    def __init__(
        self,
        machine: Machine[Any, Any],
        *,
        transport: Transport,
        ledger: Ledger,
        metrics: Metrics,
        log: FilteringBoundLogger,
        clock: Clock,
        executors: Mapping[type, Executor],
        end: Callable[[int, str], None],
        crash: Crash,
        check: bool | None = None,
    ) -> None:
        """Drive ``machine``.

        Args:
            machine: the service's decisions.
            transport: executes :class:`Send`.
            ledger: executes :class:`CallLedger`.
            metrics: executes :class:`Measure`.
            log: executes :class:`Note`.
            clock: read once an event.
            executors: for the service's own commands, by their type.
            end: executes :class:`Exit`: begins the orderly end of the process.
            crash: called when the machine or an executor raises.
            check: assert the machine's invariants after each event; ``$BATON_CHECK`` by default.
        """
        self._machine = machine
        self._transport = transport
        self._ledger = ledger
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._end = end
        self._crash = crash
        self._check = bool(os.environ.get("BATON_CHECK")) if check is None else check
        self._told: deque[Note | Measure] = deque()
        """Done, and not yet told."""
        self._executors: dict[type, Executor] = {
            Send: lambda command: transport.send(command.peer, command.message),
            CallLedger: lambda command: self._ask(command.op),
            Note: self._told.append,
            Measure: self._told.append,
            Exit: self._exit,
            **executors,
        }
        self._loop = asyncio.get_running_loop()
        self._queue: deque[object] = deque()
        self._handling = False
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for: float | None = None
        self._fired_for: float | None = None

    def begin(self) -> None:
        """Mind the deadline that the machine has before its first event."""
        self._arm()

    def feed(self, event: object) -> None:
        """Handle ``event``, now, or after the one that is being handled."""
        if self._stopped:
            return
        self._queue.append(event)
        if self._handling:
            return
        self._handling = True
        current: object = event
        try:
            while self._queue and not self._stopped:
                current = self._queue.popleft()
                self._handle(current)
            self._arm()
            self._tell()
        except Exception as error:  # the crash barrier: a bug ends the process
            self._stopped = True
            self._tell_before(error)
            self._crash(error, type(current).__name__)
        finally:
            self._handling = False

    def stop(self) -> None:
        """Take no more events."""
        self._stopped = True
        self._queue.clear()
        self._disarm()

    def _handle(self, event: object) -> None:
        for command in self._machine.handle(event, self._clock.now()):
            executor = self._executors.get(type(command))
            assert executor is not None, f"nobody executes {type(command).__name__}"
            executor(command)
        if self._check:
            self._machine.check()

    # --- the commands every service has ---------------------------------------------------------

    def _tell(self) -> None:
        while self._told:
            self._tell_one(self._told.popleft())

    def _tell_one(self, command: Note | Measure) -> None:
        if isinstance(command, Note):
            getattr(self._log, command.level)(command.event, **command.fields)
        else:
            self._metrics.measure(command.name, command.value, command.labels)

    def _tell_before(self, error: Exception) -> None:
        """Tell what led to ``error``, as far as that can be told: one of these may be the bug
        itself (a metric that is in no catalogue, a field that cannot be written), or the log may be
        gone. What cannot be told is named in the trace of the error, and hides none of the rest."""
        while self._told:
            command = self._told.popleft()
            try:
                self._tell_one(command)
            except Exception as trouble:  # part of the crash barrier, which has an end
                name = command.event if isinstance(command, Note) else command.name
                error.add_note(f"not told before: {name}: {type(trouble).__name__}: {trouble}")

    def _exit(self, command: Exit) -> None:
        self.stop()
        self._end(command.code, command.reason)

    def _ask(self, op: AnyOp) -> None:
        name = {"op": type(op).__name__}
        asked = self._clock.now()
        self._metrics.measure("ledger_calls_total", labels=name)

        def answered(reply: Reply | Unavailable) -> None:
            self._metrics.measure("ledger_call_seconds", self._clock.now() - asked)
            if isinstance(reply, Unavailable):
                self._metrics.measure("ledger_unavailable_total", labels=name)
            elif isinstance(reply, Conflict):
                self._metrics.measure("ledger_conflicts_total", labels=name)
            self.feed(LedgerAnswered(op, reply))

        self._ledger.call(op, answered)

    # --- the one timer --------------------------------------------------------------------------

    def _arm(self) -> None:
        deadline = None if self._stopped else self._machine.deadline()
        if deadline is None:
            self._disarm()
            return
        if self._timer is not None and deadline == self._armed_for:
            return
        self._disarm()
        self._armed_for = deadline
        least = _SPIN_S if deadline == self._fired_for else 0.0
        self._timer = self._loop.call_later(
            max(least, deadline - self._clock.now()), self._tick, deadline
        )

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._armed_for = None

    def _tick(self, due: float) -> None:
        self._timer = self._armed_for = None
        if due > self._clock.now():
            # The loop's clock ran ahead of the machine's by a rounding; wait for the rest.
            self._arm()
            return
        self._fired_for = due
        self.feed(TimePassed())
