"""What the control plane costs: router CPU and ledger calls per request, and per token.

Measured with the fake engine, so that the engine's work hides nothing; two runs that differ only in
the number of tokens show that no ledger call belongs to a token.
"""

from __future__ import annotations

from baton.bench.cluster import BenchCluster, bench_cluster
from baton.bench.figures import table
from baton.bench.streams import complete, random_prompt

LEASE_OPS = ("AcquireLease", "RenewLease", "ReleaseLease")


def measure(*, requests: int) -> dict[str, object]:
    """Return CPU and ledger calls of requests with 2 and with 64 output tokens."""
    with bench_cluster(BATON_ENGINE_KIND="fake", BATON_ARENA_SIZE_MB="64") as cluster:
        _requests(cluster, 10, tokens=2, seed=1)
        return {
            str(tokens): _cost(cluster, requests, tokens, seed=tokens * 10_000)
            for tokens in (2, 64)
        }


def _cost(cluster: BenchCluster, count: int, tokens: int, *, seed: int) -> dict[str, object]:
    cpu_before = cluster.metrics()
    calls_before = cluster.counts_by_label("baton_ledger_calls_total", "op")
    _requests(cluster, count, tokens=tokens, seed=seed)
    cpu_after = cluster.metrics()
    calls_after = cluster.counts_by_label("baton_ledger_calls_total", "op")
    cpu = {
        worker: (cpu_after[name, worker] - value) / count * 1e3
        for (name, worker), value in cpu_before.items()
        if name == "baton_process_cpu_seconds_total"
    }
    calls = {
        op: (value - calls_before.get(op, 0.0)) / count
        for op, value in calls_after.items()
        if op not in LEASE_OPS
    }
    return {"requests": count, "cpu_ms_per_request": cpu, "ledger_calls_per_request": calls}


def _requests(cluster: BenchCluster, count: int, *, tokens: int, seed: int) -> None:
    for number in range(count):
        prompt = [97 + (id_ % 26) for id_ in random_prompt(64, seed + number)]
        stream = complete(cluster, prompt, tokens)
        if stream.error:
            raise RuntimeError(stream.error)


def page(result: dict[str, object]) -> str:
    """Return the table."""
    rows = []
    for tokens, figures in result.items():
        assert isinstance(figures, dict)
        cpu, calls = figures["cpu_ms_per_request"], figures["ledger_calls_per_request"]
        words = ", ".join(f"{op} {value:.2f}" for op, value in sorted(calls.items()) if value)
        rows.append(
            (
                tokens,
                figures["requests"],
                round(cpu["router-0"], 2),
                round(cpu["gateway-0"], 2),
                round(sum(calls.values()), 2),
                words,
            )
        )
    header = (
        "output tokens",
        "requests",
        "router CPU ms/request",
        "gateway CPU ms/request",
        "ledger calls/request",
        "by transition",
    )
    return table(header, rows)
