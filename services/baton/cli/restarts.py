"""When a process that ended is started again.

Decides which of the supervisor's programs (guards of workers, and the ledger) are started again and
when, purely; how long the pauses are is `baton.core.pauses`. It looks at states, not at events, so
that a lost event or a restart of the listener loses no process. `baton.cli.restarter` is its shell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.pauses import FINAL_CODES, STEADY_S, pause_s


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process as supervisor reports it."""

    name: str
    """``group:name``, as supervisor wants it back."""
    state: str
    exit_code: int
    """-1 when a signal ended it."""
    started: int
    """Seconds; only differences are used."""
    stopped: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Something to tell the operator: a process is down, and what will be done."""

    name: str
    exit_code: int
    failures: int
    restart_in_s: float | None
    """``None``: it stays down."""


_NEVER = (-1, -1)


@dataclass(slots=True)
class _Track:
    failures: int = 0
    seen: tuple[int, int] = _NEVER
    due: float | None = None


class RestartPolicy:
    """Remembers each process's failures; all methods are pure in (states, now)."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}

    def observe(self, states: Iterable[ProcessState], now: float) -> list[Ended]:
        """Take all processes' states; return what is news."""
        news = []
        for state in states:
            track = self._tracks.setdefault(state.name, _Track())
            if state.state not in {"EXITED", "FATAL"}:
                track.due = None
                continue
            run = (state.started, state.stopped)
            if run == track.seen:
                continue
            track.seen = run
            news.append(self._ended(state, track, now))
        return news

    def take_due(self, now: float) -> list[str]:
        """Return the processes to start now; those that do not start count as ended again."""
        due = [name for name, t in self._tracks.items() if t.due is not None and t.due <= now]
        for name in due:
            # Supervisor's times are whole seconds, so the next run may look like the last one.
            self._tracks[name].seen = _NEVER
            self._tracks[name].due = None
        return due

    def deadline(self) -> float | None:
        """Return when :meth:`take_due` has something next."""
        return min((t.due for t in self._tracks.values() if t.due is not None), default=None)

    def _ended(self, state: ProcessState, track: _Track, now: float) -> Ended:
        if state.state == "EXITED" and state.exit_code in FINAL_CODES:
            track.failures, track.due = 0, None
            return Ended(state.name, state.exit_code, 0, None)
        steady = state.stopped - state.started >= STEADY_S
        track.failures = 1 if steady else track.failures + 1
        pause = pause_s(track.failures)
        track.due = now + pause
        return Ended(state.name, state.exit_code, track.failures, pause)
