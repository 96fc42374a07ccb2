"""Real routers killed and frozen while streams run: the streams do not pause, nobody is refused.

With the fake engine, whose answer is a function of the prompt, so that "right" can be checked.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from support.cluster_client import Answer, complete
from support.ops_cluster import OpsCluster, ops_cluster, wait_until
from support.undisturbed import STEP_S, assert_undisturbed, streams_during, undisturbed_ids


@pytest.fixture(scope="module", params=[1, 2], ids=["one router", "two routers"])
def cluster(request: pytest.FixtureRequest) -> Iterator[OpsCluster]:
    """One prefill, one decode, and one or two routers."""
    with ops_cluster(
        BATON_MODEL_NAME="m",
        BATON_CLUSTER_ROUTERS=str(request.param),
        BATON_FAKE_STEP_MS=str(int(STEP_S * 1000)),
        BATON_CHECK="1",
    ) as place:
        place.up()
        yield place


def test_streams_do_not_notice(cluster: OpsCluster) -> None:
    """kill -9 of a router, then a freeze beyond its lease: eight streams do not even pause; a new
    request is served, at the latest by the restarted router; nothing is left behind."""
    ids = undisturbed_ids(cluster)
    new: list[Answer] = []

    def kill() -> None:
        cluster.process("router-0").send(signal.SIGKILL)
        new.append(complete(cluster.port, "m", "while it is away", max_tokens=3))

    def freeze() -> None:
        router = cluster.process("router-0")
        router.send(signal.SIGSTOP)
        time.sleep(2.5)
        router.send(signal.SIGCONT)

    for act in (kill, freeze):
        assert_undisturbed(cluster, streams_during(cluster, act), ids)
    assert new[0].error is None and len(new[0].ids) == 3, f"{new[0]}\n{cluster.logs()}"
    wait_until(lambda: not _busy(cluster), 10, f"everything let go: {cluster.status()}")


def _busy(cluster: OpsCluster) -> int:
    routers = [said for name, said in cluster.reports().items() if name.startswith("router")]
    return sum(sum(said.get("requests", {"silent": 1}).values()) for said in routers)
