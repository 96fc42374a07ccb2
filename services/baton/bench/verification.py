"""What it costs that no token is computed from KV that is not proven right.

Prefill makes a checksum of every block that it fills, decode makes it again and compares. Both are
timed where they happen; their sum is set against the time to the first token, which includes them.
Decode's part mostly runs beside the next chunk, so the sum is more than what a client waits for.
"""

from __future__ import annotations

from baton.bench.asker import random_prompt
from baton.bench.cluster import BenchCluster, bench_cluster
from baton.bench.figures import table
from baton.bench.streams import Streams, streams

LENGTHS = (100, 500, 2000, 4000)
NAMES = {
    "made": "baton_checksum_seconds_sum",
    "compared": "baton_verify_seconds_sum",
    "ttft": "baton_time_to_first_token_seconds_sum",
    "bytes": "baton_handover_bytes_total",
}


def measure(*, repeats: int) -> dict[str, object]:
    """Return seconds of checksums and of first tokens, by prompt length; nothing else runs."""
    with bench_cluster(BATON_CLUSTER_MODE="split") as cluster, streams(cluster) as asked:
        asked.complete(random_prompt(64, 1), 4)
        return {str(tokens): _series(cluster, asked, tokens, repeats) for tokens in LENGTHS}


def _series(cluster: BenchCluster, asked: Streams, tokens: int, repeats: int) -> dict[str, float]:
    before = _read(cluster)
    for number in range(repeats):
        asked.complete(random_prompt(tokens, tokens * 1_000 + number), 2)
    after = _read(cluster)
    return {"repeats": repeats} | {name: after[name] - before[name] for name in NAMES}


def _read(cluster: BenchCluster) -> dict[str, float]:
    metrics = cluster.metrics()
    return {
        name: sum(value for (found, _), value in metrics.items() if found == sample)
        for name, sample in NAMES.items()
    }


def page(result: dict[str, object]) -> str:
    """Return the table."""
    rows = []
    for length, found in result.items():
        assert isinstance(found, dict)
        repeats, ttft = found["repeats"], found["ttft"]
        made, compared = found["made"], found["compared"]
        rows.append(
            (
                length,
                repeats,
                round(found["bytes"] / repeats / 2**20, 1),
                round(made / repeats * 1e3, 2),
                round(compared / repeats * 1e3, 2),
                round(ttft / repeats * 1e3, 1),
                f"{(made + compared) / ttft:.2%}",
            )
        )
    header = (
        "prompt tokens",
        "n",
        "KV MiB",
        "sums made ms",
        "sums compared ms",
        "TTFT ms",
        "both of TTFT",
    )
    return table(header, rows)
