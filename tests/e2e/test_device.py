"""A cluster whose KV blocks are on a device: the host in its place, and a GPU where there is one.

The same processes, messages and deaths as elsewhere; only where blocks are differs. The reference
is transformers' own greedy output in float32, as in ``test_real_model``.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cluster_client import complete, metric
from support.engine_device import needs_gpu
from support.engine_fixtures import model_dir  # noqa: F401 - a fixture
from support.ops_cluster import OpsCluster, ops_cluster, wait_until

REFERENCE = Path(__file__).parents[1] / "reference" / "greedy.json"
TOKENS = 8
pytestmark = pytest.mark.model


def _prompt() -> dict[str, Any]:
    """Return the first reference prompt that has some blocks."""
    prompts = json.loads(REFERENCE.read_text())["prompts"]
    found: dict[str, Any] = next(p for p in prompts if 80 <= len(p["prompt"]) <= 400)
    return found


@pytest.fixture(
    params=["memfd", pytest.param("cuda", marks=[needs_gpu, pytest.mark.gpu])], scope="module"
)
def cluster(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[OpsCluster]:  # noqa: F811
    """One prefill, one decode. The host is not asked for row invariance: it takes it a minute."""
    with ops_cluster(
        BATON_ENGINE_KIND="torch",
        BATON_ENGINE_DEVICE=request.param,
        BATON_ENGINE_INVARIANCE="on" if request.param == "cuda" else "off",
        BATON_MODEL_PATH=str(model_dir),
        BATON_MODEL_NAME="m",
        BATON_MODEL_DTYPE="float32",
        BATON_ARENA_SIZE_MB="64",
        BATON_CHECK="1",
    ) as place:
        place.up(wait_s=120)
        yield place


def _ask(cluster: OpsCluster) -> list[int]:
    fields = {"max_tokens": TOKENS, "ignore_eos": True}
    answer = complete(cluster.port, "m", _prompt()["prompt"], **fields)
    assert answer.error is None, cluster.logs()
    return answer.ids


def _serves(cluster: OpsCluster) -> bool:
    reports = cluster.reports()
    return bool(reports["decode-0"].get("writers")) and bool(cluster.status()["ready"])


def test_prefill_hands_over_on_the_device(cluster: OpsCluster) -> None:
    """Prefill computed the prompt in decode's memory, which the keeper handed out; the ids are
    transformers' own, and the file in shared memory has no bytes of blocks."""
    wait_until(lambda: _serves(cluster), 60, "ready")
    assert _ask(cluster) == _prompt()["output"][:TOKENS]
    assert metric(cluster.port, "baton_handovers_total", worker="decode-0") > 0
    arena = Path(cluster.reports()["decode-0"]["arena"]["path"])
    assert arena.stat().st_size < 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_start_says_why(model_dir: Path) -> None:  # noqa: F811
    """Neither a trace of torch's nor a start that is tried for ever."""
    with ops_cluster(
        BATON_ENGINE_KIND="torch", BATON_ENGINE_DEVICE="cuda", BATON_MODEL_PATH=str(model_dir)
    ) as place:
        done = place.baton("up", "--wait", "60")
        assert done.returncode == 78, done.stdout + done.stderr
        assert "built without CUDA" in done.stderr or "finds no CUDA device" in done.stderr


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("prefill-0", marks=pytest.mark.slow),
        pytest.param("keeper", marks=pytest.mark.slow),
        "decode-0",
    ],
)
def test_a_death_changes_no_answer(cluster: OpsCluster, victim: str) -> None:
    """Decode's successor takes its blocks over from the keeper, also from one that was started
    anew meanwhile; a dead keeper costs nobody anything."""
    wait_until(lambda: _serves(cluster), 60, "ready")
    process = cluster.process(victim)
    process.send(signal.SIGKILL)
    wait_until(lambda: cluster.process(victim) != process and _serves(cluster), 90, "ready again")
    assert _ask(cluster) == _prompt()["output"][:TOKENS]
    if victim == "decode-0":
        taken_over = cluster.reports()["decode-0"]["arena"]["taken_over"]
        assert taken_over and taken_over["kept"], cluster.logs()


def test_it_stops_and_leaves_nothing_behind(cluster: OpsCluster) -> None:
    """The keeper is the last but the ledger to go: whoever ends before tells it to forget."""
    done = cluster.down()
    assert done.returncode == 0, done.stdout + done.stderr
    assert cluster.left_behind() == []
