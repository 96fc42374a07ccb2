"""Hand-over: from the end of prefill's last step to decode's admission, by prompt length.

Claims under test: it takes less than a millisecond with decode idle, does not depend on the
prompt's length, and no KV byte is copied on the way. Set beside it is how long after prefill's last
store the last chunk has verified on decode: that runs while prefill computes the first token.
"""

from __future__ import annotations

from baton.bench.asker import first_at, random_prompt
from baton.bench.cluster import BenchCluster, bench_cluster
from baton.bench.figures import spread_ms, table
from baton.bench.streams import Streams, streams

LENGTHS = (100, 500, 1000, 2000, 4000)


def measure(*, repeats: int, lengths: tuple[int, ...] = LENGTHS) -> dict[str, object]:
    """Return the hand-over times by length, with decode idle and with 4 streams decoding."""
    with bench_cluster(BATON_CLUSTER_MODE="split") as cluster, streams(cluster) as asked:
        asked.complete(random_prompt(64, 1), 4)
        idle = {str(n): _series(cluster, asked, n, repeats, seed=n) for n in lengths}
        background = asked.background(4, prompt_tokens=64, max_tokens=200, seed=7_000_000)
        busy = {
            str(n): _series(cluster, asked, n, max(2, repeats // 2), seed=50_000 + n)
            for n in lengths
            if n <= 2000
        }
        background.stop()
        moved = _moved(cluster, asked)
    return {"idle": idle, "with_4_streams": busy, "bytes": moved, "repeats": repeats}


def _moved(cluster: BenchCluster, asked: Streams) -> dict[str, float]:
    """Return what one 2,000-token prompt put into the arena and onto all links together.

    The metrics are read over the links too; what that costs is measured and taken off.
    """
    names = ("baton_link_sent_bytes_total", "baton_handover_bytes_total")

    def read() -> list[float]:
        metrics = cluster.metrics()
        return [sum(v for (sample, _), v in metrics.items() if sample == name) for name in names]

    first, second = read(), read()
    asked.complete(random_prompt(2000, 77), 1)
    third = read()
    reading = second[0] - first[0]
    return {"links": third[0] - second[0] - reading, "arena": third[1] - second[1]}


def _series(
    cluster: BenchCluster, asked: Streams, tokens: int, repeats: int, *, seed: int
) -> dict[str, object]:
    """Return the hand-over times of ``repeats`` prompts of that length, from decode's own log."""
    times: list[float] = []
    checked: list[float] = []
    prefill: list[float] = []
    ttft: list[float] = []
    for number in range(repeats):
        answer = asked.complete(random_prompt(tokens, seed * 100 + number), 2)
        ttft.append(first_at(answer) - answer.sent_at)
        blocks = -(-tokens // 16)
        fitting = [e for e in cluster.events("decode-0", "committed") if e["blocks"] == blocks]
        times.append(float(str(fitting[-1]["handover_ms"])) / 1e3)
        checked.append(float(str(fitting[-1]["verified_ms"])) / 1e3)
        prefill.append(float(str(fitting[-1]["prefill_ms"])) / 1e3)
    return {
        "handover_ms": spread_ms(times),
        "verified_ms": spread_ms(checked),
        "prefill_ms": spread_ms(prefill),
        "ttft_ms": spread_ms(ttft),
        "share_of_ttft": round(sum(times) / sum(ttft), 5),
    }


def page(result: dict[str, object]) -> str:
    """Return the table."""
    rows = []
    for title, key in (("decode idle", "idle"), ("4 streams decoding", "with_4_streams")):
        series = result[key]
        assert isinstance(series, dict)
        for length, figures in series.items():
            hand, fill = figures["handover_ms"], figures["prefill_ms"]
            checked = figures["verified_ms"]
            times = hand["p50"], hand["max"], checked["p50"], checked["max"]
            rows.append(
                (
                    *(title, length, hand["count"], *times, round(fill["p50"])),
                    *(round(figures["ttft_ms"]["p50"]), f"{figures['share_of_ttft']:.2%}"),
                )
            )
    moved = result["bytes"]
    assert isinstance(moved, dict)
    header = (
        *("decode", "prompt tokens", "n", "hand-over p50 ms", "max ms"),
        *("last store to verified p50 ms", "max ms", "prefill p50 ms", "TTFT p50 ms"),
        "hand-over of TTFT",
    )
    return (
        f"{table(header, rows)}\n\n"
        "TTFT is the client's; the share is of all prompts together. Hand-over: from the end of "
        "prefill's last step, when the first token is known, to decode's admission. All K and V "
        "are stored before that step's head: they are verified meanwhile, beside the head's "
        "reading of its weights.\n\n"
        f"One 2,000-token prompt: {moved['arena']:,.0f} bytes of KV stored by prefill in "
        "decode's arena and read there in place; "
        f"{moved['links']:,.0f} bytes on all links together."
    )
