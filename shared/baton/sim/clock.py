"""Virtual time: one queue of callbacks, one seeded source of chance.

Decides the order in which things happen in a simulation: by time, then by the order in which they
were asked for, so the same seed gives the same run. It knows nothing of what it runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

#: Where every run begins. Not zero, so that a forgotten time stands out.
EPOCH_S = 1_000.0


class Handle:
    """One callback that is due; cancelling it twice, or after it ran, does nothing."""

    __slots__ = ("_fn", "due")

    def __init__(self, due: float, fn: Callable[[], None]) -> None:
        self.due = due
        self._fn: Callable[[], None] | None = fn

    @property
    def pending(self) -> bool:
        """Whether it is still going to run."""
        return self._fn is not None

    def cancel(self) -> None:
        self._fn = None

    def run(self) -> None:
        """Run the callback, once. Called by the clock."""
        fn, self._fn = self._fn, None
        if fn is not None:
            fn()


class VirtualClock:
    """Time that moves only when the next callback is taken (``baton.ports.clock.Clock``).

    ``random`` is the run's only source of chance. An exception in a callback leaves ``run_until``
    as it is: a bug in a simulated process ends the simulation.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.random = Random(seed)
        self._now = EPOCH_S
        self._order = 0
        #: (due, order, handle): the order is unique, so that handles are never compared.
        self._queue: list[tuple[float, int, Handle]] = []

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def call_at(self, time: float, fn: Callable[[], None]) -> Handle:
        """Run ``fn`` at ``time``; a time in the past means at once, after what is already due."""
        self._order += 1
        handle = Handle(max(time, self._now), fn)
        heapq.heappush(self._queue, (handle.due, self._order, handle))
        return handle

    def call_later(self, delay: float, fn: Callable[[], None]) -> Handle:
        """Run ``fn`` ``delay`` seconds from now."""
        return self.call_at(self._now + delay, fn)

    def call_soon(self, fn: Callable[[], None]) -> Handle:
        """Run ``fn`` at the present time, after everything else that is already due."""
        return self.call_at(self._now, fn)

    def next_due(self) -> float | None:
        """Return the time of the next callback, ``None`` if nothing is due any more."""
        while self._queue and not self._queue[0][2].pending:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def step(self) -> bool:
        """Run the next callback; return whether there was one."""
        due = self.next_due()
        if due is None:
            return False
        _, _, handle = heapq.heappop(self._queue)
        self._now = due
        handle.run()
        return True

    def run_until(self, time: float) -> None:
        """Run all callbacks due up to and at ``time``, those they add included; end there."""
        while (due := self.next_due()) is not None and due <= time:
            self.step()
        self._now = max(self._now, time)

    def run_for(self, seconds: float) -> None:
        """Run all callbacks of the next ``seconds``."""
        self.run_until(self._now + seconds)

    def run_while(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Run until ``condition`` no longer holds, at most ``seconds``; return whether it fell."""
        end = self._now + seconds
        while condition():
            due = self.next_due()
            if due is None or due > end:
                self._now = max(self._now, end)
                return False
            self.step()
        return True
