"""From what a run brought to its figures.

Decides what every figure means: which requests belong to the window (those due in it), which tokens
(those that arrived in it), what a good request is, and when the generator was too late to be
believed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil

from baton.bench.figures import quantile
from baton.bench.load.generator import Asked, Measured
from baton.bench.load.results import (
    Figures,
    GeneratorFigures,
    Goodput,
    Moment,
    Row,
    ServerFigures,
    Slo,
    Spread,
    spread,
)

MOMENTS_MAX = 240
#: A generator later than this (p99) has measured itself: the larger of both bounds.
LATE_MS = 5.0
LATE_SHARE_OF_TTFT = 0.05


def forecast_errors(servers: Iterable[ServerFigures]) -> tuple[int, float, float]:
    """Return how many first tokens were forecast, and the median and p90 of the errors as shares.

    Both are the upper edges of the buckets they lie in; 0 where nothing was forecast.
    """
    counts: Counter[float] = Counter()
    for each in servers:
        counts.update({float(edge): count for edge, count in each.forecast_errors.items()})
    edges = [edge for edge in sorted(counts) for _ in range(counts[edge])]
    if not edges:
        return 0, 0.0, 0.0
    median, p90 = (edges[ceil(share * len(edges)) - 1] for share in (0.5, 0.9))
    return len(edges), median, p90


def window(measured: Measured) -> list[Asked]:
    """Return the requests that count."""
    return [asked for asked in measured.asked if asked.due_at >= measured.began_at]


def state(asked: Asked) -> str:
    """Return what became of a request."""
    answer = asked.answer
    if answer is None or not answer.ended_at:
        return "unfinished"
    if answer.ok:
        return "ok"
    return "refused" if answer.refused else "failed"


def figures(
    measured: Measured,
    slos: Sequence[Slo],
    *,
    connections: int,
    generator_cpu_cores: float,
    server: ServerFigures | None,
) -> Figures:
    """Return the figures of the window."""
    asked = window(measured)
    states = Counter(state(each) for each in asked)
    good = [(each, each.answer) for each in asked if state(each) == "ok" and each.answer]
    seconds = max(measured.ended_at - measured.began_at, 1e-9)
    ttft = spread([a.arrivals[0] - a.sent_at for _, a in good])
    arrived = Counter[str]()
    for each in measured.asked:
        if (answer := each.answer) is None or not answer.arrivals:
            continue
        in_window = sum(measured.began_at <= at < measured.ended_at for at in answer.arrivals)
        arrived["output"] += in_window
        arrived["tokens"] += round(in_window * answer.tokens / len(answer.arrivals))
        if measured.began_at <= answer.arrivals[0] < measured.ended_at:
            arrived["prompt"] += answer.prompt_tokens or each.prompt_tokens
        arrived["ended"] += answer.ok and measured.began_at <= answer.ended_at < measured.ended_at
    late = spread([each.late_s for each in asked])
    prompts = sum(a.prompt_tokens or each.prompt_tokens for each, a in good)
    found = rows(measured)
    return Figures(
        seconds=round(seconds, 3),
        requests=len(asked),
        ok=states["ok"],
        failed=states["failed"],
        refused=states["refused"],
        unfinished=states["unfinished"],
        errors=_errors(asked),
        ttft=ttft,
        ttft_from_due=spread([a.arrivals[0] - each.due_at for each, a in good]),
        itl=spread([gap for _, a in good for gap in gaps(a.arrivals)]),
        tpot=spread(
            [
                (a.arrivals[-1] - a.arrivals[0]) / (a.tokens - 1)
                for _, a in good
                if a.tokens > 1 and len(a.arrivals) > 1
            ]
        ),
        e2e=spread([a.ended_at - a.sent_at for _, a in good]),
        requests_per_s=round(arrived["ended"] / seconds, 4),
        output_tokens_per_s=round(arrived["tokens"] / seconds, 2),
        prompt_tokens_per_s=round(arrived["prompt"] / seconds, 2),
        tokens_per_piece=round(arrived["tokens"] / max(1, arrived["output"]), 3),
        cached_share=round(sum(a.cached_tokens or 0 for _, a in good) / max(1, prompts), 4),
        goodput=tuple(goodput(found, slo, seconds) for slo in slos),
        generator=GeneratorFigures(
            late=late,
            loop_lag=spread(measured.lags),
            cpu_cores=round(generator_cpu_cores, 4),
            connections=connections,
            in_flight_peak=measured.in_flight_peak,
            verdict=verdict(late, ttft),
        ),
        server=server,
    )


def verdict(late: Spread, ttft: Spread) -> str:
    """Say whether the generator was late enough to spoil the figures; empty: it was not."""
    bound = max(LATE_MS, LATE_SHARE_OF_TTFT * ttft.p50)
    if late.p99 <= bound:
        return ""
    return (
        f"the generator was late itself: p99 {late.p99:.1f} ms, more than {bound:.1f} ms. "
        "Its requests came in other numbers than asked for (coordinated omission): believe "
        "ttft_from_due, not ttft, and give it a core of its own"
    )


def rows(measured: Measured) -> tuple[Row, ...]:
    """Return one row for each request of the window."""
    return tuple(_row(asked, measured.began_at) for asked in window(measured))


def _row(asked: Asked, began_at: float) -> Row:
    answer, found = asked.answer, state(asked)
    at_s = round(asked.due_at - began_at, 4)
    if answer is None or not answer.arrivals:
        return Row(at_s, found, asked.prompt_tokens, 0, 0, 0.0, 0.0, 0.0, asked.intruder)
    between = gaps(answer.arrivals)
    return Row(
        at_s,
        found,
        answer.prompt_tokens or asked.prompt_tokens,
        answer.cached_tokens or 0,
        answer.tokens,
        round((answer.arrivals[0] - answer.sent_at) * 1e3, 3),
        round(quantile(between, 0.99) * 1e3, 3) if between else 0.0,
        round(max(0.0, answer.ended_at - answer.sent_at) * 1e3, 3),
        asked.intruder,
    )


def goodput(found: Iterable[Row], slo: Slo, seconds: float) -> Goodput:
    """Return how many requests met both bounds; intruders are load, and do not count."""
    counted = [row for row in found if not row.intruder]
    good = sum(is_good(row, slo) for row in counted)
    attainment = round(good / len(counted), 4) if counted else 0.0
    return Goodput(slo, good, attainment, round(good / seconds, 4))


def is_good(row: Row, slo: Slo) -> bool:
    """Whether a request was answered, with its TTFT and its own p99 gap within the bounds."""
    return row.state == "ok" and row.ttft_ms <= slo.ttft_ms and row.gap_p99_ms <= slo.gap_ms


def gaps(arrivals: Sequence[float]) -> list[float]:
    """Return the seconds between consecutive pieces."""
    return [b - a for a, b in pairwise(arrivals)]


def series(measured: Measured) -> tuple[Moment, ...]:
    """Return the time line of the window, in at most ``MOMENTS_MAX`` parts of >= 0.5 s."""
    seconds = measured.ended_at - measured.began_at
    if seconds <= 0:
        return ()
    step = max(0.5, seconds / MOMENTS_MAX)
    parts: list[list[float]] = [[] for _ in range(int(seconds / step) + 1)]
    counts = [0] * len(parts)
    for asked in measured.asked:
        arrivals = asked.answer.arrivals if asked.answer else []
        for before, at in zip([None, *arrivals], arrivals, strict=False):
            if measured.began_at <= at < measured.ended_at:
                place = int((at - measured.began_at) / step)
                counts[place] += 1
                if before is not None:
                    parts[place].append(at - before)
    return tuple(
        Moment(
            round(place * step, 3),
            round(counts[place] / step, 2),
            round(quantile(part, 0.99) * 1e3, 3) if part else 0.0,
            round(max(part) * 1e3, 3) if part else 0.0,
        )
        for place, part in enumerate(parts)
        if (place + 1) * step <= seconds + 1e-9
    )


def _errors(asked: Iterable[Asked]) -> dict[str, int]:
    """Return the commonest errors' words and their numbers."""
    words = Counter(each.answer.error for each in asked if each.answer and each.answer.error)
    return dict(words.most_common(10))
