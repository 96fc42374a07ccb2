"""One request that kills the worker it runs on, among others that do not.

With the fake engine and a stop point that kills the process whenever that request reaches a token.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster_client import Answer, complete, complete_all
from support.ops_cluster import OpsCluster, ops_cluster, wait_until

GOOD = 6
TOKENS = 100
FATAL = 30
PROMPTS = [[*f"request {n}: ".encode(), *b"jumps over the lazy dog"] for n in range(GOOD + 1)]
POISON = GOOD


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[OpsCluster]:
    """One prefill, one decode, which a stop point can kill."""
    with ops_cluster(
        BATON_MODEL_NAME="m",
        BATON_FAKE_STEP_MS="20",
        BATON_FAKE_STOPS_DIR=str(tmp_path),
        BATON_CHECK="1",
    ) as place:
        place.up()
        yield place


def test_a_poison_request_takes_nobody_with_it(cluster: OpsCluster, tmp_path: Path) -> None:
    """It kills decode as often as it may and then fails with an error that says so; the six others,
    in the same batches, get exactly the answers they would have had."""
    fields = {"max_tokens": TOKENS, "ignore_eos": True}
    reference = complete_all(cluster.port, "m", PROMPTS, **fields)
    # First when it decodes that token, then whenever its last ids are computed again for it.
    points = [f"D.step:{FATAL}", "P.before_write"]
    answers: list[Answer | None] = [None] * len(PROMPTS)
    over = threading.Event()
    deaths: list[str] = []

    def arm(request_id: str) -> None:
        def again() -> None:
            while not over.is_set():
                point = points[min(len(deaths), 1)]
                trigger, reached = tmp_path / point, tmp_path / f"{point}.reached"
                half = tmp_path / "half"
                half.write_text(f"kill {request_id}")
                half.rename(trigger)
                while not reached.exists() and not over.wait(0.01):
                    pass
                if reached.exists():
                    deaths.append(point)
                    reached.unlink()
                trigger.unlink(missing_ok=True)

        threading.Thread(target=again, daemon=True).start()

    def one(number: int) -> None:
        begin = arm if number == POISON else None
        answers[number] = complete(cluster.port, "m", PROMPTS[number], on_begin=begin, **fields)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), f"silence after {len(deaths)} deaths\n{cluster.logs()}"
    over.set()
    poison = answers[POISON]
    assert poison is not None and poison.error is not None, f"{poison}\n{cluster.logs()}"
    assert poison.error["code"] == "attempts_exhausted", poison.error
    assert "3 attempts in a row failed" in poison.error["message"]
    assert poison.ids == reference[POISON].ids[: len(poison.ids)]
    assert len(poison.ids) >= FATAL - 1
    for number in range(GOOD):
        answer = answers[number]
        assert answer is not None and answer.done and answer.error is None, cluster.logs()
        assert answer.ids == reference[number].ids
    assert len(deaths) == 3, deaths
    wait_until(
        lambda: complete(cluster.port, "m", PROMPTS[0], **fields).ids == reference[0].ids,
        20,
        "an undisturbed answer",
    )
