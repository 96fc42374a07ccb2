"""Real routers killed and frozen while streams run: the streams do not pause, nobody is refused.

With the fake engine, whose answer is a function of the prompt, so that "right" can be checked.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from support.cluster_client import Answer, complete, complete_all, metric
from support.ops_cluster import OpsCluster, ops_cluster, wait_until

STREAMS = 8
TOKENS = 150
STEP_S = 0.02
#: A step takes 20 ms; two cores are shared by seven processes, one of which is being started.
PAUSE_S = 0.5
PROMPTS = [[*f"stream {n}: ".encode(), *b"the quick brown fox " * 4] for n in range(STREAMS)]


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


def _streams(cluster: OpsCluster, act: object) -> list[Answer]:
    """Run all streams and call ``act`` when each has begun and none is near its end."""
    begun = [threading.Event() for _ in PROMPTS]
    answers: list[Answer | None] = [None] * STREAMS

    def one(number: int) -> None:
        def count(ids: int) -> None:
            if ids >= 10:
                begun[number].set()

        fields = {"max_tokens": TOKENS, "ignore_eos": True}
        answers[number] = complete(cluster.port, "m", PROMPTS[number], on_id=count, **fields)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    for event in begun:
        assert event.wait(20), cluster.logs()
    assert callable(act)
    act()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive(), f"silence\n{cluster.logs()}"
    return [answer for answer in answers if answer is not None]


def _assert_undisturbed(cluster: OpsCluster, answers: list[Answer]) -> None:
    for number, answer in enumerate(answers):
        assert answer.done and answer.error is None, f"{answer}\n{cluster.logs()}"
        gaps = [b - a for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
        assert max(gaps) < PAUSE_S, f"stream {number} paused for {max(gaps):.2f} s"


def _placements(cluster: OpsCluster) -> float:
    return metric(cluster.port, "baton_attempts_total")


def test_streams_do_not_notice(cluster: OpsCluster) -> None:
    """kill -9 of a router, then a freeze beyond its lease: eight streams do not even pause and are
    not placed again; new requests are served, at the latest by the restarted router."""
    reference = complete_all(cluster.port, "m", PROMPTS, max_tokens=TOKENS, ignore_eos=True)
    _assert_undisturbed(cluster, reference)
    new: list[Answer] = []

    def kill() -> None:
        cluster.process("router-0").send(signal.SIGKILL)
        new.append(complete(cluster.port, "m", b"while it is away".decode(), max_tokens=3))

    def freeze() -> None:
        router = cluster.process("router-0")
        router.send(signal.SIGSTOP)
        time.sleep(2.5)
        router.send(signal.SIGCONT)

    for act in (kill, freeze):
        answers = _streams(cluster, act)
        _assert_undisturbed(cluster, answers)
        assert [each.ids for each in answers] == [each.ids for each in reference]
    assert new[0].error is None and len(new[0].ids) == 3, f"{new[0]}\n{cluster.logs()}"
    wait_until(lambda: not _busy(cluster), 10, f"everything let go: {cluster.status()}")


def _busy(cluster: OpsCluster) -> int:
    rows = [row for row in cluster.status()["processes"] if row["process"].startswith("router")]
    return sum(sum(row["report"]["requests"].values()) for row in rows)
