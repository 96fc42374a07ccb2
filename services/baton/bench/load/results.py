"""What a result file holds. A result without its conditions cannot be made, written or read.

Decides the format (JSON, one file a result) and which conditions must be known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from baton.bench.figures import at_share

FORMAT = 1
#: Shares of a distribution that are kept for the plots.
CURVE = (*(n / 50 for n in range(50)), 0.99, 0.995, 0.999, 1.0)


class ResultError(ValueError):
    """A result that cannot be kept or read; the text says why."""


class Spread(msgspec.Struct, frozen=True):
    """A distribution of times, in milliseconds. All zero when there was none (``count`` is 0)."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    curve: tuple[float, ...] = ()
    """At the shares of ``CURVE``."""


def spread(values_s: Sequence[float]) -> Spread:
    """Return the distribution of times given in seconds (quantiles by nearest rank)."""
    if not values_s:
        return Spread()
    ordered = sorted(values_s)
    p50, p95, p99 = (_ms(at_share(ordered, share)) for share in (0.5, 0.95, 0.99))
    return Spread(
        count=len(ordered),
        mean=_ms(sum(ordered) / len(ordered)),
        p50=p50,
        p95=p95,
        p99=p99,
        max=_ms(ordered[-1]),
        curve=tuple(_ms(at_share(ordered, share)) for share in CURVE),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


class Slo(msgspec.Struct, frozen=True):
    """What a good request meets."""

    ttft_ms: float
    gap_ms: float
    """Of its own p99 gap between two pieces."""


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met an SLO."""

    slo: Slo
    good: int
    attainment: float
    """Of all requests of the window: failed, refused and unfinished ones did not meet it."""
    per_s: float


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request of the window."""

    at_s: float
    """When it was due, after the window's begin."""
    state: str
    """``ok``, ``failed``, ``refused`` or ``unfinished``."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float
    gap_p99_ms: float
    e2e_ms: float
    intruder: bool


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """A piece of the time line."""

    at_s: float
    tokens_per_s: float
    gap_p99_ms: float
    gap_max_ms: float


class ServerFigures(msgspec.Struct, frozen=True):
    """What Baton says of the window in its metrics."""

    handovers: int
    handover_bytes: int
    handover_ms: float
    """Mean."""
    handover_share_of_ttft: float
    prefix_hit_share: float
    """Of the prompt tokens looked up."""
    queue_ms: float
    """Mean."""
    queue_p99_ms: float
    """The upper edge of the bucket it is in."""
    refusals: Mapping[str, int]
    preemptions: int
    cpu_cores: Mapping[str, float]
    """By worker: cores used on average."""
    forecast_errors: Mapping[str, int] = {}
    """First tokens by how far they were from their forecast, as its share: the upper edges of
    buckets, and how many lie in each (adaptive mode)."""


class GeneratorFigures(msgspec.Struct, frozen=True):
    """What the generator itself did to the figures."""

    late: Spread
    """From a request's due time to its sending."""
    loop_lag: Spread
    cpu_cores: float
    connections: int
    in_flight_peak: int
    verdict: str
    """Empty: it was on time. Else what to think of the figures."""


class Figures(msgspec.Struct, frozen=True):
    """What one run measured."""

    seconds: float
    requests: int
    ok: int
    failed: int
    refused: int
    unfinished: int
    errors: Mapping[str, int]
    ttft: Spread
    """From sending to the first piece."""
    ttft_from_due: Spread
    """The same from the due time: the generator's lateness included."""
    itl: Spread
    """All gaps between consecutive pieces of all requests."""
    tpot: Spread
    """By request: from the first to the last piece, by the tokens after the first."""
    e2e: Spread
    requests_per_s: float
    output_tokens_per_s: float
    """Pieces that arrived in the window, counted in tokens."""
    prompt_tokens_per_s: float
    tokens_per_piece: float
    cached_share: float
    """Of the answered prompts' tokens, as the server counts them."""
    goodput: tuple[Goodput, ...]
    generator: GeneratorFigures
    server: ServerFigures | None = None


class Cost(msgspec.Struct, frozen=True):
    """What the server may use, to compare by."""

    unit: str
    """``core`` or ``price``."""
    amount: float
    told_by: str


class Run(msgspec.Struct, frozen=True):
    """One run of one server."""

    label: str
    settings: Mapping[str, Any]
    """What differs from the result's other runs."""
    figures: Figures
    cost: Cost
    others_cores: float
    """Cores that neither the server nor the generator used, on average: load by others."""
    rows: tuple[Row, ...]
    series: tuple[Moment, ...]
    long_prompt_tokens: int
    """From here on a prompt is marked as an intruding one in the plots."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything without which the numbers are none."""

    time: str
    server: Mapping[str, Any]
    """kind, version, address."""
    model: str
    dtype: str
    """And how weights are kept."""
    limits: Mapping[str, Any] | str
    """In words: of a server that only the user can ask."""
    cache_state: str
    workload: Mapping[str, Any]
    arrivals: Mapping[str, Any]
    concurrency: str
    hardware: Mapping[str, Any]
    pinning: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: str
    load: Mapping[str, Any]
    """Of the machine by others, during the run."""

    def missing(self) -> list[str]:
        """Return the names of what nobody told."""
        return [name for name in self.__struct_fields__ if not getattr(self, name)]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One result file."""

    format: int = FORMAT
    kind: str
    """``run``, ``search`` or ``modes``."""
    title: str
    conditions: Conditions
    runs: tuple[Run, ...]
    aborted: bool = False
    """A part of what was to be measured: ended by hand, or by the time it was given."""
    findings: Mapping[str, Any] = {}
    """What a search or a comparison found beyond its runs."""
    notes: tuple[str, ...] = ()


def write(path: Path, result: Result) -> None:
    """Write the file, whole or not at all.

    Raises:
        ResultError: a condition is missing.
    """
    if missing := result.conditions.missing():
        raise ResultError(f"a result without its conditions is none; missing: {', '.join(missing)}")
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(msgspec.json.encode(result) + b"\n")
    fresh.replace(path)


def read(path: Path) -> Result:
    """Read a file.

    Raises:
        ResultError: it is none, or of another format.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ResultError(f"{path} is no result of `baton bench`: {error}") from error
    if found.format != FORMAT:
        raise ResultError(f"{path} has format {found.format}; this version reads {FORMAT}")
    if missing := found.conditions.missing():
        raise ResultError(f"{path} lacks conditions: {', '.join(missing)}")
    return found
