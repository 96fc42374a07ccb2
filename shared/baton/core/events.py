"""Events every machine knows. What only one service knows stands in that service's package."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.lifecycles import LeaseState


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The machine's own deadline was reached."""


@dataclass(frozen=True, slots=True)
class LeaseChanged:
    """This process's lease moved."""

    state: LeaseState


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """SIGTERM or the drain command: take nothing new, finish what runs."""


@dataclass(frozen=True, slots=True)
class RoleLeft:
    """Another machine takes this one's place in the worker: as :class:`DrainRequested`, and end
    with ``EXIT_ROLE``."""


@dataclass(frozen=True, slots=True)
class PromptsTaken:
    """A decode worker computes prompts itself from now on where that is better, or no longer."""

    mixed: bool


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """SIGUSR2: a successor starts as soon as this process has ended. End where it can go on."""
