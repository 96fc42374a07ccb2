"""Streams on a real cluster that must not notice what happens to processes they do not need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from support.cluster_client import Answer, complete, complete_all
from support.ops_cluster import OpsCluster

STREAMS = 8
STEP_S = 0.02
#: A step takes 20 ms; two cores are shared by seven processes, one of which is being started.
PAUSE_S = 0.5
FIELDS: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}
PROMPTS = [[*f"stream {n}: ".encode(), *b"the quick brown fox " * 4] for n in range(STREAMS)]


def undisturbed_ids(cluster: OpsCluster) -> list[list[int]]:
    """Return the ids of every stream when nothing happens."""
    return [answer.ids for answer in complete_all(cluster.port, "m", PROMPTS, **FIELDS)]


def streams_during(cluster: OpsCluster, act: Callable[[], None]) -> list[Answer]:
    """Run all streams and call ``act`` when each has begun and none is near its end."""
    return stream_all(cluster, [{"prompt": prompt, **FIELDS} for prompt in PROMPTS], act, after=10)


def seeded_requests(topic: str, text: bytes, tokens: int, count: int = 4) -> list[dict[str, Any]]:
    """Return sampled requests of a prompt and a seed of their own each, ``tokens`` long."""
    fields = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1}
    return [
        {"prompt": [*f"{topic} {number}: ".encode(), *text], "seed": number, **fields}
        for number in range(count)
    ]


def stream_all(
    cluster: OpsCluster,
    requests: Sequence[Mapping[str, Any]],
    act: Callable[[], None] | None = None,
    *,
    after: int = 20,
) -> list[Answer]:
    """Stream all ``requests`` at once; call ``act`` when each has ``after`` ids."""
    begun = [threading.Event() for _ in requests]
    answers: list[Answer | None] = [None] * len(requests)

    def one(number: int) -> None:
        def count(ids: int) -> None:
            if ids >= after:
                begun[number].set()

        answers[number] = complete(cluster.port, "m", on_id=count, **requests[number])

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    if act is not None:
        for event in begun:
            assert event.wait(20), cluster.logs()
        act()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), f"silence\n{cluster.logs()}"
    return [answer for answer in answers if answer is not None]


def assert_same_answers(
    cluster: OpsCluster, calm: list[Answer], disturbed: list[Answer], tokens: int
) -> None:
    """Assert that every answer is whole and to the token what it is when nothing happens."""
    for alone, answer in zip(calm, disturbed, strict=True):
        assert answer.error is None and not answer.broken, f"{answer}\n{cluster.logs()}"
        assert answer.ids == alone.ids and answer.text == alone.text
        assert answer.finish == alone.finish
        assert answer.usage is not None and answer.usage["completion_tokens"] == tokens


def assert_undisturbed(cluster: OpsCluster, answers: list[Answer], ids: list[list[int]]) -> None:
    """Assert that every stream was whole, right, and never paused."""
    for number, answer in enumerate(answers):
        assert answer.done and answer.error is None, f"{answer}\n{cluster.logs()}"
        gaps = [b - a for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
        assert max(gaps) < PAUSE_S, f"stream {number} paused for {max(gaps):.2f} s"
    assert [answer.ids for answer in answers] == ids
