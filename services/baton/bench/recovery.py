"""What the death of a decode process costs its client, by way of recovery and length of context.

A stream is decoded; its decode process is killed; one figure counts: the longest gap between two
pieces at the client. Three ways: another decode worker imports the blocks; it prefills the prompt
again (the arena was taken away before the kill); the only decode worker is started again and takes
its own arena over. A decode process that is frozen instead is killed when its lease is over; then
another one imports.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from baton.bench.asker import random_prompt
from baton.bench.cluster import BenchCluster, BenchError, bench_cluster
from baton.bench.figures import spread_ms, table
from baton.bench.streams import Streams, streams

LENGTHS = (500, 2000, 6000)
#: Pieces before the kill, and the length of the whole answer.
BEFORE, ANSWER = 20, 80
PATIENCE_S = 120.0
#: A process that ends sooner is started again after a pause that grows with each such end: that is
#: the supervisor's care for one that cannot run, not what a death costs.
STEADY_S = 13.0
WAYS = {
    "import": "another decode worker imports",
    "prefill": "another one, prompt prefilled again",
    "take_over": "the only one, restarted",
    "frozen": "frozen: killed with its lease (2 s), another one imports",
}


def measure(*, repeats: int, lengths: tuple[int, ...] = LENGTHS) -> dict[str, object]:
    """Return the gaps of all ways and lengths, and the tokens found and computed again."""
    result: dict[str, object] = {"repeats": repeats}
    for way in WAYS:
        decodes = "1" if way == "take_over" else "2"
        settings = {"BATON_CLUSTER_MODE": "split", "BATON_CLUSTER_DECODE": decodes}
        with bench_cluster(**settings) as cluster, streams(cluster) as asked:
            asked.complete(random_prompt(64, 1), 4)
            result[way] = {str(n): _series(cluster, asked, way, n, repeats) for n in lengths}
    return result


def _series(
    cluster: BenchCluster, asked: Streams, way: str, tokens: int, repeats: int
) -> dict[str, object]:
    runs = [
        _killed(cluster, asked, way, random_prompt(tokens, 1_000 * tokens + number))
        for number in range(repeats)
    ]
    return {
        "gap_ms": spread_ms([run.gap_s for run in runs]),
        "gap_before_ms": spread_ms([run.calm_s for run in runs]),
        "found": [run.recovered["found"] for run in runs],
        "computed_again": [run.recovered["computed_again"] for run in runs],
        "ways": [run.recovered["way"] for run in runs],
    }


@dataclass(frozen=True, slots=True)
class Run:
    """One stream whose decode process was killed."""

    calm_s: float
    """The longest gap before the kill."""
    gap_s: float
    """The longest one after it."""
    recovered: dict[str, object]
    """What the worker that went on logged of it."""


def _killed(cluster: BenchCluster, asked: Streams, way: str, prompt: list[int]) -> Run:
    """Stream, and kill or freeze in mid-stream."""
    _until(lambda: _all_ready(cluster, way), "everybody to be ready")
    pids = cluster.processes()
    stream = asked.begin(prompt, ANSWER)
    arrivals = stream.answer.arrivals
    _until(lambda: len(arrivals) >= BEFORE or stream.ended.is_set(), "the first tokens")
    placed = cluster.events("router-0", "placed")[-1]
    victim = str(placed["decode"]).partition("/")[0]
    if way == "prefill":
        for path in Path("/dev/shm").glob(f"baton-bench-{os.getpid()}.*-{victim}.arena"):
            path.unlink()
    killed_at = time.monotonic()
    os.kill(pids[victim], signal.SIGSTOP if way == "frozen" else signal.SIGKILL)
    if error := stream.wait().error:
        raise BenchError(error)
    gaps = [(after, after - before) for before, after in pairwise(arrivals)]
    return Run(
        max(gap for end, gap in gaps if end <= killed_at),
        max(gap for end, gap in gaps if end > killed_at),
        _recovered(cluster, str(placed["request_id"])),
    )


def _recovered(cluster: BenchCluster, request_id: str) -> dict[str, object]:
    found = [
        event
        for log in (cluster.run_dir / "logs").glob("decode-*.log")
        for event in cluster.events(log.stem, "recovered")
        if event["request_id"] == request_id
    ]
    return max(found, key=lambda event: str(event["ts"]))


def _all_ready(cluster: BenchCluster, way: str) -> bool:
    if way == "take_over":
        return {"decode-0", "prefill-0"} <= set(cluster.processes(STEADY_S))
    return {"decode-0", "decode-1", "prefill-0"} <= set(cluster.processes())


def _until(seen: Callable[[], bool], what: str) -> None:
    began = time.monotonic()
    while not seen():
        if time.monotonic() - began > PATIENCE_S:
            raise BenchError(f"waited in vain for {what}")
        time.sleep(0.005)


def page(result: dict[str, object]) -> str:
    """Return the table."""
    rows = []
    for way, words in WAYS.items():
        series = result[way]
        assert isinstance(series, dict)
        for length, figures in series.items():
            gap, calm = figures["gap_ms"], figures["gap_before_ms"]
            rows.append(
                (
                    words,
                    length,
                    gap["count"],
                    round(gap["p50"]),
                    round(gap["max"]),
                    round(calm["p50"]),
                    max(figures["computed_again"]),
                )
            )
    header = (
        "after the death",
        "context tokens",
        "n",
        "gap p50 ms",
        "gap max ms",
        "longest gap before p50 ms",
        "computed again, most",
    )
    return table(header, rows)
