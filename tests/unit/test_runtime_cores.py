"""Cores: the plan for one core, two, many, a quota, and named cores."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from baton.runtime import cores
from baton.runtime.config import ConfigError, load
from baton.runtime.cores import Placement, cgroup_cores, plan_cores

SPLIT = {"BATON_CLUSTER_MODE": "split"}


@pytest.fixture(autouse=True)
def flat_topology(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every core of the plan is a physical core, whatever this host looks like."""
    monkeypatch.setattr(cores, "_CPUS", tmp_path)


def test_one_core_pins_nothing() -> None:
    """With one core nobody is pinned and everybody computes in one thread."""
    plan = plan_cores(load(None, {}), {3}, math.inf)
    assert set(plan.workers.values()) == {Placement((), 1)}


def test_two_cores_give_decode_its_own() -> None:
    """With two cores decode has one to itself; everything else shares prefill's."""
    plan = plan_cores(load(None, SPLIT), {0, 1}, math.inf)
    assert plan.workers == {
        "router-0": Placement((0,), 1),
        "decode-0": Placement((1,), 1),
        "prefill-0": Placement((0,), 1),
        "gateway-0": Placement((0,), 1),
    }
    assert plan.rest == Placement((0,), 1)


def test_many_cores_are_shared_out() -> None:
    """Workers of a role have disjoint cores and a thread for each of them."""
    config = load(None, {**SPLIT, "BATON_CLUSTER_PREFILL": "2", "BATON_CLUSTER_DECODE": "3"})
    plan = plan_cores(config, range(8), math.inf)
    assert plan.workers["prefill-0"] == Placement((0, 1), 2)
    assert plan.workers["prefill-1"] == Placement((2, 3), 2)
    assert [plan.workers[f"decode-{n}"].cores for n in range(3)] == [(4, 5), (6,), (7,)]
    assert plan.workers["gateway-0"].cores == (0, 1, 2, 3)


def test_more_workers_than_cores() -> None:
    """Workers that must share cores get one thread each."""
    plan = plan_cores(load(None, {**SPLIT, "BATON_CLUSTER_DECODE": "4"}), {0, 1}, math.inf)
    assert [plan.workers[f"decode-{n}"] for n in range(4)] == [Placement((1,), 1)] * 4


def test_colocated_uses_all() -> None:
    """A colocated worker has all cores, the same that split mode divides."""
    plan = plan_cores(load(None, {"BATON_CLUSTER_MODE": "colocated"}), {0, 1}, math.inf)
    assert plan.workers["decode-0"] == Placement((0, 1), 2)
    assert "prefill-0" not in plan.workers


def borrows(cores: int = 2, **settings: str) -> dict[str, tuple[int, ...]]:
    """Which worker may borrow which cores."""
    plan = plan_cores(load(None, settings), range(cores), math.inf)
    return {
        name: placement.borrows for name, placement in plan.workers.items() if placement.borrows
    }


ADAPTIVE = {"BATON_CLUSTER_MODE": "adaptive"}


def test_in_adaptive_mode_workers_lend_each_other_their_cores() -> None:
    """Those of all others, whatever these do; routers and gateways compute nothing."""
    assert borrows(**ADAPTIVE) == {"decode-0": (0,), "prefill-0": (1,)}
    more = borrows(6, **ADAPTIVE, BATON_CLUSTER_DECODE="2")
    assert more == {
        "decode-0": (0, 1, 2, 5),
        "decode-1": (0, 1, 2, 3, 4),
        "prefill-0": (3, 4, 5),
    }


def test_pure_modes_lend_when_they_are_told_to() -> None:
    """And adaptive mode does not when it is told not to."""
    for mode in ("split", "colocated"):
        assert borrows(BATON_CLUSTER_MODE=mode, BATON_CLUSTER_DECODE="2") == {}
    assert borrows(BATON_CORES_LEND="on") == {"decode-0": (0,), "prefill-0": (1,)}
    two = {"BATON_CLUSTER_MODE": "colocated", "BATON_CLUSTER_DECODE": "2"}
    assert borrows(**two, BATON_CORES_LEND="on") == {"decode-0": (1,), "decode-1": (0,)}
    assert borrows(**ADAPTIVE, BATON_CORES_LEND="off") == {}


def test_a_core_of_several_workers_is_lent_to_nobody() -> None:
    """None of them could say that it is idle. Nor is one of a worker that is not pinned."""
    assert borrows(**ADAPTIVE, BATON_CLUSTER_DECODE="4") == {f"decode-{n}": (0,) for n in range(4)}
    assert borrows(**ADAPTIVE, BATON_CORES_PIN="off", BATON_CORES_LEND="on") == {}


@pytest.mark.parametrize(("quota", "threads"), [(2.0, 1), (0.5, 1), (8.0, 4)])
def test_quota_limits_threads(quota: float, threads: int) -> None:
    """Below a cgroup's quota nobody is pinned, and the quota is what threads are shared from."""
    plan = plan_cores(load(None, {}), range(64), quota)
    assert plan.workers["decode-0"] == Placement((), threads)
    assert plan.workers["prefill-0"] == Placement((), threads)


def test_named_cores(tmp_path: Path) -> None:
    """Cores named in the settings are used; one that is not available is an error."""
    config = load(None, {**SPLIT, "BATON_CORES_DECODE": "0", "BATON_ENGINE_THREADS": "3"})
    plan = plan_cores(config, {0, 1, 2}, math.inf)
    assert plan.workers["decode-0"] == Placement((0,), 3)
    assert plan.workers["prefill-0"].cores == (1, 2)
    with pytest.raises(ConfigError, match=r"names core 0 \(from env:BATON_CORES_DECODE\)"):
        plan_cores(config, {1, 2}, math.inf)
    assert plan_cores(load(None, {"BATON_CORES_PIN": "off"}), {0, 1}, 2.0).rest.cores == ()


def test_hardware_threads_stay_together(tmp_path: Path) -> None:
    """Two hardware threads of one core are on one side of the split."""
    for core, physical in enumerate((0, 1, 0, 1)):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0")
        (folder / "core_id").write_text(str(physical))
    plan = plan_cores(load(None, {}), range(4), math.inf)
    assert plan.workers["prefill-0"].cores == (0, 2)
    assert plan.workers["decode-0"].cores == (1, 3)


def test_cgroup_quota_is_the_least_above(tmp_path: Path) -> None:
    """The tightest limit on the way from the process's group to the root counts."""
    group = tmp_path / "fs" / "pod" / "box"
    group.mkdir(parents=True)
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pod/box\n")
    (group / "cpu.max").write_text("max 100000\n")
    assert cgroup_cores(tmp_path / "fs", membership) == math.inf
    (group.parent / "cpu.max").write_text("150000 100000\n")
    assert cgroup_cores(tmp_path / "fs", membership) == 1.5
    old = tmp_path / "fs" / "cpu,cpuacct" / "pod"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("50000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    membership.write_text("4:cpu,cpuacct:/pod\n3:memory:/x\n")
    assert cgroup_cores(tmp_path / "fs", membership) == 0.5


def test_threads_of_libraries() -> None:
    """Thread counts reach numeric libraries through the environment, spinning is off."""
    environ: dict[str, str] = {}
    cores.set_threads(Placement((), 2), environ)
    assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == "2"
    assert environ["OPENBLAS_NUM_THREADS"] == "1"
    assert environ["OMP_WAIT_POLICY"] == "PASSIVE"
