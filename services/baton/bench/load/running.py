"""One run from its plan to its figures: the server is looked at, asked, and looked at again.

Decides the order of things and what of the conditions is found out by looking. Needs an event loop
(uvloop's); runs one after the other share it and the client's connections.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from time import monotonic, time
from typing import Any
from urllib.parse import urlsplit

import uvloop

from baton.bench import conditions as machine
from baton.bench.ends import ends_call
from baton.bench.load import machine_load, reckoning
from baton.bench.load.arrivals import Arrivals
from baton.bench.load.asking import AskPlan
from baton.bench.load.generator import Generator, LoadPlan, Measured
from baton.bench.load.http import UNIX_SCHEME, Client
from baton.bench.load.live import live
from baton.bench.load.results import Conditions, Cost, ResultError, Run, Slo
from baton.bench.load.server import Metrics, ServerInfo, identify, kinds, server_figures, workers_in
from baton.bench.load.workload import Workload, WorkloadName, WorkloadPlan
from baton.runtime.slices import wake_first

#: Tries to hear of every worker at an edge of the window.
SCRAPES_MAX = 3
#: Conditions that no server tells; a run without them does not begin.
MUST_BE_TOLD = ("dtype", "limits", "cache_state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and what must be said of it that it does not say itself."""

    url: str
    api_key: str = ""
    model: str = ""
    roots: tuple[int, ...] = ()
    """Its processes on this machine, if known; else whoever listens on its port."""
    cores: float = 0.0
    """It may use so many; 0: as the kernel and Baton's metrics say."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Of one worker, by its role (``prefill``, ``decode``, ...); empty: cores are the cost."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """Conditions that the user or the cluster's settings tell: those of ``MUST_BE_TOLD``, and
    others that are kept beside the server's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything that decides a run."""

    target: Target
    workload: WorkloadPlan
    load: LoadPlan
    ask: AskPlan
    slos: tuple[Slo, ...]
    label: str = "run"
    settings: Mapping[str, Any] = field(default_factory=dict)
    quiet: bool = False
    """No progress bar."""


@dataclass(slots=True)
class Done:
    """A run, and the conditions it ran under."""

    run: Run
    conditions: Conditions
    aborted: bool


def run_blocking(plan: RunPlan) -> Done:
    """Run it in a loop of its own, which goes before whoever computes on its core: how late a token
    was heard of is not to be a matter of what else this machine does.

    Raises:
        ResultError: a condition that no server tells is missing.
        ServerError: nobody answers as an OpenAI-compatible server.
    """
    wake_first(alone=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(plan))


def check_target(target: Target) -> None:
    """Look whether a run there could begin.

    Raises:
        ResultError: a condition that no server tells is missing.
        ServerError: nobody answers as an OpenAI-compatible server.
    """

    async def look() -> None:
        async with _met(target):
            pass

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(look())


async def run(plan: RunPlan) -> Done:
    """Run it. Ctrl-C, or SIGTERM, ends it with what there is."""
    async with _met(plan.target) as (client, info):
        return await _Runner(plan, client, info).run()


@asynccontextmanager
async def _met(target: Target) -> AsyncIterator[tuple[Client, ServerInfo]]:
    if missing := [name for name in MUST_BE_TOLD if not target.told.get(name)]:
        raise ResultError(
            f"a result without its conditions is none; not told of {target.url}: "
            f"{', '.join(missing)}"
        )
    client = Client(target.url, target.api_key)
    try:
        yield client, await identify(client, target.url, target.model)
    finally:
        client.close()


@dataclass(frozen=True, slots=True)
class _Look:
    """What the server's metrics were, not parsed yet, and when."""

    text: str
    at: float
    unix: float
    """The same in the time in which processes tell when they began."""


class _Runner:
    def __init__(self, plan: RunPlan, client: Client, info: ServerInfo) -> None:
        self._plan = plan
        self._client = client
        self._info = info
        self._loop = asyncio.get_running_loop()
        self._looks: list[asyncio.Task[_Look]] = []
        self._usage: list[machine_load.Usage] = []
        self._workers = 0
        """So many answered a scrape at once."""
        roots = plan.target.roots
        if not roots and (port := _local_port(plan.target.url)):
            roots = tuple(machine_load.listeners(port))
        self._roots = roots
        self._processes = machine_load.tree(roots)

    async def run(self) -> Done:
        plan = self._plan
        facts = machine.conditions()
        limit = min(plan.workload.context_max, self._info.context_max or 1_000_000)
        lengths = replace(plan.workload, context_max=limit)
        workload = Workload(lengths, plan.load.kind, plan.load.rate, plan.load.burstiness)
        ask = replace(plan.ask, model=self._info.model)
        generator = Generator(self._client, ask, plan.load)
        await self._scrape()
        with (
            ends_call(self._loop, generator.abort),
            live(plan.label, plan.load, lambda: generator.measured, quiet=plan.quiet),
        ):
            measured = await generator.run(workload.sessions(), self._look, self._look)
        return await self._done(measured, workload, facts)

    def _look(self) -> None:
        """Note who used the machine so far, and what the server counts."""
        self._usage.append(machine_load.usage(self._processes))
        self._looks.append(self._loop.create_task(self._scrape()))

    async def _scrape(self) -> _Look:
        """Return Baton's metrics, not parsed yet: that takes a tenth of a second, of the run's.

        A busy worker may answer the gateway too late; what it counts would be missing in the
        figures, so it is asked again. Whoever is missing all the same is left out.
        """
        look = _Look("", monotonic(), time())
        for _ in range(SCRAPES_MAX if self._info.metrics else 0):
            try:
                status, body = await self._client.get("/metrics")
            except OSError:
                continue
            if status == 200 and workers_in(body.decode()) >= workers_in(look.text):
                look = _Look(body.decode(), monotonic(), time())
            if workers_in(look.text) >= self._workers:
                break
        self._workers = max(self._workers, workers_in(look.text))
        return look

    async def _done(self, measured: Measured, workload: Workload, facts: Mapping[str, Any]) -> Done:
        plan, seconds = self._plan, max(measured.ended_at - measured.began_at, 1e-9)
        looks = [await look for look in self._looks]
        scrapes = [Metrics(look.text) for look in looks if look.text]
        server, workers = None, dict[str, float]()
        if scrapes:
            workers = kinds(scrapes[0], scrapes[-1], looks[0].unix, looks[-1].unix)
        if len(scrapes) == 2:
            server = server_figures(scrapes[0], scrapes[1], looks[-1].at - looks[0].at)
        before, after = self._usage[0], self._usage[-1]
        figures = reckoning.figures(
            measured,
            plan.slos,
            connections=self._client.opened,
            generator_cpu_cores=(after.own - before.own) / seconds,
            server=server,
        )
        others = machine_load.others_cores(before, after, seconds)
        affinity = machine_load.affinity(self._processes)
        found = Run(
            plan.label,
            plan.settings,
            figures,
            cost(plan.target, workers, affinity),
            round(others, 3),
            reckoning.rows(measured),
            reckoning.series(measured),
            workload.long_prompt(),
        )
        aborted = measured.aborted
        conditions = self._conditions(measured, workload, facts, affinity, others, workers=workers)
        return Done(found, conditions, aborted)

    def _conditions(
        self,
        measured: Measured,
        workload: Workload,
        facts: Mapping[str, Any],
        affinity: Mapping[str, Any],
        others: float,
        *,
        workers: Mapping[str, float],
    ) -> Conditions:
        plan, told = self._plan, dict(self._plan.target.told)
        lengths, load, info = plan.workload, plan.load, self._info
        known = {name: told.pop(name, "") for name in MUST_BE_TOLD}
        pinning = told.pop("pinning", "not on this machine")
        # Roles change while a cluster runs: what its workers did counts, not what was set.
        roles = {role: round(number, 2) for role, number in sorted(workers.items())}
        return Conditions(
            time=str(facts["time"]),
            server={
                "kind": info.kind,
                "version": info.version,
                "address": plan.target.url,
                **({"workers": roles} if roles else {}),
                **told,
            },
            model=info.model,
            dtype=str(known["dtype"]),
            limits=known["limits"],
            cache_state=str(known["cache_state"]),
            workload={
                "name": str(lengths.name),
                "form": str(plan.ask.form),
                "seed": lengths.seed,
                "salt": lengths.salt,
                **_lengths(lengths),
                "sessions": workload.told.sessions,
                "clipped": workload.told.clipped,
                "laps": workload.told.laps,
                "invented_histories": measured.invented,
                "ignore_eos": plan.ask.ignore_eos,
                "fields": plan.ask.fields,
            },
            arrivals={
                "kind": str(load.kind),
                "rate_per_s": load.rate,
                "burstiness": load.burstiness,
                "trace_time_stretched_by": round(workload.stretch(), 4),
                "warmup_s": load.warmup_s,
                "duration_s": load.duration_s,
                "requests_max": load.requests,
                "grace_s": load.grace_s,
            },
            concurrency=str(load.concurrency)
            if load.kind is Arrivals.CLOSED
            else f"open, at most {measured.in_flight_peak} seen",
            hardware={
                "cpu": facts["cpu"],
                "cores": len(os.sched_getaffinity(0)),
                "memory_gib": facts["memory_gib"],
                "kernel": facts["kernel"],
            },
            pinning={
                "generator": sorted(os.sched_getaffinity(0)),
                "server": affinity or pinning,
            },
            versions={"python": facts["python"], **facts["packages"]},
            commit=str(facts["commit"]),
            load={
                "others_cores": round(others, 3),
                "load_average_at_start": facts["load_average_at_start"],
                "load_average_at_end": os.getloadavg(),
            },
        )


def cost(
    target: Target, workers: Mapping[str, float], affinity: Mapping[str, Sequence[int]]
) -> Cost:
    """Return what the server may use: prices of its ``workers``, by role, if given; else cores."""
    if target.prices:
        amount = sum(target.prices.get(role, 0.0) * number for role, number in workers.items())
        return Cost("price", amount, "the user")
    if target.cores:
        return Cost("core", target.cores, "the user")
    cores = {core for each in affinity.values() for core in each}
    return Cost("core", float(len(cores) or os.cpu_count() or 1), "affinity of its processes")


def _lengths(plan: WorkloadPlan) -> dict[str, Any]:
    """Return what decides the lengths of this workload."""
    names = ["prompt_max", "output_max", "context_max"]
    if plan.name is WorkloadName.FIXED:
        names += ["prompt_tokens", "output_tokens"]
    else:
        names += ["prompt_scale", "output_scale"]
    if plan.name is WorkloadName.SHAREGPT:
        names.append("think_s")
    if plan.intruder_tokens:
        names += ["intruder_tokens", "intruder_every_s"]
    return {name: getattr(plan, name) for name in names}


def _local_port(url: str) -> int:
    parts = urlsplit(url)
    if parts.scheme == UNIX_SCHEME or parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return 0
    return parts.port or 80
