"""What the control plane costs: router CPU and ledger calls per request, and per token.

Measured with the fake engine, so that the engine's work hides nothing; two runs that differ only in
the number of tokens show that no ledger call belongs to a token.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from baton.bench.asker import random_prompt
from baton.bench.cluster import BenchCluster, bench_cluster
from baton.bench.figures import table
from baton.bench.streams import Streams, streams

IDLE_S = 10.0
LEASE_OPS = ("AcquireLease", "RenewLease", "ReleaseLease")


def measure(*, requests: int) -> dict[str, object]:
    """Return CPU and ledger calls of requests with 2 and with 64 output tokens."""
    settings = {
        "BATON_CLUSTER_MODE": "split",
        "BATON_ENGINE_KIND": "fake",
        "BATON_ARENA_SIZE_MB": "64",
    }
    with bench_cluster(**settings) as cluster, streams(cluster) as asked:
        _requests(asked, 10, tokens=2, seed=1)
        idle = _idle(cluster)
        runs = [
            _cost(cluster, asked, idle, count=requests, tokens=tokens, at_once=at_once)
            for tokens, at_once in ((2, 1), (64, 1), (2, 8), (64, 8))
        ]
    return {"idle_cpu_share": idle, "runs": runs}


def _cpu(cluster: BenchCluster) -> dict[str, float]:
    return {
        worker: value
        for (name, worker), value in cluster.metrics().items()
        if name == "process_cpu_seconds_total"
    }


def _idle(cluster: BenchCluster) -> dict[str, float]:
    """Return the share of a core that each process takes with nothing to do."""
    before, began = _cpu(cluster), time.monotonic()
    time.sleep(IDLE_S)
    seconds = time.monotonic() - began
    return {worker: (cpu - before[worker]) / seconds for worker, cpu in _cpu(cluster).items()}


def _cost(
    cluster: BenchCluster,
    asked: Streams,
    idle: dict[str, float],
    *,
    count: int,
    tokens: int,
    at_once: int,
) -> dict[str, object]:
    cpu_before, began = _cpu(cluster), time.monotonic()
    calls_before = cluster.counts_by_label("baton_ledger_calls_total", "op")
    seed = tokens * 100_000 + at_once * 10_000
    with ThreadPoolExecutor(at_once) as pool:
        shares = [count // at_once] * at_once
        jobs = [
            pool.submit(_requests, asked, share, tokens=tokens, seed=seed + 1_000 * number)
            for number, share in enumerate(shares)
        ]
        for job in jobs:
            job.result()
    count = sum(shares)
    seconds = time.monotonic() - began
    calls_after = cluster.counts_by_label("baton_ledger_calls_total", "op")
    cpu = {
        worker: (value - cpu_before[worker] - idle[worker] * seconds) / count * 1e3
        for worker, value in _cpu(cluster).items()
    }
    calls = {
        op: (value - calls_before.get(op, 0.0)) / count
        for op, value in calls_after.items()
        if op not in LEASE_OPS
    }
    return {
        "tokens": tokens,
        "at_once": at_once,
        "requests": count,
        "seconds": seconds,
        "cpu_ms_per_request": cpu,
        "ledger_calls_per_request": calls,
    }


def _requests(asked: Streams, count: int, *, tokens: int, seed: int) -> None:
    for number in range(count):
        prompt = [97 + (id_ % 26) for id_ in random_prompt(64, seed + number)]
        asked.complete(prompt, tokens)


def page(result: dict[str, object]) -> str:
    """Return the table."""
    rows = []
    runs, idle = result["runs"], result["idle_cpu_share"]
    assert isinstance(runs, list)
    assert isinstance(idle, dict)
    for figures in runs:
        cpu, calls = figures["cpu_ms_per_request"], figures["ledger_calls_per_request"]
        words = ", ".join(f"{op} {value:.2f}" for op, value in sorted(calls.items()) if value)
        rows.append(
            (
                figures["tokens"],
                figures["at_once"],
                figures["requests"],
                round(figures["requests"] / figures["seconds"], 1),
                round(cpu["router-0"], 2),
                round(cpu["gateway-0"], 2),
                round(sum(calls.values()), 2),
                words,
            )
        )
    header = (
        "output tokens",
        "at once",
        "requests",
        "requests/s",
        "router CPU ms/request",
        "gateway CPU ms/request",
        "ledger calls/request",
        "by transition",
    )
    shares = ", ".join(f"{worker} {share:.1%}" for worker, share in sorted(idle.items()))
    return f"{table(header, rows)}\n\nTaken off, CPU with nothing to do: {shares} of a core."
