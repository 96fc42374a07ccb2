"""The one thread in which a worker computes, so that a long step never delays a heartbeat.

Decides that work runs in the order it was given, one at a time, and when it counts as hung.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue

from baton.ports.clock import Clock
from baton.runtime.driver import Crash

Work = Callable[[], object]


class EngineThread:
    """Runs work and feeds what it returns, an event, back on the loop's thread."""

    def __init__(
        self,
        feed: Callable[[object], None],
        crash: Crash,
        clock: Clock,
        *,
        name: str = "engine",
    ) -> None:
        """Start the thread; made on the event loop's thread.

        Args:
            feed: takes the events; the driver's.
            crash: called on the loop's thread when work raises: what an engine may fail with is
                the caller's to catch and to return as an event, so anything else is a bug.
            clock: for the age of the step in flight.
            name: of the thread.
        """
        self._feed = feed
        self._crash = crash
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._started: tuple[int, float] | None = None
        self._count = 0
        # A daemon: a step that hangs in native code must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        """Queue ``work``; its result is fed as an event, ``None`` is not."""
        self._work.put(work)

    def in_flight(self) -> tuple[int, float] | None:
        """Return number and age in seconds of the work that runs now."""
        started = self._started
        return None if started is None else (started[0], self._clock.now() - started[1])

    async def stop(self, timeout_s: float) -> bool:
        """Let queued work finish; return whether the thread ended in time."""
        self._work.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._count += 1
            self._started = (self._count, self._clock.now())
            try:
                event = work()
            except BaseException as error:  # handed to the process's crash barrier
                self._hand_over(self._crash, error, "engine thread")
                return
            self._started = None
            if event is not None:
                self._hand_over(self._feed, event)

    def _hand_over(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: the process ends while this thread computed.
            assert self._loop.is_closed()


class HungWatch:
    """Calls ``hung`` once when one piece of work has been in flight for too long.

    Time is counted in ticks of the loop and not by a clock: a process that was frozen, or a laptop
    that slept, has not computed for that long.
    """

    TICK_S = 0.25

    def __init__(self, thread: EngineThread, limit_s: float, hung: Callable[[float], None]) -> None:
        self._thread = thread
        self._limit_s = limit_s
        self._hung = hung
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._ticks = 0
        self._timer = self._loop.call_later(self.TICK_S, self._tick)

    def stop(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _tick(self) -> None:
        flight = self._thread.in_flight()
        number = 0 if flight is None else flight[0]
        self._ticks = self._ticks + 1 if number and number == self._number else 0
        self._number = number
        if self._ticks * self.TICK_S >= self._limit_s:
            self._hung(self._ticks * self.TICK_S)
            return
        self._timer = self._loop.call_later(self.TICK_S, self._tick)
