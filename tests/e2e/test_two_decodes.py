"""Two real decode workers, one of which is killed, stopped or shut down in mid-stream.

The other one goes on from the blocks in its arena; the clients get the undisturbed run's text.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster_client import metric
from support.ops_cluster import OpsCluster, ops_cluster, wait_until
from support.undisturbed import assert_same_answers, seeded_requests, stream_all

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


def _requests(topic: str) -> list[dict[str, Any]]:
    return seeded_requests(topic, b"the quick brown fox jumps over the lazy dog", TOKENS, STREAMS)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_nobody_notices(cluster: OpsCluster, how: signal.Signals) -> None:
    """Exactly the same text, no error, and at most a block and a step of each computed again.

    Prompts that are new are spread over both workers, and come again where they are cached."""
    wait_until(lambda: _ready(cluster), 30, "everybody ready")
    calm = stream_all(cluster, _requests(how.name))
    before = _counts(cluster)
    victim = cluster.process("decode-0")
    disturbed = stream_all(cluster, _requests(how.name), lambda: victim.send(how))
    if how is signal.SIGSTOP:
        victim.send(signal.SIGCONT)
    assert_same_answers(cluster, calm, disturbed, TOKENS)
    imports, again = (now - then for now, then in zip(_counts(cluster), before, strict=True))
    assert imports >= 1, cluster.logs()
    assert again <= imports * (BLOCK + 2), f"{again} tokens computed again for {imports} requests"
    if how is signal.SIGTERM:
        process = Path(f"/proc/{victim.pid}")
        wait_until(lambda: not process.exists(), 5, "the drained worker's exit")


def _ready(cluster: OpsCluster) -> bool:
    return all(said.get("ready") for name, said in cluster.reports().items() if "-" in name)


def _counts(cluster: OpsCluster) -> tuple[float, float]:
    """Requests that went on by import, and tokens that this computed again."""
    way = {"way": "import", "worker": "decode-1"}
    return (
        metric(cluster.port, "baton_recoveries_total", **way),
        metric(cluster.port, "baton_recomputed_tokens_total", **way),
    )
