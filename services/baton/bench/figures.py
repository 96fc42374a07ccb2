"""Quantiles and tables. Decides how figures are rounded and laid out, not what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of ``values`` do not exceed."""
    if not values:
        return float("nan")
    return at_share(sorted(values), share)


def at_share(ordered: Sequence[float], share: float) -> float:
    """Return a quantile (nearest rank) of sorted values, of which there is at least one."""
    rank = max(1, -(-int(share * 1_000_000) * len(ordered) // 1_000_000))
    return ordered[min(rank, len(ordered)) - 1]


def gaps_within(streams: Iterable[Sequence[float]], begin: float, end: float) -> list[float]:
    """Return the gaps between neighbours of one stream's arrivals, both within ``begin..end``."""
    return [
        after - before
        for arrivals in streams
        for before, after in pairwise(arrivals)
        if begin <= before and after <= end
    ]


def spread_ms(values: Sequence[float]) -> dict[str, float]:
    """Return count, p50, p95, p99 and max of seconds, in milliseconds."""
    return {
        "count": len(values),
        "p50": round(quantile(values, 0.5) * 1e3, 3),
        "p95": round(quantile(values, 0.95) * 1e3, 3),
        "p99": round(quantile(values, 0.99) * 1e3, 3),
        "max": round(max(values, default=float("nan")) * 1e3, 3),
    }


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
