"""What the runs of all ways say: each mode at its best, a break-even, one sentence of advice. Pure.

Decides what a mode's figure is. Of each way and rate it is the median of the repeats; a mode has
the best of its ways and rates. Taking the best of every single repeat would reward chance, and most
where most ways were tried. Modes are compared within a repeat, where they ran one after the other;
of these ratios the median counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from baton.bench.load import reckoning
from baton.bench.load.results import Run, Slo

SPLIT, COLOCATED, ADAPTIVE = "split", "colocated", "adaptive"
#: Multiples at which the break-even is looked for.
GRID = tuple(n / 10 for n in range(10, 61))
NOTHING = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Point:
    """One way at one rate."""

    mode: str
    way: str
    made_for_gap_ms: float | None
    rate: float

    def fits(self, slo: Slo) -> bool:
        """Whether it may be taken at this SLO: it was made for it, or for none."""
        return self.made_for_gap_ms in (None, slo.gap_ms)


Points = Mapping[Point, Sequence[Run]]


def points(runs: Iterable[Run]) -> Points:
    """Return the repeats of each way and rate."""
    found: dict[Point, list[Run]] = {}
    for run in runs:
        told = run.settings
        if "mode" in told:
            point = Point(told["mode"], told["way"], told["made_for_gap_ms"], told["rate"])
            found.setdefault(point, []).append(run)
    return found


def conclude(
    runs: Sequence[Run], slos: Sequence[Slo], itl_ms: float, multiples: Sequence[float]
) -> dict[str, Any]:
    """Return tables and advice."""
    found = points(runs)
    modes = list(dict.fromkeys(point.mode for point in found))
    values = {slo: {mode: of_mode(found, mode, slo) for mode in modes} for slo in slos}
    rates = sorted({point.rate for point in found})
    ratios = {
        (rate, slo): ratio
        for rate, slo in product(rates, slos)
        if (ratio := to_better_pure(found, slo, rate)) is not None
    }
    best = {
        f"{multiple:g}": {mode: value[0] for mode, value in values[slo].items()}
        for slo, multiple in zip(slos, multiples, strict=True)
    }
    unit = runs[0].cost.unit if runs else "core"
    even = None
    if {SPLIT, COLOCATED} <= set(modes):
        even = break_even(found, slos[0].ttft_ms, itl_ms)
    return {
        "undisturbed_itl_ms": itl_ms,
        "goodput_per_cost": best,
        "break_even_ms": "beyond what was looked at" if even == float("inf") else even,
        "tables": [
            {
                "title": f"goodput/s per {unit} at the best rate: median (least - most)",
                "columns": ["p99 gap within", *modes, "best"],
                "rows": [
                    [
                        f"{multiple:g} x = {slo.gap_ms:g} ms",
                        *(_cell(*values[slo][mode]) for mode in modes),
                        _best({mode: value[0] for mode, value in values[slo].items()}),
                    ]
                    for slo, multiple in zip(slos, multiples, strict=True)
                ],
            },
            {
                "title": "highest rate at which 90 % were good, sessions/s",
                "columns": ["p99 gap within", *modes],
                "rows": [
                    [f"{slo.gap_ms:g} ms", *(f"{highest_rate(found, m, slo):g}" for m in modes)]
                    for slo in slos
                ],
            },
            _by_rate(found, modes, slos, unit, ratios),
            *_forecasts(found),
            _ways(found),
        ],
        "advice": advice(best, [middle for middle, *_ in ratios.values()], even, itl_ms),
    }


def of_mode(found: Points, mode: str, slo: Slo, rate: float | None = None) -> Any:
    """Return goodput by cost at the best rate and way: median, least and most of the repeats.

    ``rate``: at this one alone.
    """
    every = [
        sorted(per_cost(run, slo) for run in runs)
        for point, runs in found.items()
        if point.mode == mode and point.fits(slo) and rate in (None, point.rate)
    ]
    spreads = [(median(values), values[0], values[-1]) for values in every]
    return max(spreads, default=NOTHING)


def highest_rate(found: Points, mode: str, slo: Slo, wanted: float = 0.9) -> float:
    """Return the highest rate tried that a mode bears, in the median; 0: none."""
    rates = [
        point.rate
        for point, runs in found.items()
        if point.mode == mode
        and point.fits(slo)
        and median(reckoning.goodput(run.rows, slo, run.figures.seconds).attainment for run in runs)
        >= wanted
    ]
    return max(rates, default=0.0)


def break_even(found: Points, ttft_ms: float, itl_ms: float) -> float:
    """Return the gap bound in ms up to which the split is at least as good as colocated.

    0: nowhere; infinite: everywhere on the grid of 1 to 6 times the undisturbed ITL. Where neither
    gives anything there is nothing to win.
    """
    wins = []
    for multiple in GRID:
        slo = Slo(ttft_ms, itl_ms * multiple)
        split, colocated = of_mode(found, SPLIT, slo)[0], of_mode(found, COLOCATED, slo)[0]
        wins.append(split >= colocated and split > 0)
    if not any(wins):
        return 0.0
    last = max(place for place, won in enumerate(wins) if won)
    return float("inf") if last == len(GRID) - 1 else round(itl_ms * GRID[last], 2)


def advice(
    best: Mapping[str, Mapping[str, float]],
    ratios: Sequence[float],
    even: float | None,
    itl_ms: float,
) -> str:
    """Return one sentence of advice.

    ``best``: goodput by multiple and mode; ``ratios``: adaptive to the better pure mode.
    """
    if not any(value for values in best.values() for value in values.values()):
        return (
            "No advice: at no rate was a request good at any of these bounds; try lower rates, "
            "looser bounds or longer runs."
        )
    if even is None:
        words = "Nothing was compared with colocated workers"
    elif even == 0:
        words = (
            "Do not split for this load: colocated workers with a tuned chunk are better at every "
            "gap bound that was looked at"
        )
    elif even == float("inf"):
        words = (
            "Split: at the loosest gap bound that was looked at it is still at least as good as "
            "tuned colocated workers"
        )
    else:
        words = (
            f"Split only where gaps must stay within {even:g} ms ({even / itl_ms:.1f} x the "
            "undisturbed ITL); where they may be longer, tuned colocated workers are better"
        )
    if ratios:
        words += (
            f"; the adaptive mode gave {min(ratios):.2f} to {max(ratios):.2f} of the better one of "
            "both, by rate and bound"
        )
    return words + "."


def to_better_pure(found: Points, slo: Slo, rate: float) -> tuple[float, float, float] | None:
    """Return adaptive goodput by that of the pure mode that is better here: median, least and most
    of the repeats. ``None``: there is nothing to compare.

    The better one is the pure way with the best median; a repeat in which it had nothing is left
    out.
    """
    there = {point: runs for point, runs in found.items() if point.rate == rate and point.fits(slo)}
    pure = [point for point in there if point.mode in (SPLIT, COLOCATED)]
    adaptive = [point for point in there if point.mode == ADAPTIVE]
    if not pure or not adaptive:
        return None
    better = max(pure, key=lambda point: median(per_cost(run, slo) for run in there[point]))
    theirs = {run.settings["repeat"]: per_cost(run, slo) for run in there[better]}
    ratios = [
        per_cost(run, slo) / their
        for run in there[adaptive[0]]
        if (their := theirs.get(run.settings["repeat"], 0.0)) > 0
    ]
    return (median(ratios), min(ratios), max(ratios)) if ratios else None


def tuned(found: Points, slo: Slo) -> str:
    """Return the way that was best at this SLO, of those of one mode that were tried.

    Where several meet the bound alike, the one that is good at more rates, then the quicker one:
    else the first of many that are good at a low rate would be taken for the best.
    """

    def worth(way: str) -> tuple[float, float, float]:
        runs = [run for point, some in found.items() if point.way == way for run in some]
        good = [per_cost(run, slo) for run in runs]
        return max(good), sum(good), -sum(run.figures.ttft.p50 for run in runs)

    return max(dict.fromkeys(point.way for point in found), key=worth)


def per_cost(run: Run, slo: Slo) -> float:
    """Return good requests a second by the cost."""
    return reckoning.goodput(run.rows, slo, run.figures.seconds).per_s / (run.cost.amount or 1.0)


def tuning_table(found: Points, slos: Sequence[Slo], mode: str) -> dict[str, Any]:
    """Return what each way that was tried gave."""
    ways = list(dict.fromkeys((point.way, point.rate) for point in found))
    return {
        "title": f"{mode}, tuned: goodput by cost and SLO",
        "columns": ["way", "rate", *(f"{slo.gap_ms:g} ms" for slo in slos)],
        "rows": [
            [
                way,
                f"{rate:g}",
                *(f"{per_cost(found[Point(mode, way, None, rate)][0], slo):.3g}" for slo in slos),
            ]
            for way, rate in ways
        ],
    }


# --- tables ---------------------------------------------------------------------------------------


def _by_rate(
    found: Points,
    modes: Sequence[str],
    slos: Sequence[Slo],
    unit: str,
    ratios: Mapping[tuple[float, Slo], tuple[float, float, float]],
) -> dict[str, Any]:
    """Return each mode's goodput at every rate, and what of the better pure mode adaptive gave."""
    rows = []
    for rate in sorted({point.rate for point in found}):
        for slo in slos:
            cells = [f"{of_mode(found, mode, slo, rate)[0]:.3g}" for mode in modes]
            ratio = ratios.get((rate, slo))
            rows.append(
                [f"{rate:g}/s", f"{slo.gap_ms:g} ms", *cells, _cell(*ratio) if ratio else "-"]
            )
    return {
        "title": f"goodput/s per {unit} by rate, medians",
        "columns": ["rate", "p99 gap within", *modes, "adaptive to the better pure mode"],
        "rows": rows,
    }


def _forecasts(found: Points) -> list[dict[str, Any]]:
    """Return how far first tokens were from what the router expected; a bucket's upper edge."""
    servers = [run.figures.server for runs in found.values() for run in runs]
    whole, *at_most = reckoning.forecast_errors([each for each in servers if each])
    if not whole:
        return []
    return [
        {
            "title": "forecasts of the time to the first token, adaptive mode: error as its share",
            "columns": ["forecasts", "median, at most", "p90, at most"],
            "rows": [[str(whole), *(f"{edge:.0%}" for edge in at_most)]],
        }
    ]


def _ways(found: Points) -> dict[str, Any]:
    """Return a row for each way and rate: medians of the repeats."""
    rows = []
    for point, runs in found.items():
        figures = [run.figures for run in runs]
        shares = [f.server.handover_share_of_ttft for f in figures if f.server]
        hits = [f.server.prefix_hit_share for f in figures if f.server]
        made_for = point.made_for_gap_ms
        rows.append(
            [
                point.mode,
                point.way if made_for is None else f"{point.way}, for {made_for:g} ms",
                f"{point.rate:g}",
                str(len(runs)),
                f"{sum(f.ok for f in figures)} / {sum(f.requests for f in figures)}",
                _medians([(f.ttft.p50, f.ttft.p95, f.ttft.p99) for f in figures]),
                _medians([(f.itl.p50, f.itl.p99, f.itl.max) for f in figures]),
                f"{median(f.output_tokens_per_s for f in figures):.3g}",
                f"{median(shares):.2%}" if shares else "-",
                f"{median(hits):.0%}" if hits else "-",
                f"{max(run.others_cores for run in runs):.2f}",
            ]
        )
    return {
        "title": "every way and rate: medians of the repeats",
        "columns": [
            "mode",
            "way",
            "rate",
            "repeats",
            "ok / requests",
            "TTFT p50 / p95 / p99 ms",
            "ITL p50 / p99 / max ms",
            "output tokens/s",
            "hand-over's share of TTFT",
            "prefix hits",
            "cores used by others, most",
        ],
        "rows": rows,
    }


def _best(values: Mapping[str, float]) -> str:
    """Return the mode that gave most; several that gave the same have no winner among them."""
    most = max(values.values())
    return " = ".join(mode for mode, value in values.items() if value == most) if most else "-"


def _medians(values: Sequence[tuple[float, ...]]) -> str:
    return " / ".join(f"{median(column):.4g}" for column in zip(*values, strict=True))


def _cell(middle: float, least: float, most: float) -> str:
    return f"{middle:.3g}" if least == most else f"{middle:.3g} ({least:.3g} - {most:.3g})"
