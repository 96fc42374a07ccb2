"""Two real decode workers and two routers: a prompt goes where its beginning is cached, also
through the router that never saw it before, and after the worker that has it was killed."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence

import pytest

from support.cluster_client import Answer, complete, complete_all, metric
from support.ops_cluster import OpsCluster, ops_cluster, wait_until

FAMILIES, TOKENS, BLOCK = 6, 640, 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[OpsCluster]:
    """Decode computes the prompts: whatever is not cached takes a while."""
    with ops_cluster(
        BATON_CLUSTER_MODE="colocated",
        BATON_MODEL_NAME="m",
        BATON_CLUSTER_DECODE="2",
        BATON_CLUSTER_ROUTERS="2",
        BATON_FAKE_PREFILL_MS="10",
        BATON_ARENA_SIZE_MB="8",
        BATON_CHECK="1",
    ) as place:
        place.up()
        wait_until(lambda: _all_ready(place), 60, "everybody ready")
        yield place


def _all_ready(cluster: OpsCluster) -> bool:
    return all(said.get("ready") for name, said in cluster.reports().items() if "-" in name)


def _beginning(family: int) -> list[int]:
    chance = random.Random(family)
    return [chance.randrange(97, 122) for _ in range(TOKENS)]


def _known(cluster: OpsCluster, router: str) -> float:
    return metric(cluster.port, "baton_prefix_index_blocks", worker=router)


def _cached(answers: Sequence[Answer]) -> list[int]:
    for answer in answers:
        assert answer.error is None and answer.usage is not None, answer
    return [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]  # type: ignore[index]


def _stored(cluster: OpsCluster, routers: Sequence[str] = ("router-0", "router-1")) -> None:
    """Wait until both routers know all that was computed."""
    wanted = FAMILIES * TOKENS // BLOCK
    for router in routers:
        wait_until(lambda router=router: _known(cluster, router) >= wanted, 10, f"{router} knows")


def test_every_router_sends_a_prompt_where_its_beginning_is(cluster: OpsCluster) -> None:
    """The first of each family is computed, on one worker; all others find it, whoever routes
    them, alone or several at a time."""
    for family in range(FAMILIES):
        answer = complete(cluster.port, "m", [*_beginning(family), 97], max_tokens=2)
        assert _cached([answer]) == [0]
    _stored(cluster)
    for round_ in range(4):
        prompts = [[*_beginning(family), 98, 98 + round_] for family in range(FAMILIES)]
        answers = complete_all(cluster.port, "m", prompts[:3], max_tokens=2)
        answers += [complete(cluster.port, "m", prompt, max_tokens=2) for prompt in prompts[3:]]
        assert _cached(answers) == [TOKENS] * FAMILIES
    queries = [
        metric(cluster.port, "baton_prefix_cache_queries_total", worker=f"decode-{n}")
        for n in range(2)
    ]
    assert min(queries) > TOKENS, f"all went to one worker: {queries}"
    for router in ("router-0", "router-1"):
        found = metric(cluster.port, "baton_prefix_found_tokens_total", worker=router)
        wrong = metric(cluster.port, "baton_prefix_misjudged_tokens_total", worker=router)
        assert found >= TOKENS and wrong == 0, f"{router}: {wrong} of {found} tokens misjudged"
        assert metric(cluster.port, "baton_prefix_resyncs_total", worker=router) == 0


def test_what_a_killed_worker_took_over_is_known_again(cluster: OpsCluster) -> None:
    """Its successor lists what it has kept."""
    _stored(cluster)

    victim = cluster.process("decode-0")
    victim.send(signal.SIGKILL)
    wait_until(lambda: cluster.process("decode-0").pid != victim.pid, 30, "a successor")
    wait_until(lambda: _all_ready(cluster), 30, "its successor is ready")
    _stored(cluster)
    answers = [
        complete(cluster.port, "m", [*_beginning(family), 99], max_tokens=2)
        for family in range(FAMILIES)
    ]
    assert _cached(answers) == [TOKENS] * FAMILIES, cluster.logs()
