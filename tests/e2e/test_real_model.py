"""The whole cluster with the real model: every way to compute an answer gives the same ids.

The reference is transformers' own greedy output in float32 (``tests/reference``). Our answer must
equal it through the split (cold and with a warm prefix cache), with eight in flight, and colocated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster_client import complete, complete_all, metric
from support.engine_fixtures import model_dir  # noqa: F401 - a fixture
from support.ops_cluster import OpsCluster, ops_cluster

REFERENCE = Path(__file__).parents[1] / "reference" / "greedy.json"
#: Enough to leave a block that the prompt ends in, at a length around its border.
TOKENS = 8
pytestmark = pytest.mark.model


def _prompts(count: int) -> list[dict[str, Any]]:
    """Return ``count`` reference prompts, spread over all lengths (8: one of each); the 2,000-token
    ones are slow on the reference path and stay in the long tier."""
    prompts = [p for p in json.loads(REFERENCE.read_text())["prompts"] if len(p["prompt"]) <= 1000]
    step = len(prompts) / count
    return [prompts[int(n * step)] for n in range(count)]


@pytest.fixture(scope="module", params=["split", "colocated"])
def cluster(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[OpsCluster]:  # noqa: F811
    """A cluster of each mode, in float32."""
    with ops_cluster(
        BATON_ENGINE_KIND="torch",
        BATON_MODEL_PATH=str(model_dir),
        BATON_MODEL_NAME="m",
        BATON_MODEL_DTYPE="float32",
        BATON_ARENA_SIZE_MB="600",
        BATON_CLUSTER_MODE=request.param,
        BATON_CHECK="1",
    ) as place:
        place.up()
        yield place


def test_every_way_gives_the_reference(cluster: OpsCluster) -> None:
    """Solo, again with a warm prefix cache, and eight at once: ids equal transformers' own."""
    chosen = _prompts(8)
    fields = {"max_tokens": TOKENS, "ignore_eos": True}
    wanted = [p["output"][:TOKENS] for p in chosen]
    solo = [complete(cluster.port, "m", p["prompt"], **fields) for p in chosen]
    eos = set(json.loads(REFERENCE.read_text())["eos_ids"])
    for prompt, answer, ids in zip(chosen, solo, wanted, strict=True):
        assert answer.error is None, cluster.logs()
        # generate() stops at the end-of-sequence id; we were told to go on.
        ends = next((n + 1 for n, token in enumerate(ids) if token in eos), len(ids))
        assert answer.ids[:ends] == ids[:ends], f"{len(prompt['prompt'])} tokens"
        assert len(answer.ids) == TOKENS
    warm = [complete(cluster.port, "m", p["prompt"], **fields) for p in chosen]
    assert [a.ids for a in warm] == [a.ids for a in solo]
    cached = [(a.usage or {})["prompt_tokens_details"]["cached_tokens"] for a in warm]
    assert cached == [(len(p["prompt"]) - 1) // 16 * 16 for p in chosen]
    together = complete_all(cluster.port, "m", [p["prompt"] for p in chosen], **fields)
    assert [a.ids for a in together] == [a.ids for a in solo]
    split = cluster.environ["BATON_CLUSTER_MODE"] == "split"
    assert (metric(cluster.port, "baton_handovers_total") > 0) == split


def test_kv_travels_through_no_socket(cluster: OpsCluster) -> None:
    """(141) A prompt's KV is written once, into decode's memory: links carry a fraction of it."""
    prompt = list(range(1_000, 1_800))

    def sent() -> float:
        return metric(cluster.port, "baton_link_sent_bytes_total")

    before, kv_before = sent(), metric(cluster.port, "baton_handover_bytes_total")
    idle_from = sent()
    complete(cluster.port, "m", prompt, max_tokens=1)
    spent, kv = sent() - before, metric(cluster.port, "baton_handover_bytes_total") - kv_before
    reading = idle_from - before  # asking for the metrics goes over the links as well
    if cluster.environ["BATON_CLUSTER_MODE"] == "split":
        assert kv == 50 * 30 * 2 * 16 * 3 * 64 * 4
    # A report of four processes is about 200 KB; the prompt's KV is 37 MB.
    assert spent - 2 * reading < 64_000, (spent, reading)


def test_same_seed_gives_the_same_text(cluster: OpsCluster) -> None:
    """Sampling is a function of the seed, alone or among others; another seed differs."""
    prompt = _prompts(3)[1]["prompt"]
    fields = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2}
    first = complete(cluster.port, "m", prompt, seed=7, **fields)
    crowd = complete_all(cluster.port, "m", [prompt] * 3, seed=7, **fields)
    other = complete(cluster.port, "m", prompt, seed=8, **fields)
    assert first.ids
    assert all(answer.ids == first.ids for answer in crowd)
    assert other.ids != first.ids
