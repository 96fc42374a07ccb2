"""Arithmetic of the comparison: from arrivals to figures, and medians over runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from baton.bench.figures import quantile
from baton.bench.load.answer import Answer

Value = float | bool
Figures = dict[str, Value]


def rate(answers: Sequence[Answer]) -> float:
    """Return tokens per second of all streams together, while all of them were running.

    The window reaches from the last stream's first piece to the first stream's last one; pieces
    within it count as many tokens as that stream's pieces have on average.
    """
    begin = max(answer.arrivals[0] for answer in answers)
    end = min(answer.arrivals[-1] for answer in answers)
    if end <= begin:
        return float("nan")
    tokens = sum(
        sum(begin < arrival <= end for arrival in answer.arrivals) * _tokens_per_piece(answer)
        for answer in answers
    )
    return tokens / (end - begin)


def tokens_per_piece(answers: Sequence[Answer]) -> float:
    """Return how many tokens a piece holds on average; 1.0 from a server that never lagged."""
    return sum(r.tokens for r in answers) / sum(len(r.arrivals) for r in answers)


def spread(gaps_s: Sequence[float]) -> Figures:
    """Return p50, p99, p99.9 and max in milliseconds."""
    shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {name: round(quantile(gaps_s, share) * 1e3, 1) for name, share in shares.items()}


def waited(sent: Sequence[float], came: Sequence[float | None], end: float) -> Figures:
    """Return the median wait in seconds of requests, some of which had no answer by ``end``.

    Those count as having waited until then: ``at_least`` says that the median is such a one, so
    that it is a lower bound.
    """
    waits = sorted(
        (end - begin, True) if first is None else (first - begin, False)
        for begin, first in zip(sent, came, strict=True)
    )
    if not waits:
        return {"p50": float("nan"), "at_least": False, "sent": 0, "answered": 0}
    value, unanswered = waits[(len(waits) - 1) // 2]
    return {
        "p50": round(value, 2),
        "at_least": unanswered,
        "sent": len(waits),
        "answered": sum(first is not None for first in came),
    }


def medians(runs: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return figure for figure the median over runs; of ``max`` the largest, of flags any."""
    found: dict[str, object] = {}
    for key, first in runs[0].items():
        values = [run[key] for run in runs]
        if isinstance(first, Mapping):
            found[key] = medians([value for value in values if isinstance(value, Mapping)])
        elif isinstance(first, bool):
            found[key] = any(values)
        else:
            numbers = [float(value) for value in values if isinstance(value, int | float)]
            found[key] = round(max(numbers) if key == "max" else median(numbers), 3)
    return found


def _tokens_per_piece(answer: Answer) -> float:
    return answer.tokens / len(answer.arrivals) if answer.tokens else 1.0
