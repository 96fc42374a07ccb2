"""`baton bench compare-modes`: the same load for each way of using the same cores, in one table.

Decides which configurations are tried and how they are compared. Colocated is given its best: for
each SLO the best of one worker with all cores and one worker a core, and of every chunk size.
Bounds of gaps are absolute milliseconds, the same for all: multiples of the split's undisturbed
ITL. What knows its SLO (the adaptive mode) is started anew for each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any, get_args, get_type_hints

from baton.bench.cluster import BenchCluster, bench_cluster
from baton.bench.load import reckoning
from baton.bench.load.arrivals import Arrivals
from baton.bench.load.baton_target import conditions_of
from baton.bench.load.generator import LoadPlan
from baton.bench.load.results import Result, Run, Slo
from baton.bench.load.running import Done, RunPlan, Target, run_blocking
from baton.bench.load.workload import WorkloadName
from baton.runtime.config import config_path, load
from baton.runtime.settings import ClusterConfig

MULTIPLES = (1.2, 1.5, 2.0, 3.0, 5.0)
CHUNKS = (16, 32, 64, 128, 256, 512, 1_024, 2_048)
UNDISTURBED_STREAMS = 4
#: Multiples at which the break-even is looked for.
GRID = tuple(n / 10 for n in range(10, 61))
SPLIT, COLOCATED, ADAPTIVE = "split", "colocated", "adaptive"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModesPlan:
    """What is compared, and how thoroughly."""

    run: RunPlan
    """Workload and times; its target is replaced."""
    rates: tuple[float, ...]
    ttft_ms: float
    multiples: tuple[float, ...] = MULTIPLES
    chunks: tuple[int, ...] = CHUNKS
    repeats: int = 1
    undisturbed_s: float = 10.0
    tune_s: float = 15.0
    """Of each of colocated's configurations."""
    also: tuple[tuple[str, Target], ...] = ()
    """Foreign servers, by the names of their columns. They run already."""


@dataclass(frozen=True, slots=True)
class Way:
    """One configuration of one mode."""

    mode: str
    words: str
    settings: Mapping[str, str]
    slo: Slo | None = None
    """It was made for this one alone."""


def compare_modes(plan: ModesPlan) -> Result:
    """Run everything and return one result.

    Raises:
        BenchError: a cluster did not start.
        ServerError: a foreign server does not answer.
        ResultError: a condition of a foreign server is missing.
    """
    return _Comparison(plan).run()


class _Comparison:
    def __init__(self, plan: ModesPlan) -> None:
        self._plan = plan
        self._done: list[Done] = []
        self._tuning: list[list[str]] = []

    @property
    def _aborted(self) -> bool:
        return bool(self._done) and self._done[-1].aborted

    def run(self) -> Result:
        plan = self._plan
        split = Way(SPLIT, "1 prefill, 1 decode", {"BATON_CLUSTER_MODE": SPLIT})
        itl_ms = self._undisturbed(split)
        slos = tuple(Slo(plan.ttft_ms, round(itl_ms * each, 2)) for each in plan.multiples)
        tuned = self._tuned(slos)
        ways = [split, *{way.words: way for way in tuned}.values(), *adaptive_ways(slos)]
        before = len(self._done)
        for repeat, way in product(range(plan.repeats), ways):
            self._measure(way, slos, repeat)
        for repeat, (name, target) in product(range(plan.repeats), plan.also):
            foreign = Way(name, target.url, {})
            for rate in plan.rates:
                self._one(foreign, rate, slos, repeat, target=target)
        done = self._done[before:] or self._done
        runs = [each.run for each in done]
        findings = conclude(runs, slos, itl_ms, plan.multiples)
        findings["tables"].append(
            {
                "title": f"colocated, tuned at {_middle(plan.rates):g}/s: goodput by cost and SLO",
                "columns": ["configuration", *(f"{slo.gap_ms:g} ms" for slo in slos)],
                "rows": self._tuning,
            }
        )
        return Result(
            kind="modes",
            title=f"modes compared: {plan.run.workload.name} on {done[0].conditions.model}",
            conditions=done[0].conditions,
            runs=tuple(runs),
            aborted=self._aborted,
            findings=findings,
            notes=(
                f"Bounds of gaps are {', '.join(f'{each:g}' for each in plan.multiples)} x "
                f"{itl_ms:.2f} ms, the median gap of {UNDISTURBED_STREAMS} undisturbed streams in "
                "split mode.",
            ),
        )

    def _undisturbed(self, split: Way) -> float:
        """Return the split's median ITL, in ms, with nothing else going on."""
        plan = self._plan.run
        workload = replace(
            plan.workload,
            name=WorkloadName.FIXED,
            prompt_tokens=64,
            output_tokens=200,
            intruder_tokens=0,
        )
        quiet = LoadPlan(
            kind=Arrivals.CLOSED,
            concurrency=UNDISTURBED_STREAMS,
            warmup_s=2.0,
            duration_s=self._plan.undisturbed_s,
        )
        with bench_cluster(**split.settings) as cluster:
            alone = replace(
                plan,
                target=_target(cluster, plan.target),
                workload=workload,
                load=quiet,
                label="undisturbed",
            )
            self._done.append(run_blocking(alone))
        return self._done[-1].run.figures.itl.p50

    def _tuned(self, slos: Sequence[Slo]) -> list[Way]:
        """Return colocated's best configuration for each SLO."""
        plan = self._plan
        rate = _middle(plan.rates)
        found: list[tuple[Way, Run]] = []
        for way in colocated_ways(plan.chunks):
            if self._aborted:
                break
            with bench_cluster(**way.settings) as cluster:
                target = _target(cluster, plan.run.target)
                done = self._one(way, rate, slos, -1, target=target, duration_s=plan.tune_s)
            found.append((way, done.run))
            cells = [f"{_per_cost(done.run, slo):.3g}" for slo in slos]
            self._tuning.append([way.words, *cells])
        return [max(found, key=lambda each: _per_cost(each[1], slo))[0] for slo in slos if found]

    def _measure(self, way: Way, slos: Sequence[Slo], repeat: int) -> None:
        if self._aborted:
            return
        with bench_cluster(**way.settings) as cluster:
            target = _target(cluster, self._plan.run.target)
            for rate in self._plan.rates:
                self._one(way, rate, slos, repeat, target=target)

    def _one(
        self,
        way: Way,
        rate: float,
        slos: Sequence[Slo],
        repeat: int,
        *,
        target: Target,
        duration_s: float | None = None,
    ) -> Done:
        if self._aborted:
            return self._done[-1]
        plan = self._plan.run
        label = f"{way.mode} {rate:g}/s"
        _tell(f"{label} ({way.words})" + (f", SLO {way.slo.gap_ms:g} ms" if way.slo else ""))
        # The same texts for each way; other ones for each rate and repeat, or caches would help.
        salt = plan.workload.salt + 1_000 * (repeat + 1) + self._plan.rates.index(rate)
        load = replace(plan.load, rate=rate, duration_s=duration_s or plan.load.duration_s)
        each = replace(
            plan,
            target=target,
            workload=replace(plan.workload, salt=salt),
            load=load,
            slos=tuple(slos),
            label=label,
            settings={
                "mode": way.mode,
                "way": way.words,
                "rate": rate,
                "repeat": repeat,
                "made_for_gap_ms": way.slo.gap_ms if way.slo else None,
                "settings": dict(way.settings),
            },
        )
        self._done.append(run_blocking(each))
        return self._done[-1]


def colocated_ways(chunks: Iterable[int]) -> list[Way]:
    """Return every configuration of the colocated mode that is tried."""
    cores = len(os.sched_getaffinity(0))
    topologies = [(1, f"1 worker, {cores} cores")]
    if cores > 1:
        topologies.append((cores, f"{cores} workers, 1 core each"))
    return [
        Way(
            COLOCATED,
            f"{words}, chunk {chunk}",
            {
                "BATON_CLUSTER_MODE": COLOCATED,
                "BATON_CLUSTER_DECODE": str(workers),
                "BATON_LIMITS_LOCAL_PREFILL_CHUNK_TOKENS": str(chunk),
            },
        )
        for (workers, words), chunk in product(topologies, chunks)
    ]


def adaptive_ways(slos: Iterable[Slo]) -> list[Way]:
    """Return the adaptive mode, told each SLO; nothing where this version has no such mode."""
    if ADAPTIVE not in get_args(get_type_hints(ClusterConfig)["mode"]):
        return []
    return [
        Way(
            ADAPTIVE,
            "1 prefill, 1 decode",
            {
                "BATON_CLUSTER_MODE": ADAPTIVE,
                "BATON_SLO_TTFT_MS": str(round(slo.ttft_ms)),
                "BATON_SLO_ITL_MS": str(max(1, round(slo.gap_ms))),
            },
            slo,
        )
        for slo in slos
    ]


def conclude(
    runs: Sequence[Run], slos: Sequence[Slo], itl_ms: float, multiples: Sequence[float]
) -> dict[str, Any]:
    """Return tables and advice."""
    modes = list(dict.fromkeys(str(run.settings["mode"]) for run in runs if "mode" in run.settings))
    rows, points = [], {}
    for slo, multiple in zip(slos, multiples, strict=True):
        values = {mode: of_mode(runs, mode, slo) for mode in modes}
        points[f"{multiple:g}"] = {mode: found[0] for mode, found in values.items()}
        best = max(values, key=lambda mode: values[mode][0])
        rows.append(
            [
                f"{multiple:g} x = {slo.gap_ms:g} ms",
                *(_cell(*values[mode]) for mode in modes),
                best,
            ]
        )
    unit = runs[0].cost.unit if runs else "core"
    tables = [
        {
            "title": f"goodput/s per {unit} at the best rate: median (least - most of the repeats)",
            "columns": ["p99 gap within", *modes, "best"],
            "rows": rows,
        },
        {
            "title": "highest rate at which 90 % were good, sessions/s",
            "columns": ["p99 gap within", *modes],
            "rows": [
                [f"{slo.gap_ms:g} ms", *(f"{highest_rate(runs, mode, slo):g}" for mode in modes)]
                for slo in slos
            ],
        },
    ]
    even = break_even(runs, slos[0].ttft_ms, itl_ms) if COLOCATED in modes else None
    return {
        "undisturbed_itl_ms": itl_ms,
        "goodput_per_cost": points,
        "break_even_ms": "beyond what was looked at" if even == float("inf") else even,
        "tables": tables,
        "advice": advice(points, even, itl_ms),
    }


def of_mode(runs: Iterable[Run], mode: str, slo: Slo) -> tuple[float, float, float]:
    """Return goodput by cost at the best rate and configuration: median, least, most of repeats."""
    best: dict[int, float] = {}
    for run in runs:
        made_for = run.settings.get("made_for_gap_ms")
        if run.settings.get("mode") != mode or made_for not in (None, slo.gap_ms):
            continue
        repeat = int(run.settings["repeat"])
        best[repeat] = max(best.get(repeat, 0.0), _per_cost(run, slo))
    if not best:
        return 0.0, 0.0, 0.0
    return median(best.values()), min(best.values()), max(best.values())


def highest_rate(runs: Iterable[Run], mode: str, slo: Slo, wanted: float = 0.9) -> float:
    """Return the highest rate tried that a mode bears; 0: none."""
    return max(
        (
            float(run.settings["rate"])
            for run in runs
            if run.settings.get("mode") == mode
            and run.settings.get("made_for_gap_ms") in (None, slo.gap_ms)
            and reckoning.goodput(run.rows, slo, run.figures.seconds).attainment >= wanted
        ),
        default=0.0,
    )


def break_even(runs: Sequence[Run], ttft_ms: float, itl_ms: float) -> float:
    """Return the gap bound in ms up to which the split is at least as good as colocated.

    0: nowhere; infinite: everywhere on the grid of 1 to 6 times the undisturbed ITL. Where neither
    gives anything there is nothing to win.
    """
    wins = []
    for multiple in GRID:
        slo = Slo(ttft_ms, itl_ms * multiple)
        split, colocated = of_mode(runs, SPLIT, slo)[0], of_mode(runs, COLOCATED, slo)[0]
        wins.append(split >= colocated and split > 0)
    if not any(wins):
        return 0.0
    last = max(place for place, won in enumerate(wins) if won)
    return float("inf") if last == len(GRID) - 1 else round(itl_ms * GRID[last], 2)


def advice(points: Mapping[str, Mapping[str, float]], even: float | None, itl_ms: float) -> str:
    """Return one sentence of advice."""
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
    ratios = [
        found[ADAPTIVE] / best
        for found in points.values()
        if ADAPTIVE in found and (best := max(found.get(SPLIT, 0.0), found.get(COLOCATED, 0.0))) > 0
    ]
    if ratios:
        words += (
            f"; the adaptive mode gave {min(ratios):.2f} to {max(ratios):.2f} of the better one of "
            "both"
        )
    return words + "."


def _middle(rates: Sequence[float]) -> float:
    return sorted(rates)[len(rates) // 2]


def _per_cost(run: Run, slo: Slo) -> float:
    return reckoning.goodput(run.rows, slo, run.figures.seconds).per_s / (run.cost.amount or 1.0)


def _cell(middle: float, least: float, most: float) -> str:
    return f"{middle:.3g}" if least == most else f"{middle:.3g} ({least:.3g} - {most:.3g})"


def _target(cluster: BenchCluster, given: Target) -> Target:
    """Return the cluster as a target, its settings as conditions."""
    config = load(config_path(None, cluster.environ), cluster.environ)
    return replace(
        given,
        url=f"http://127.0.0.1:{cluster.port}",
        roots=(cluster.supervisor_pid(),),
        told={**given.told, **conditions_of(config)},
        # Every mode has all cores of the machine that this process may use.
        cores=float(len(os.sched_getaffinity(0))),
    )


def _tell(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()
