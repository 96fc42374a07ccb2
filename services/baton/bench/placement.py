"""Which of two decode workers requests go to: by prefix, by load, or in turn.

The requests are those of Mooncake's conversation trace, in its order and with its prefix chains,
scaled so that a machine with two cores can serve them; every run has the same ones, on a new
cluster. The engine is the fake one: a prompt chunk and a step take a fixed time, asleep, so that
what is seen is placement. What counts: the share of prompt tokens found cached, the time to the
first token, and how unevenly the two workers are loaded.
"""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from baton.bench.cluster import BenchCluster, BenchError, bench_cluster
from baton.bench.figures import table
from baton.bench.load.arrivals import Arrivals
from baton.bench.load.asking import AskPlan
from baton.bench.load.baton_target import conditions_of
from baton.bench.load.generator import LoadPlan
from baton.bench.load.running import RunPlan, Target, run_blocking
from baton.bench.load.workload import WorkloadName, WorkloadPlan
from baton.runtime.config import load

PLACEMENTS = ("prefix", "least-loaded", "round-robin")
MODES = ("colocated", "split")
#: Lengths of the trace are divided by that: a name of 512 tokens becomes two blocks of 16.
SCALE = 16
SETTINGS = {
    "BATON_ENGINE_KIND": "fake",
    "BATON_FAKE_PREFILL_MS": "20",
    "BATON_FAKE_STEP_MS": "4",
    "BATON_CLUSTER_DECODE": "2",
    "BATON_ARENA_SIZE_MB": "32",
    "BATON_CLUSTER_LOG_LEVEL": "warning",
}
SAMPLE_S = 1.0
_HELD = re.compile(
    r'^baton_num_requests_(?:running|waiting)\{[^}]*worker="(decode-\d+)"[^}]*\} (\S+)$', re.M
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long is measured."""

    rounds: int
    warmup_s: float
    seconds: float
    rate: float
    """Requests a second; the trace's own times are stretched to it."""
    modes: tuple[str, ...] = MODES


QUICK = Effort(rounds=1, warmup_s=5.0, seconds=15.0, rate=5.0, modes=("colocated",))
EFFORT = Effort(rounds=1, warmup_s=15.0, seconds=60.0, rate=6.0)


class Loads:
    """Asks, once a second, how many requests each decode worker has."""

    def __init__(self, cluster: BenchCluster) -> None:
        self.seen: list[dict[str, float]] = []
        self._port = cluster.port
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            connection = HTTPConnection("127.0.0.1", self._port, timeout=20)
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            connection.close()
            held: dict[str, float] = {}
            for worker, value in _HELD.findall(text):
                held[worker] = held.get(worker, 0.0) + float(value)
            if held:
                self.seen.append(held)

    def stop(self) -> list[dict[str, float]]:
        self._over.set()
        self._thread.join()
        return self.seen


def measure(effort: Effort) -> dict[str, object]:
    """Return what each placement did in each mode, one after the other, in changing order."""
    runs = []
    for number in range(effort.rounds):
        for mode in effort.modes:
            for at in range(len(PLACEMENTS)):
                placement = PLACEMENTS[(at + number) % len(PLACEMENTS)]
                runs.append(_one(mode, placement, number, effort))
    return {
        "trace": "Mooncake conversation (FAST25), the first requests of 1,500",
        "lengths_divided_by": SCALE,
        "rate_per_s": effort.rate,
        "warmup_s": effort.warmup_s,
        "seconds": effort.seconds,
        "settings": SETTINGS,
        "runs": runs,
    }


def _one(mode: str, placement: str, number: int, effort: Effort) -> dict[str, object]:
    settings = {
        **SETTINGS,
        "BATON_CLUSTER_MODE": mode,
        "BATON_ROUTER_PLACEMENT": placement,
    }
    with bench_cluster(**settings) as cluster:
        config = load(None, cluster.environ)
        loads = Loads(cluster)
        done = run_blocking(
            RunPlan(
                target=Target(
                    url=f"http://127.0.0.1:{cluster.port}",
                    roots=(cluster.supervisor_pid(),),
                    told={**conditions_of(config), "cache_state": "empty at the start"},
                ),
                workload=WorkloadPlan(
                    name=WorkloadName.MOONCAKE,
                    prompt_scale=1 / SCALE,
                    output_scale=1 / SCALE,
                    salt=1,
                    ids=(97, 122),
                ),
                load=LoadPlan(
                    kind=Arrivals.TRACE,
                    rate=effort.rate,
                    warmup_s=effort.warmup_s,
                    duration_s=effort.seconds,
                ),
                ask=AskPlan(),
                slos=(),
                quiet=True,
            )
        )
        seen = loads.stop()
        metrics = cluster.metrics()
    figures = done.run.figures
    if figures.failed or figures.refused or figures.unfinished or figures.server is None:
        raise BenchError(f"{placement}: not every request was answered: {figures.errors}")
    return {
        "mode": mode,
        "placement": placement,
        "round": number,
        "requests": figures.requests,
        "prefix_hit_share": figures.server.prefix_hit_share,
        "ttft_ms": {"p50": figures.ttft.p50, "p95": figures.ttft.p95, "p99": figures.ttft.p99},
        "gap_ms": {"p50": figures.itl.p50, "p99": figures.itl.p99},
        "e2e_ms": {"p50": figures.e2e.p50, "p99": figures.e2e.p99},
        "prompt_tokens_by_worker": _decodes(metrics, "baton_prefix_cache_queries_total"),
        "computed_tokens_by_worker": _computed(metrics),
        "held": _uneven(seen),
        "expected_tokens": _sum(metrics, "baton_prefix_expected_tokens_total"),
        "found_tokens": _sum(metrics, "baton_prefix_found_tokens_total"),
        "misjudged_tokens": _sum(metrics, "baton_prefix_misjudged_tokens_total"),
        "resyncs": _sum(metrics, "baton_prefix_resyncs_total"),
        "router_cpu_cores": figures.server.cpu_cores.get("router-0", 0.0),
        "others_cores": done.run.others_cores,
        "generator_verdict": figures.generator.verdict,
        "at": time.strftime("%H:%M:%S", time.gmtime()),
    }


def _of(metrics: Mapping[tuple[str, str], float], name: str) -> dict[str, float]:
    return {worker: value for (sample, worker), value in metrics.items() if sample == name}


def _sum(metrics: Mapping[tuple[str, str], float], name: str) -> float:
    return sum(_of(metrics, name).values())


def _decodes(metrics: Mapping[tuple[str, str], float], name: str) -> dict[str, float]:
    found = _of(metrics, name)
    return {worker: value for worker, value in found.items() if worker.startswith("decode-")}


def _computed(metrics: Mapping[tuple[str, str], float]) -> dict[str, float]:
    hits = _decodes(metrics, "baton_prefix_cache_hits_total")
    asked = _decodes(metrics, "baton_prefix_cache_queries_total")
    return {worker: value - hits.get(worker, 0.0) for worker, value in asked.items()}


def _uneven(seen: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return how many more requests the fuller worker has than the other: mean and worst."""
    apart = [max(held.values()) - min(held.values()) for held in seen if len(held) > 1]
    most = [max(held.values()) for held in seen]
    return {
        "samples": len(apart),
        "apart_mean": round(statistics.fmean(apart), 2) if apart else 0.0,
        "apart_max": max(apart, default=0.0),
        "most": max(most, default=0.0),
    }


def page(result: dict[str, object]) -> str:
    """Return the table."""
    runs = result["runs"]
    assert isinstance(runs, list)
    rows = [
        (
            run["mode"],
            run["placement"],
            run["requests"],
            f"{run['prefix_hit_share']:.1%}",
            f"{run['ttft_ms']['p50']:.0f} / {run['ttft_ms']['p99']:.0f}",
            f"{run['gap_ms']['p50']:.1f} / {run['gap_ms']['p99']:.1f}",
            f"{_ratio(run['prompt_tokens_by_worker']):.2f}",
            f"{_ratio(run['computed_tokens_by_worker']):.2f}",
            f"{run['held']['apart_mean']:.1f} / {run['held']['apart_max']:.0f}",
            _judged(run),
            f"{run['others_cores']:.1f}",
        )
        for run in runs
    ]
    header = (
        "mode",
        "placement",
        "requests",
        "prompt tokens cached",
        "first token p50/p99 ms",
        "gap p50/p99 ms",
        "prompt tokens, fuller worker by mean",
        "computed tokens, the same",
        "requests apart mean/max",
        "cached tokens misjudged",
        "cores used by others",
    )
    lines = [
        table(header, rows),
        "",
        f"{result['trace']}, lengths divided by {result['lengths_divided_by']}, "
        f"{result['rate_per_s']} requests/s at the trace's own times (stretched); "
        f"{result['warmup_s']:.0f} s before the window, {result['seconds']:.0f} s of it, a new "
        "cluster for each line. Two decode workers, one prefill worker where the mode has any; "
        "fake engine: 20 ms a prompt chunk, 4 ms a step. *Fuller worker by mean*: its tokens by "
        "those of an even share, 2.00 if it had all. *Requests apart*: how many more the fuller "
        "worker had, looked at once a second. *Misjudged*: differences between what the router "
        "expected to be cached and what decode found, by what decode found. *Cores used by "
        "others*: of two, by what is neither the cluster nor its clients; the more, the later "
        "first tokens are for that alone.",
    ]
    return "\n".join(lines)


def _ratio(by_worker: Mapping[str, float]) -> float:
    values = list(by_worker.values())
    return max(values) / statistics.fmean(values) if any(values) else 0.0


def _judged(run: Mapping[str, Any]) -> str:
    return f"{run['misjudged_tokens'] / max(1.0, run['found_tokens']):.1%}"
