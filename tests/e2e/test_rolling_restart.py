"""Replacing processes under load: real processes, the fake engine, streams that must not notice."""

from __future__ import annotations

import pytest

from support.load import Load
from support.ops_cluster import OpsCluster, ops_cluster, wait_until


def _incarnations(cluster: OpsCluster) -> dict[str, object]:
    rows = cluster.status()["processes"]
    return {row["process"]: row["incarnation"] or row["pid"] for row in rows}


SHAPES = {
    "1P1D": {},
    "2P2D2R2G": {f"BATON_CLUSTER_{n}": "2" for n in ("PREFILL", "DECODE", "ROUTERS", "GATEWAYS")},
}


@pytest.mark.parametrize("shape", ["1P1D", pytest.param("2P2D2R2G", marks=pytest.mark.slow)])
def test_everything_is_replaced_and_no_client_notices(shape: str) -> None:
    """`restart --rolling` under streams and short requests: every process is another one, every
    answer is whole and the one that it would have been."""
    settings = {"BATON_FAKE_STEP_MS": "15", "BATON_ARENA_SIZE_MB": "16", **SHAPES[shape]}
    with ops_cluster(**settings) as cluster:
        cluster.up()
        before = _incarnations(cluster)
        load = Load(cluster)
        with load.running():
            done = cluster.baton("restart", "--rolling")
        assert done.returncode == 0, done.stdout + done.stderr + cluster.logs()
        assert load.wrong() == [], done.stdout + cluster.logs()
        after = _incarnations(cluster)
        assert set(before) == set(after)
        assert not set(before.items()) & set(after.items())
        assert cluster.down().returncode == 0
        assert cluster.left_behind() == []


def test_a_drained_worker_gives_its_streams_away_stays_down_and_comes_back() -> None:
    """The last of its kind drains only by force; unknown and stopped ones are told."""
    with ops_cluster(BATON_CLUSTER_DECODE="2", BATON_FAKE_STEP_MS="15") as cluster:
        cluster.up()
        load = Load(cluster)
        with load.running():
            wait_until(lambda: len(load.answers) > 3, 20.0, "streams run")
            done = cluster.baton("drain", "decode-0")
            assert done.returncode == 0, done.stdout + done.stderr
            again = cluster.baton("drain", "decode-0")
            assert (again.returncode, "does not run" in again.stderr) == (1, True)
            last = cluster.baton("drain", "decode-1")
            assert (last.returncode, "--force" in last.stderr) == (1, True)
            rows = {row["process"]: row["state"] for row in cluster.status()["processes"]}
            assert rows["decode-0"] == "stopped"
            done = cluster.baton("start", "decode-0")
            assert done.returncode == 0, done.stdout + done.stderr
        assert load.wrong() == [], cluster.logs()
        unknown = cluster.baton("drain", "decode-7")
        assert (unknown.returncode, "decode-1" in unknown.stderr) == (2, True)
        assert cluster.baton("restart").returncode == 2
        assert cluster.down().returncode == 0
    nobody = cluster.baton("restart", "--rolling")
    assert (nobody.returncode, "no cluster" in nobody.stderr) == (1, True)
