"""The same requests in the three modes: who computes a prompt changes when tokens come, not which.

One cluster a mode, of real processes with the fake engine.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.cluster_client import Answer, complete, metric
from support.ops_cluster import OpsCluster, ops_cluster, wait_until

TEXT = b"the quick brown fox jumps over the lazy dog" * 8
LENGTHS = (3, 40, 160, 300)


def _requests() -> list[dict[str, Any]]:
    """Short and long prompts, with and without a common beginning."""
    fields = {"max_tokens": 12, "ignore_eos": True, "temperature": 1}
    return [
        {"prompt": [*f"{number % 2}: ".encode(), *TEXT[:length]], "seed": number, **fields}
        for number, length in enumerate(LENGTHS * 3)
    ]


def _ready(cluster: OpsCluster, mode: str) -> bool:
    met = mode == "colocated" or bool(cluster.reports()["decode-0"].get("writers"))
    return met and bool(cluster.status()["ready"])


def _run(mode: str) -> tuple[list[str], dict[str, float]]:
    with ops_cluster(
        BATON_CLUSTER_MODE=mode,
        BATON_MODEL_NAME="m",
        BATON_FAKE_STEP_MS="5",
        BATON_FAKE_PREFILL_MS="15",
        BATON_LIMITS_PREFILL_CHUNK_TOKENS="64",
        BATON_CHECK="1",
    ) as cluster:
        cluster.up()
        wait_until(lambda: _ready(cluster, mode), 60, f"{mode} is ready")
        requests = _requests()
        # Some alone, so that everything is known by then, and all others at once.
        answers: list[Answer] = [complete(cluster.port, "m", **each) for each in requests[:4]]
        with ThreadPoolExecutor(4) as pool:
            answers += pool.map(lambda each: complete(cluster.port, "m", **each), requests[4:])
        ways = {
            way: metric(cluster.port, "baton_ways_total", worker="router-0", way=way)
            for way in ("local", "remote")
        }
        assert all(answer.error is None for answer in answers), cluster.logs()
        return [answer.text for answer in answers], ways


def test_the_text_is_the_same_in_all_modes() -> None:
    """Split has prefill compute, colocated decode; adaptive both."""
    split, split_ways = _run("split")
    colocated, colocated_ways = _run("colocated")
    adaptive, ways = _run("adaptive")
    assert split == colocated == adaptive
    assert split_ways["remote"] > 0 and colocated_ways["remote"] == 0
    assert ways["local"] > 0 and sum(ways.values()) >= len(adaptive)
