"""`baton bench compare-modes`: the same load for each way of using the same cores, in one table.

Decides which ways are tried and in which order. Colocated is given its best: for each SLO the best
of one worker with all cores and one worker a core, and of every chunk size; so is a foreign server
that can be started in several ways. Bounds of gaps are absolute milliseconds, the same for all:
multiples of the split's undisturbed ITL. What knows its SLO (the adaptive mode) is started anew for
each. A machine is not the same for minutes on end, so at each rate all ways take turns: a short run
of each, the ones that are compared next to each other. Every run is kept as a slice, so that a
comparison of hours can be made in parts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any, get_args, get_type_hints

import msgspec

from baton.bench.cluster import BenchError, bench_cluster
from baton.bench.load import verdict
from baton.bench.load.arrivals import Arrivals
from baton.bench.load.baton_target import conditions_of
from baton.bench.load.generator import LoadPlan
from baton.bench.load.results import Conditions, Result, ResultError, Run, Slo
from baton.bench.load.running import Done, RunPlan, Target, check_target, run_blocking
from baton.bench.load.slices import Slices
from baton.bench.load.verdict import ADAPTIVE, COLOCATED, SPLIT
from baton.bench.load.workload import WorkloadName
from baton.runtime.config import config_path, load
from baton.runtime.settings import ClusterConfig

MULTIPLES = (1.2, 1.5, 2.0, 3.0, 5.0)
CHUNKS = (16, 32, 64, 128, 256, 512, 1_024, 2_048)
UNDISTURBED, UNDISTURBED_STREAMS = "undisturbed", 4
#: A start, and what it takes until the last answers of a run are there, at a guess: for the budget.
_START_S, _REST_S = 12.0, 6.0

Place = Callable[[], AbstractContextManager[Target]]


@dataclass(frozen=True, slots=True)
class Way:
    """One configuration of one mode."""

    mode: str
    words: str
    settings: Mapping[str, str]
    slo: Slo | None = None
    """It was made for this one alone."""
    place: Place | None = None
    """Where it is served; ``None``: by a Baton cluster with these settings."""
    start_s: float = _START_S

    @property
    def name(self) -> str:
        """Return what no other way of the comparison is called."""
        return f"{self.mode} {self.words}" + (f" for {self.slo.gap_ms:g}" if self.slo else "")


@dataclass(frozen=True, slots=True)
class Foreign:
    """A server that is not Baton, as further columns: the best of its ways for each SLO."""

    mode: str
    ways: tuple[Way, ...]
    check: Callable[[], object] = lambda: None
    """Raises what is wrong with it, as far as can be told before anything is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModesPlan:
    """What is compared, and how thoroughly."""

    run: RunPlan
    """Workload and times; its target is replaced."""
    rates: tuple[float, ...]
    ttft_ms: float
    rates_for_ms: float | None = None
    """Rates are for a machine whose undisturbed gaps are so long: one with longer gaps gets less in
    proportion. ``None``: rates are as they are."""
    multiples: tuple[float, ...] = MULTIPLES
    chunks: tuple[int, ...] = CHUNKS
    repeats: int = 1
    undisturbed_s: float = 10.0
    tune_s: float = 15.0
    """Of each configuration that is tried, at each of the rates it is tried at."""
    foreign: tuple[Foreign, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of every cluster that is started, beside those of its way and of the environment."""
    slices: Path | None = None
    """Where runs are kept, and found again."""
    minutes: float = float("inf")
    """Nothing is begun that would probably not end in this time."""

    def rates_at(self, itl_ms: float) -> tuple[float, ...]:
        """Return the rates for a machine with these undisturbed gaps, to two digits."""
        if self.rates_for_ms is None:
            return self.rates
        return tuple(float(f"{rate * self.rates_for_ms / itl_ms:.2g}") for rate in self.rates)

    def told(self) -> dict[str, Any]:
        """Return all that slices of one comparison have in common."""
        run, environ = self.run, {**os.environ, **self.settings}
        config = load(config_path(None, environ), environ)
        return {
            "workload": {k: v for k, v in asdict(run.workload).items() if k != "salt"},
            "load": asdict(run.load),
            "ask": asdict(run.ask),
            "rates": self.rates,
            "rates_for_ms": self.rates_for_ms,
            "ttft_ms": self.ttft_ms,
            "multiples": self.multiples,
            "chunks": self.chunks,
            "undisturbed_s": self.undisturbed_s,
            "tune_s": self.tune_s,
            "cores": sorted(os.sched_getaffinity(0)),
            "settings": conditions_of(config)
            | msgspec.to_builtins({"model": config.model, "engine": config.engine}),
        }


def compare_modes(plan: ModesPlan) -> Result:
    """Run what is not there yet, as far as time allows, and return one result of all.

    Raises:
        BenchError: a cluster did not start, or nothing was measured.
        KeyboardInterrupt: it was ended before there was anything to compare.
        ServerError: a foreign server does not answer.
        ResultError: a condition of a foreign server is missing, or the slices are others'.
    """
    for foreign in plan.foreign:
        foreign.check()
    return _Comparison(plan).run()


class _OutOfTime(Exception):
    """What is left would not end in time."""


class _Comparison:
    def __init__(self, plan: ModesPlan) -> None:
        self._plan = plan
        self._slices = Slices(plan.slices, plan.told(), plan.run.workload.salt)
        self._deadline = monotonic() + plan.minutes * 60
        self._slos: tuple[Slo, ...] = ()
        self._rates: tuple[float, ...] = ()
        self._itl_ms = 0.0
        self._left = ""
        self._by_hand = False
        self._tables: list[dict[str, Any]] = []

    def run(self) -> Result:
        try:
            self._all()
        except KeyboardInterrupt:
            self._left, self._by_hand = "ended by hand", True
        except _OutOfTime:
            self._left = f"{self._plan.minutes:g} minutes were over"
        done = [each for each in self._slices.all() if "repeat" in each.run.settings]
        if (not self._slos or not done) and self._by_hand:
            raise KeyboardInterrupt
        if not self._slos or not done:
            raise BenchError(f"nothing to compare yet: {self._left}")
        return self._result(done)

    def _all(self) -> None:
        plan = self._plan
        split = Way(SPLIT, "1 prefill, 1 decode", {"BATON_CLUSTER_MODE": SPLIT})
        self._itl_ms = itl_ms = self._undisturbed(split)
        self._rates = plan.rates_at(itl_ms)
        self._slos = slos = tuple(
            Slo(plan.ttft_ms, round(itl_ms * each, 2)) for each in plan.multiples
        )
        best = self._tuned(COLOCATED, colocated_ways(plan.chunks))
        ways = in_turn(slos, split, best, adaptive_ways(slos))
        for repeat in range(plan.repeats):
            # Whatever drifts meanwhile is not to meet the same way each time.
            turn = ways if repeat % 2 == 0 else ways[::-1]
            for rate, way in product(self._rates, turn):
                self._visit(way, [rate], repeat)
            # They take too long to start to be started for each rate.
            for foreign in plan.foreign:
                others = once(self._tuned(foreign.mode, foreign.ways).values())
                for way in others if repeat % 2 == 0 else reversed(others):
                    self._visit(way, self._rates, repeat)

    def _undisturbed(self, split: Way) -> float:
        """Return the split's median ITL, in ms, with nothing else going on."""
        plan = self._plan.run
        workload = replace(
            plan.workload,
            name=WorkloadName.FIXED,
            prompt_tokens=64,
            output_tokens=100,
            intruder_tokens=0,
        )
        quiet = LoadPlan(
            kind=Arrivals.CLOSED,
            concurrency=UNDISTURBED_STREAMS,
            warmup_s=2.0,
            duration_s=self._plan.undisturbed_s,
        )
        alone = replace(plan, workload=workload, load=quiet, label=UNDISTURBED, settings={})
        if self._slices.get(UNDISTURBED) is None:
            self._needs(split, [quiet])
            with self._served(split) as target:
                self._measure(UNDISTURBED, replace(alone, target=target))
        found = self._slices.get(UNDISTURBED)
        assert found is not None
        return undisturbed_ms(found.run)

    def _tuned(self, mode: str, ways: Sequence[Way]) -> dict[Slo, Way]:
        """Return the best way for each SLO."""
        if len(ways) == 1:
            return dict.fromkeys(self._slos, ways[0])
        rates = tuning_rates(self._rates)
        for way in ways:
            self._visit(way, rates, None)
        runs = [self._slices.get(_name(way, rate, None)) for way, rate in product(ways, rates)]
        found = verdict.points([each.run for each in runs if each])
        table = verdict.tuning_table(found, self._slos, mode)
        if table not in self._tables:
            self._tables.append(table)
        named = {way.words: way for way in ways}
        return {slo: named[verdict.tuned(found, slo)] for slo in self._slos}

    def _visit(self, way: Way, rates: Sequence[float], repeat: int | None) -> None:
        """Serve a way and run what is not there yet; ``repeat``: ``None`` while it is tuned."""
        missing = [r for r in rates if self._slices.get(_name(way, r, repeat)) is None]
        if not missing:
            return
        load = self._plan.run.load
        if repeat is None:
            load = replace(load, duration_s=self._plan.tune_s)
        self._needs(way, [load] * len(missing))
        with self._served(way) as target:
            for rate in missing:
                plan = self._run_plan(way, rate, repeat, load)
                self._measure(_name(way, rate, repeat), replace(plan, target=target))

    def _run_plan(self, way: Way, rate: float, repeat: int | None, load: LoadPlan) -> RunPlan:
        plan = self._plan.run
        # The same texts for each way; other ones for each rate and repeat, or caches would help.
        place = self._rates.index(rate)
        salt = self._slices.salt + 1_000 * (0 if repeat is None else repeat + 1) + place
        told = {
            "mode": way.mode,
            "way": way.words,
            "rate": rate,
            "made_for_gap_ms": way.slo.gap_ms if way.slo else None,
            "settings": dict(way.settings),
        }
        return replace(
            plan,
            workload=replace(plan.workload, salt=salt),
            load=replace(load, rate=rate),
            slos=self._slos,
            label=f"{way.mode} {rate:g}/s",
            settings=told if repeat is None else told | {"repeat": repeat},
        )

    def _measure(self, name: str, plan: RunPlan) -> None:
        _tell(name)
        done = run_blocking(plan)
        if done.aborted:
            raise KeyboardInterrupt
        if name == UNDISTURBED:
            undisturbed_ms(done.run)
        # Time lines of so many runs would say little.
        self._slices.put(name, replace(done, run=msgspec.structs.replace(done.run, series=())))

    def _needs(self, way: Way, loads: Iterable[LoadPlan]) -> None:
        """Go on only if a way's runs will probably be over in time."""
        seconds = way.start_s + sum(load.warmup_s + load.duration_s + _REST_S for load in loads)
        if monotonic() + seconds > self._deadline:
            raise _OutOfTime

    @contextmanager
    def _served(self, way: Way) -> Iterator[Target]:
        if way.place is not None:
            with way.place() as target:
                yield target
            return
        with bench_cluster(**self._plan.settings, **way.settings) as cluster:
            given = self._plan.run.target
            config = load(config_path(None, cluster.environ), cluster.environ)
            yield replace(
                given,
                url=f"http://127.0.0.1:{cluster.port}",
                roots=(cluster.supervisor_pid(),),
                told={**given.told, **conditions_of(config)},
                # Every mode has all cores of the machine that this process may use.
                cores=float(len(os.sched_getaffinity(0))),
            )

    def _result(self, done: Sequence[Done]) -> Result:
        plan, first = self._plan, done[0].conditions
        runs = [each.run for each in done]
        findings = verdict.conclude(runs, self._slos, self._itl_ms, plan.multiples)
        findings["tables"] += self._tables
        findings["ended_by_hand"] = self._by_hand
        repeats = len({run.settings["repeat"] for run in runs})
        parts = [f"{len(runs)} runs, {repeats} repeats"]
        if self._left:
            parts.append(f"not all that is planned: {self._left}")
        return Result(
            kind="modes",
            title=f"modes compared: {plan.run.workload.name} on {first.model}",
            conditions=_of_all(done),
            runs=tuple(runs),
            aborted=bool(self._left),
            findings=findings,
            notes=(
                f"Bounds of gaps are {', '.join(f'{each:g}' for each in plan.multiples)} x "
                f"{self._itl_ms:.2f} ms, the median gap of {UNDISTURBED_STREAMS} undisturbed "
                f"streams in split mode; the first token is to come within {plan.ttft_ms:g} ms.",
                f"{'; '.join(parts)}.",
            ),
        )


def undisturbed_ms(run: Run) -> float:
    """Return the median gap that all bounds are multiples of.

    Raises:
        BenchError: there was none.
    """
    if not run.figures.itl.count:
        raise BenchError("no undisturbed stream ended in its time: give it more (--undisturbed)")
    return run.figures.itl.p50


def tuning_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Return the rates at which configurations are tried: at a low one all of them are good."""
    ordered = sorted(rates)
    return tuple(dict.fromkeys((ordered[len(ordered) // 2], ordered[-1])))


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
                "BATON_SLO_ITL_MS": str(max(1, int(slo.gap_ms))),
            },
            slo,
        )
        for slo in slos
    ]


def in_turn(
    slos: Iterable[Slo], split: Way, colocated: Mapping[Slo, Way], adaptive: Iterable[Way]
) -> list[Way]:
    """Return each way once, in an order in which what is compared at an SLO is close together: the
    adaptive mode beside the colocated way that is best there, the split, good where SLOs are
    tightest, beside those."""
    made_for = {way.slo: way for way in adaptive}
    ordered: list[Way] = []
    for place, slo in enumerate(slos):
        if slo in made_for:
            ordered.append(made_for[slo])
        ordered += [split, colocated[slo]] if place == 0 else [colocated[slo]]
    return once(ordered)


def once(ways: Iterable[Way]) -> list[Way]:
    """Return each way once, in the order in which they come first."""
    found: dict[str, Way] = {}
    for way in ways:
        found.setdefault(way.name, way)
    return list(found.values())


def running_server(name: str, target: Target) -> Foreign:
    """Return a server that runs already, as a column."""

    @contextmanager
    def place() -> Iterator[Target]:
        yield target

    def check() -> None:
        check_target(target)

    return Foreign(name, (Way(name, target.url, {}, place=place, start_s=0.0),), check)


def _name(way: Way, rate: float, repeat: int | None) -> str:
    when = "tuning" if repeat is None else f"repeat {repeat}"
    return f"{when}: {way.name} at {rate:g}/s"


def _of_all(done: Sequence[Done]) -> Conditions:
    """Return what the runs have in common, and what differs between them."""
    every = [each.conditions for each in done]
    if any(each.hardware != every[0].hardware for each in every):
        raise ResultError("these runs are not of one machine: measure all of them anew")
    others = [each.load["others_cores"] for each in every]
    return msgspec.structs.replace(
        every[0],
        time=f"{every[0].time} to {every[-1].time}",
        commit=", ".join(dict.fromkeys(each.commit for each in every)),
        workload={**every[0].workload, "salt": "one for each rate and repeat"},
        arrivals={**every[0].arrivals, "rate_per_s": "see the runs"},
        server={**every[0].server, "workers": "see the runs' settings"},
        limits={"see": "the runs' settings; these are of the first", **_named(every[0].limits)},
        concurrency="open, see the runs",
        load={
            "others_cores_most": max(others),
            "others_cores_median": sorted(others)[len(others) // 2],
            "load_average_at_start": every[0].load["load_average_at_start"],
            "load_average_at_end": every[-1].load["load_average_at_end"],
        },
    )


def _named(limits: Mapping[str, Any] | str) -> Mapping[str, Any]:
    return {"told": limits} if isinstance(limits, str) else limits


def _tell(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()
