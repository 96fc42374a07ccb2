"""What a machine is: decisions as a function of events.

A machine never reads a clock, opens a socket or draws a random number. It gets what happened and
the time, and answers with what is to be done, in order. The same object runs under the asyncio
driver (``baton.runtime.driver``) and under the simulator (``baton.sim``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

E_contra = TypeVar("E_contra", contravariant=True)
C_co = TypeVar("C_co", covariant=True)


class Machine(Protocol[E_contra, C_co]):
    """A pure state machine.

    ``now`` is seconds on the process's monotonic clock (CLOCK_BOOTTIME in production).
    """

    def handle(self, event: E_contra, now: float) -> Sequence[C_co]:
        """Take one event; return the commands to execute, in order, before the next event."""
        ...

    def deadline(self) -> float | None:
        """Return the time of the next :class:`baton.core.events.TimePassed` it needs, if any."""
        ...

    def check(self) -> None:
        """Assert every invariant; an ``AssertionError`` is a bug and ends the process."""
        ...
