"""The one thread in which a worker computes, so that a long step never delays a heartbeat.

Decides that work runs in the order it was given, one at a time. When a step counts as hung is the
machines' decision; they know when it began.
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

    def tell(self, event: object) -> None:
        """Feed ``event`` while the work goes on; called by the work itself."""
        self._hand_over(self._feed, event)

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
