"""A real adaptive cluster whose two workers lend each other their cores: answers, metrics, ends.

"Right" is the cluster that lends nothing: how many cores computed a token is no part of it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.cluster_client import complete, complete_all, metric
from support.engine_compiled import library_of
from support.engine_fixtures import model_dir  # noqa: F401 - a fixture
from support.ops_cluster import OpsCluster, ops_cluster, wait_until

CORES = sorted(os.sched_getaffinity(0))[:2]
REFERENCE = Path(__file__).parents[1] / "reference" / "greedy.json"
TOKENS = 24
BORROWED = "baton_engine_borrowed_seconds_total"
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(len(CORES) < 2, reason="there is no other core to borrow"),
]


def _prompts() -> list[list[int]]:
    """Short and long ones."""
    every = [each["prompt"] for each in json.loads(REFERENCE.read_text())["prompts"]]
    return sorted((each for each in every if len(each) <= 700), key=len)[::6]


@contextmanager
def _cluster(folder: Path, lend: str) -> Iterator[OpsCluster]:
    with ops_cluster(
        BATON_ENGINE_KIND="torch",
        BATON_ENGINE_KERNELS="compiled",
        BATON_MODEL_PATH=str(folder),
        BATON_MODEL_NAME="m",
        BATON_MODEL_CACHE_DIR=str(library_of().path.parent.parent),
        BATON_ARENA_SIZE_MB="300",
        BATON_CLUSTER_MODE="adaptive",
        BATON_CORES_PREFILL=str(CORES[0]),
        BATON_CORES_DECODE=str(CORES[1]),
        BATON_CORES_LEND=lend,
        BATON_LIMITS_PREFILL_CHUNK_TOKENS="128",
        BATON_CHECK="1",
    ) as place:
        place.up(wait_s=120)
        yield place


def _answers(place: OpsCluster) -> list[list[int]]:
    """What a few requests get, one after the other and then together."""
    fields: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
    found = [complete(place.port, "m", prompt, **fields) for prompt in _prompts()]
    found += complete_all(place.port, "m", _prompts(), **fields)
    assert all(each.error is None and len(each.ids) == TOKENS for each in found), place.logs()
    return [each.ids for each in found]


def _borrowed_s(place: OpsCluster, worker: str) -> float:
    return metric(place.port, BORROWED, worker=worker)


def test_answers_are_the_same_and_the_time_with_borrowed_cores_is_counted(
    model_dir: Path,  # noqa: F811
) -> None:
    """Each worker knows which core it may borrow, and has borrowed it; without lending neither."""
    with _cluster(model_dir, "off") as place:
        wanted = _answers(place)
        assert metric(place.port, BORROWED) == 0
        assert all(not report.get("may_borrow") for report in place.reports().values())
    with _cluster(model_dir, "auto") as place:
        assert place.reports()["decode-0"]["may_borrow"] == [CORES[0]]
        assert place.reports()["prefill-0"]["may_borrow"] == [CORES[1]]
        assert _answers(place) == wanted
        assert _borrowed_s(place, "decode-0") > 0
        shown = place.baton("status").stdout
        assert f"decode-0 core {CORES[0]}, prefill-0 core {CORES[1]}" in shown

        # One that is killed, in a step or not, has its core lent again when it is back.
        killed = place.process("prefill-0")
        os.kill(killed.pid, signal.SIGKILL)
        wait_until(lambda: place.process("prefill-0") != killed, 30, "prefill is back")
        before = _borrowed_s(place, "decode-0")
        assert _answers(place) == wanted
        assert _borrowed_s(place, "decode-0") > before
