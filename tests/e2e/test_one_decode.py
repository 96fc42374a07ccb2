"""The only real decode worker is killed in mid-stream and comes back to its own memory.

The clients get the undisturbed run's text, and no prompt is computed a second time.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster_client import Answer, complete, metric
from support.ops_cluster import OpsCluster, ops_cluster, wait_until
from support.undisturbed import assert_same_answers, seeded_requests, stream_all

STREAMS, TOKENS = 4, 100
BLOCK = 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[OpsCluster]:
    """One prefill, one decode; a stream takes two seconds, a chunk of a prompt 0.2."""
    with ops_cluster(
        BATON_MODEL_NAME="m",
        BATON_FAKE_STEP_MS="20",
        BATON_FAKE_PREFILL_MS="200",
        BATON_LIMITS_PREFILL_CHUNK_TOKENS="64",
        BATON_CHECK="1",
    ) as place:
        place.up()
        yield place


def _requests(topic: str) -> list[dict[str, Any]]:
    return seeded_requests(
        topic, b"the quick brown fox jumps over the lazy dog" * 4, TOKENS, STREAMS
    )


def _of_decode(cluster: OpsCluster, name: str, **labels: str) -> float:
    return metric(cluster.port, f"baton_{name}", worker="decode-0", **labels)


def _serves(cluster: OpsCluster) -> bool:
    return bool(cluster.reports()["decode-0"].get("writers")) and bool(cluster.status()["ready"])


def test_nobody_notices_and_no_prompt_is_computed_again(cluster: OpsCluster) -> None:
    """Exactly the same text; of each request at most a block and a step are computed again."""
    wait_until(lambda: _serves(cluster), 30, "ready")
    calm = stream_all(cluster, _requests("same"))
    prefilled = metric(cluster.port, "baton_engine_step_tokens_sum", worker="prefill-0")
    victim = cluster.process("decode-0")
    disturbed = stream_all(cluster, _requests("same"), lambda: victim.send(signal.SIGKILL))
    assert_same_answers(cluster, calm, disturbed, TOKENS)
    assert _of_decode(cluster, "recoveries_total", way="take_over") == STREAMS, cluster.logs()
    again = _of_decode(cluster, "recomputed_tokens_total", way="take_over")
    assert again <= STREAMS * (BLOCK + 2), f"{again} tokens computed again"
    # Their cached prompts had left a rest of less than a block each before the death.
    now = metric(cluster.port, "baton_engine_step_tokens_sum", worker="prefill-0")
    assert now - prefilled <= STREAMS * BLOCK
    taken_over = cluster.reports()["decode-0"]["arena"]["taken_over"]
    assert taken_over["kept"] > STREAMS * 10 and not taken_over["dropped"], taken_over


@pytest.mark.slow
def test_prefill_goes_on_in_the_memory_that_was_taken_over(cluster: OpsCluster) -> None:
    """It was computing a prompt there when its owner died: what had verified is not lost, and the
    same prefill process hands over to the successor."""
    wait_until(lambda: _serves(cluster), 30, "ready")
    prefill, decode = cluster.process("prefill-0"), cluster.process("decode-0")
    prompt = [*b"half way: ", *b"pack my box with five dozen jugs" * 12]
    found: list[Answer] = []
    client = threading.Thread(
        target=lambda: found.append(
            complete(cluster.port, "m", prompt, max_tokens=8, ignore_eos=True)
        )
    )
    client.start()
    announced = "baton_verify_seconds_count"
    before = metric(cluster.port, announced, worker="decode-0")
    wait_until(
        lambda: metric(cluster.port, announced, worker="decode-0") >= before + 2, 10, "two chunks"
    )
    decode.send(signal.SIGKILL)
    client.join(30)
    assert found and found[0].error is None, f"{found}\n{cluster.logs()}"
    # Chunks may have shrunk to a block: their time is what the size follows.
    assert _of_decode(cluster, "prefix_cache_hits_total") >= 2 * BLOCK, cluster.logs()
    wait_until(lambda: _serves(cluster), 30, "ready")
    assert cluster.process("prefill-0") == prefill
    blocks = cluster.reports()["decode-0"]["blocks"]
    assert not blocks["quarantined"] and not blocks["filling"], blocks
    again = complete(cluster.port, "m", prompt, max_tokens=8, ignore_eos=True)
    assert again.ids == found[0].ids
    fresh = [*b"another one: ", *prompt[10:]]
    before = _of_decode(cluster, "handovers_total")
    assert complete(cluster.port, "m", fresh, max_tokens=4, ignore_eos=True).error is None
    assert _of_decode(cluster, "handovers_total") == before + 1, "not handed over"
