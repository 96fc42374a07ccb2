"""Two real decode workers, one of which is killed, stopped or shut down in mid-stream.

The other one goes on from the blocks in its arena; the clients get the undisturbed run's text.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.cluster_client import Answer, complete, metric
from support.ops_cluster import OpsCluster, ops_cluster, wait_until

STREAMS, TOKENS = 4, 80
BLOCK = 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[OpsCluster]:
    """One prefill, two decodes; a stream takes two seconds."""
    with ops_cluster(
        BATON_MODEL_NAME="m",
        BATON_CLUSTER_DECODE="2",
        BATON_FAKE_STEP_MS="25",
        BATON_LIMITS_PEER_SILENT_MS="1000",
        BATON_LIMITS_DRAIN_MS="10000",
        BATON_CHECK="1",
    ) as place:
        place.up()
        yield place


def _ask(cluster: OpsCluster, topic: str, number: int, reached: threading.Barrier | None) -> Answer:
    def count(ids: int) -> None:
        if ids == 20 and reached is not None:
            reached.wait(20)

    prompt = [*f"{topic} {number}: ".encode(), *b"the quick brown fox jumps over the lazy dog"]
    return complete(
        cluster.port, "m", prompt, max_tokens=TOKENS, ignore_eos=True, temperature=1, seed=number,
        on_id=count,
    )  # fmt: skip


def _stream(cluster: OpsCluster, topic: str, disturb: int | None = None) -> list[Answer]:
    """Stream all prompts of ``topic`` at once; send ``disturb`` to decode-0 when each has 20 ids.

    Prompts that are new are spread over both workers, and come again where they are cached."""
    victim = cluster.process("decode-0")
    reached = threading.Barrier(STREAMS + 1) if disturb else None
    with ThreadPoolExecutor(STREAMS) as clients:
        found = [clients.submit(_ask, cluster, topic, number, reached) for number in range(STREAMS)]
        if disturb and reached:
            reached.wait(20)
            victim.send(disturb)
        answers = [each.result(60) for each in found]
        if disturb == signal.SIGSTOP:
            victim.send(signal.SIGCONT)
    return answers


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_nobody_notices(cluster: OpsCluster, how: signal.Signals) -> None:
    """Exactly the same text, no error, and at most a block and a step of each computed again."""
    wait_until(lambda: _ready(cluster), 30, "everybody ready")
    calm = _stream(cluster, how.name)
    before = _counts(cluster)
    pid = cluster.process("decode-0").pid
    disturbed = _stream(cluster, how.name, how)
    for alone, answer in zip(calm, disturbed, strict=True):
        assert answer.error is None and not answer.broken, f"{answer}\n{cluster.logs()}"
        assert answer.ids == alone.ids and answer.text == alone.text
        assert answer.finish == alone.finish
        assert answer.usage is not None and answer.usage["completion_tokens"] == TOKENS
    imports, again = (now - then for now, then in zip(_counts(cluster), before, strict=True))
    assert imports >= 1, cluster.logs()
    assert again <= imports * (BLOCK + 2), f"{again} tokens computed again for {imports} requests"
    if how is signal.SIGTERM:
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 5, "the drained worker's exit")


def _ready(cluster: OpsCluster) -> bool:
    rows = cluster.status()["processes"]
    return all(row["report"] and row["report"]["ready"] for row in rows if "-" in row["process"])


def _counts(cluster: OpsCluster) -> tuple[float, float]:
    """Requests that went on by import, and tokens that this computed again."""
    way = {"way": "import", "worker": "decode-1"}
    return (
        metric(cluster.port, "baton_recoveries_total", **way),
        metric(cluster.port, "baton_recomputed_tokens_total", **way),
    )
