"""When requests come: the gaps between arrivals of an open loop.

Decides the processes; every one is a function of its random generator alone, so a seed repeats it.
Burstiness is the shape of the gamma distribution, as in vLLM's benchmark: 1 is Poisson, less is
burstier (the gaps' coefficient of variation is its inverse square root), more is smoother.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

from numpy.random import Generator

from baton.bench.load.traces import Window

WINDOW_S = 600.0


class Arrivals(StrEnum):
    """How requests come."""

    CLOSED = "closed"
    """So many at once; the next one is asked when one was answered."""
    POISSON = "poisson"
    GAMMA = "gamma"
    TRACE = "trace"
    """The trace's own times, stretched to the wanted mean rate."""


def gamma_times(rate: float, burstiness: float, chance: Generator) -> Iterator[float]:
    """Yield arrival times in seconds, endlessly, at a mean ``rate`` a second."""
    at = 0.0
    while True:
        at += float(chance.gamma(burstiness, 1.0 / (rate * burstiness)))
        yield at


def trace_times(times: Sequence[float], rate: float | None) -> Iterator[float]:
    """Yield the trace's times, stretched to a mean ``rate`` (as they are without), lap after lap.

    A lap begins one mean gap after the last arrival of the one before.
    """
    span, factor = _span(times), stretch(times, rate)
    lap = 0
    while True:
        for at in times:
            yield (lap * span + at - times[0]) * factor
        lap += 1


def stretch(times: Sequence[float], rate: float | None) -> float:
    """Return by how much the trace's time is stretched: 10 means ten times slower."""
    return 1.0 if rate is None else len(times) / _span(times) / rate


def window_stretch(windows: Sequence[Window], rate: float | None) -> float:
    """Return by how much the windows' time is stretched."""
    return 1.0 if rate is None else sum(window.rate for window in windows) / len(windows) / rate


def _span(times: Sequence[float]) -> float:
    """Return the seconds of a lap, so that its mean rate is requests by seconds."""
    return (times[-1] - times[0]) * len(times) / (len(times) - 1)


def window_times(
    windows: Sequence[Window], first: int, rate: float | None, chance: Generator
) -> Iterator[float]:
    """Yield arrivals with each window's own rate and variation, stretched to a mean ``rate``.

    Stretched time passes through the windows more slowly: what a window holds stays in it.
    """
    factor = window_stretch(windows, rate)
    at, number = 0.0, 0
    while True:
        window = windows[(first + number) % len(windows)]
        shape = window.variation**-2
        at += float(chance.gamma(shape, 1.0 / (window.rate * shape)))
        number = int(at / WINDOW_S)
        yield at * factor
