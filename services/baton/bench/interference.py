"""What a long prompt does to streams that are being decoded: split against colocated.

Four streams decode; after an undisturbed while a 2,000-token prompt comes every six seconds. The
same in colocated mode on the same cores, in the same run. One figure counts: the gap between two
tokens, as the streams' clients see it.
"""

from __future__ import annotations

import time

from baton.bench.asker import first_at, random_prompt
from baton.bench.cluster import bench_cluster
from baton.bench.figures import gaps_within, spread_ms, table
from baton.bench.streams import streams

STREAMS = 4
INTRUDER_TOKENS = 2000
EVERY_S = 6.0


def measure(*, calm_s: float, disturbed_s: float) -> dict[str, object]:
    """Return the gaps of both modes, undisturbed and with intruding prompts."""
    return {
        mode: _mode(mode, calm_s=calm_s, disturbed_s=disturbed_s) for mode in ("split", "colocated")
    }


def _mode(mode: str, *, calm_s: float, disturbed_s: float) -> dict[str, object]:
    with bench_cluster(BATON_CLUSTER_MODE=mode) as cluster, streams(cluster) as asked:
        asked.complete(random_prompt(64, 1), 4)
        background = asked.background(STREAMS, prompt_tokens=64, max_tokens=700, seed=9_000_000)
        time.sleep(5.0)  # all four past their own prefill
        calm_from = time.monotonic()
        time.sleep(calm_s)
        calm_until = time.monotonic()
        ttft: list[float] = []
        number = 0
        while time.monotonic() - calm_until < disturbed_s:
            began = time.monotonic()
            intruder = asked.complete(random_prompt(INTRUDER_TOKENS, 500 + number), 1)
            ttft.append(first_at(intruder) - intruder.sent_at)
            number += 1
            time.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))
        disturbed_until = time.monotonic()
        answers = background.stop()
    arrivals = [answer.arrivals for answer in answers]
    calm = gaps_within(arrivals, calm_from, calm_until)
    disturbed = gaps_within(arrivals, calm_until, disturbed_until)
    seconds = calm_until - calm_from
    return {
        "gap_calm_ms": spread_ms(calm),
        "gap_disturbed_ms": spread_ms(disturbed),
        "intruder_s": spread_ms([value / 1e3 for value in ttft]),
        "tokens_per_s_calm": round(len(calm) / seconds, 1),
        "tokens_per_s_disturbed": round(len(disturbed) / (disturbed_until - calm_until), 1),
        "errors": [answer.error for answer in answers if answer.error],
    }


def page(result: dict[str, object]) -> str:
    """Return the table."""
    rows = []
    for mode, figures in result.items():
        assert isinstance(figures, dict)
        calm, hit = figures["gap_calm_ms"], figures["gap_disturbed_ms"]
        rows.append(
            (
                mode,
                f"{calm['p50']} / {calm['p99']} / {calm['max']}",
                f"{hit['p50']} / {hit['p99']} / {hit['max']}",
                round(hit["p99"] / calm["p99"], 2),
                figures["intruder_s"]["p50"],
                figures["tokens_per_s_calm"],
                figures["tokens_per_s_disturbed"],
            )
        )
    header = (
        "mode",
        "gap alone p50/p99/max ms",
        "gap with intruders p50/p99/max ms",
        "p99 ratio",
        "intruder's TTFT p50 s",
        "tok/s alone",
        "tok/s with intruders",
    )
    return table(header, rows)
