"""Workers that change their role under load: real processes, the fake engine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from baton.runtime.dirs import arenas_name
from baton.runtime.roles import kept_role
from support.cluster_client import metric
from support.load import Load
from support.ops_cluster import BATON, OpsCluster, ops_cluster, wait_until

SETTINGS = {
    "BATON_FAKE_STEP_MS": "15",
    "BATON_ARENA_SIZE_MB": "16",
    "BATON_CLUSTER_PREFILL": "2",
    "BATON_CLUSTER_DECODE": "2",
}


@pytest.fixture(scope="module")
def pairs() -> Iterator[OpsCluster]:
    """Two of each kind, for tests that take every change back; nothing is left of it all."""
    settings = {**SETTINGS, "BATON_FAKE_PREFILL_MS": "100", "BATON_LIMITS_DRAIN_MS": "5000"}
    with ops_cluster(**settings) as cluster:
        cluster.up()
        yield cluster
        assert cluster.down().returncode == 0
        assert cluster.left_behind() == []


def _roles(cluster: OpsCluster) -> dict[str, str]:
    rows = cluster.status()["processes"]
    return {row["process"]: row["role"] for row in rows if row["role"] in ("prefill", "decode")}


def _arenas(cluster: OpsCluster) -> set[str]:
    """Return whose arenas there are."""
    name = arenas_name("", cluster.run_dir)
    return {path.stem.partition(f"{name}-")[2] for path in cluster.arenas()}


def _change(cluster: OpsCluster, worker: str, role: str) -> None:
    done = cluster.baton("role", worker, role)
    assert done.returncode == 0, done.stdout + done.stderr + cluster.logs()
    assert f"{worker} is {role}" in done.stdout


def test_roles_change_under_load_and_no_client_notices(pairs: OpsCluster) -> None:
    """A decode worker prefills, a prefill worker decodes, and back, under streams and short
    requests: every answer is whole and the one that it would have been, arenas are those of the
    workers that decode, guards are what they were, metrics tell the new role."""
    guards = {row["process"]: row["guard"] for row in pairs.status()["processes"]}
    load = Load(pairs)
    with load.running():
        wait_until(lambda: len(load.answers) > 3, 20.0, "streams run")
        _change(pairs, "decode-1", "prefill")
        assert _arenas(pairs) == {"decode-0"}
        assert _roles(pairs)["decode-1"] == "prefill"
        _change(pairs, "prefill-0", "decode")
        assert _arenas(pairs) == {"decode-0", "prefill-0"}
        _change(pairs, "decode-0", "prefill")
        assert _arenas(pairs) == {"prefill-0"}
        last = pairs.baton("role", "prefill-0", "prefill")
        assert (last.returncode, "last worker that decodes" in last.stderr) == (1, True)
        more = len(load.answers)
        wait_until(lambda: len(load.answers) > more + 6, 20.0, "it serves like that")
        tokens = "baton_generation_tokens_total"
        assert metric(pairs.port, tokens, worker="prefill-0", role="decode") > 0
        _change(pairs, "decode-0", "decode")
        _change(pairs, "decode-1", "decode")
        _change(pairs, "prefill-0", "prefill")
    assert load.wrong() == [], pairs.logs()
    assert guards == {row["process"]: row["guard"] for row in pairs.status()["processes"]}
    audit = pairs.baton("audit")
    assert audit.returncode == 0, audit.stdout


def test_what_is_refused_is_told_with_the_way_out() -> None:
    """Unknown workers, roles that the mode does not know, the last of a kind; nothing changes."""
    with ops_cluster(BATON_CLUSTER_DECODE="2") as cluster:
        cluster.up()
        before = cluster.status()["processes"]
        for worker, role, code, words in (
            ("decode-7", "prefill", 2, "decode-1"),
            ("router-0", "prefill", 2, "is a router"),
            ("decode-0", "mixed", 1, "--mode adaptive"),
            ("prefill-0", "decode", 1, "last prefill worker"),
            ("decode-0", "decode", 0, ""),
        ):
            done = cluster.baton("role", worker, role)
            assert done.returncode == code, done.stdout + done.stderr
            assert words in done.stderr
        same = cluster.status()["processes"]
        assert [row["incarnation"] for row in same] == [row["incarnation"] for row in before]


def test_a_decode_worker_computes_prompts_or_not_at_once() -> None:
    """In adaptive mode mixed and decode differ in nothing but that: no drain, no new process; and
    with prompts computed elsewhere the last prefill worker may leave."""
    settings = {"BATON_CLUSTER_MODE": "adaptive", "BATON_ARENA_SIZE_MB": "16"}
    with ops_cluster(**settings) as cluster:
        cluster.up()
        before = cluster.process("decode-0")
        assert "mixed" in cluster.baton("status").stdout
        _change(cluster, "decode-0", "decode")
        assert "mixed" not in cluster.baton("status").stdout
        assert cluster.process("decode-0") == before
        cluster.ask()
        _change(cluster, "decode-0", "mixed")
        _change(cluster, "prefill-0", "mixed")
        cluster.ask()
        assert cluster.down().returncode == 0
        assert cluster.left_behind() == []


@pytest.mark.parametrize(
    ("name", "role", "victim"),
    [
        ("decode-1", "prefill", "worker"),
        ("prefill-1", "decode", "guard"),
        pytest.param("decode-1", "prefill", "guard", marks=pytest.mark.slow),
        pytest.param("prefill-1", "decode", "worker", marks=pytest.mark.slow),
    ],
)
def test_kill_9_in_the_middle_of_a_change_is_survived(
    pairs: OpsCluster, name: str, role: str, victim: str
) -> None:
    """The word is kept before the worker drains: it comes back as what it was told to be, also if
    its guard dies with it, and no client sees more than a pause."""
    was = _roles(pairs)[name]
    load = Load(pairs)
    with load.running():
        wait_until(lambda: len(load.answers) > 3, 30.0, "streams run")
        worker = pairs.process(name)
        (row,) = [r for r in pairs.status()["processes"] if r["process"] == name]
        change = subprocess.Popen(
            [*BATON, "role", name, role, "--wait", "40"],
            env=pairs.env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wait_until(lambda: kept_role(pairs.run_dir, name) == role, 20.0, "the word is kept")
        if victim == "guard":
            os.kill(row["guard"], signal.SIGKILL)
        else:
            worker.send(signal.SIGKILL)
        said, _ = change.communicate(timeout=60)
        assert change.returncode == 0, said + pairs.logs()
        assert _roles(pairs)[name] == role
    assert load.wrong() == [], said + pairs.logs()
    _change(pairs, name, was)


def test_a_worker_changes_by_itself_when_the_work_has_drifted() -> None:
    """Streams have more to do than the decode workers have places, and prefill has time: one of
    its workers decodes, the other stays, and no client notices."""
    settings = {
        **SETTINGS,
        "BATON_ROLES_AUTO": "on",
        "BATON_ROLES_HOLD_S": "1",
        "BATON_ROLES_SETTLE_S": "1",
        "BATON_LIMITS_BATCH_SEQUENCES_MAX": "1",
    }
    with ops_cluster(**settings) as cluster:
        cluster.up()
        load = Load(cluster)
        with load.running():
            changed = lambda: sorted(_roles(cluster).values()).count("decode") == 3  # noqa: E731
            wait_until(changed, 40.0, f"a prefill worker decodes{cluster.logs()}")
            more = len(load.answers)
            wait_until(lambda: len(load.answers) > more + 6, 20.0, "it serves like that")
            asked = metric(cluster.port, "baton_role_changes_asked_total", wanted="decode")
            assert asked >= 1
            assert metric(cluster.port, "baton_strain", side="decode") > 0.5
        assert sorted(_roles(cluster).values()) == ["decode"] * 3 + ["prefill"]
        assert load.wrong() == [], cluster.logs()
        assert cluster.baton("audit").returncode == 0
        assert cluster.down().returncode == 0
        assert cluster.left_behind() == []
