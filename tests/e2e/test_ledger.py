"""The real ledger frozen and emptied under a running cluster: streams do not notice, nobody exits.

Its death is in ``test_deaths.py``, its own faults in ``integration/test_ledger_faults.py``.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
import redis

from baton.runtime.dirs import LEDGER_SOCKET
from support.cluster_client import Answer, complete
from support.ops_cluster import OpsCluster, ops_cluster, wait_until
from support.undisturbed import STEP_S, assert_undisturbed, streams_during, undisturbed_ids

#: Beyond the lease: every process is suspect by then.
FROZEN_S = 3.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[OpsCluster]:
    """One of each."""
    with ops_cluster(
        BATON_MODEL_NAME="m", BATON_FAKE_STEP_MS=str(int(STEP_S * 1000)), BATON_CHECK="1"
    ) as place:
        place.up()
        yield place


def _processes(cluster: OpsCluster) -> dict[str, int]:
    return {row["process"]: row["pid"] for row in cluster.status()["processes"]}


def _serves(cluster: OpsCluster) -> bool:
    return complete(cluster.port, "m", "again", max_tokens=2).error is None


def test_a_frozen_ledger_costs_nobody_a_lease(cluster: OpsCluster) -> None:
    """(44) Streams go on; a request that comes meanwhile waits or is told to come back; after the
    thaw the same processes serve within two seconds."""
    ids, before = undisturbed_ids(cluster), _processes(cluster)
    meanwhile: list[Answer] = []

    def freeze() -> None:
        ledger = cluster.process("ledger")
        ledger.send(signal.SIGSTOP)
        try:
            time.sleep(FROZEN_S / 2)
            meanwhile.append(complete(cluster.port, "m", "meanwhile", max_tokens=2))
            time.sleep(FROZEN_S / 2)
        finally:
            ledger.send(signal.SIGCONT)

    answers = streams_during(cluster, freeze)
    assert_undisturbed(cluster, answers, ids)
    wait_until(lambda: _serves(cluster), 5, "an answer after the thaw")
    assert _processes(cluster) == before
    told = meanwhile[0]
    assert told.error is None or (told.status, told.error["code"]) == (503, "ledger_unavailable")


def test_an_emptied_ledger_is_told_everything_again(cluster: OpsCluster) -> None:
    """(112) FLUSHALL under eight streams: they go on, everybody registers again, and the requests
    that ended afterwards leave nothing but what expires."""
    ids, before = undisturbed_ids(cluster), _processes(cluster)
    server = redis.Redis(unix_socket_path=str(cluster.run_dir / LEDGER_SOCKET))

    def flush() -> None:
        server.flushall()
        wait_until(lambda: _serves(cluster), 5, "an answer after the loss")

    assert_undisturbed(cluster, streams_during(cluster, flush), ids)
    assert _processes(cluster) == before
    keys = [key for key in server.scan_iter("*:request:*") if server.ttl(key) < 0]
    live = [key for key in server.scan_iter("*:request:*") if not server.hexists(key, "outcome")]
    server.close()
    assert (keys, live) == ([], [])
