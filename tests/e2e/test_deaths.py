"""Real processes killed in the middle of a request: a right answer or a clear error, never silence.

With the fake engine, whose answer is a function of the prompt, so that "right" can be checked.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from support.cluster_client import Answer, complete
from support.ops_cluster import OpsCluster, ops_cluster, wait_until

TEXT = b"The quick brown fox jumps over the lazy dog. "
TOKENS = 60
#: 372 tokens in chunks of 64, 300 ms each: to be hit in the middle. Whoever is hit later is asked
#: for less.
LONG, SHORT = 8, 2
PREFILL_S = 1.8


@pytest.fixture(scope="module")
def cluster() -> Iterator[OpsCluster]:
    """One prefill, one decode, slow enough to be hit in the middle."""
    with ops_cluster(
        BATON_MODEL_NAME="m",
        BATON_FAKE_STEP_MS="20",
        BATON_FAKE_PREFILL_MS="300",
        BATON_LIMITS_PREFILL_CHUNK_TOKENS="64",
        BATON_CHECK="1",
    ) as place:
        place.up()
        yield place


def _serves(cluster: OpsCluster, prompt: list[int], tokens: int = TOKENS) -> Answer:
    """Return an undisturbed answer, once the cluster gives one again."""
    answers: list[Answer] = []

    def served() -> bool:
        answers.append(complete(cluster.port, "m", prompt, max_tokens=tokens, ignore_eos=True))
        return answers[-1].error is None

    wait_until(served, 20, "an answer")
    return answers[-1]


def _ask_and_kill(cluster: OpsCluster, victim: str, after: int, prompt: list[int]) -> Answer:
    """Ask; kill ``victim`` when ``after`` ids have come, or (0) while the prompt is computed."""
    found: list[Answer] = []
    reached = threading.Event()

    def count(ids: int) -> None:
        if ids >= after:
            reached.set()

    client = threading.Thread(
        target=lambda: found.append(
            complete(cluster.port, "m", prompt, max_tokens=TOKENS, ignore_eos=True, on_id=count)
        )
    )
    process = cluster.process(victim)
    client.start()
    if after:
        assert reached.wait(20), cluster.logs()
    else:
        client.join(PREFILL_S / 2)
        assert not reached.is_set(), "the prompt was computed too soon for this test"
    process.send(signal.SIGKILL)
    client.join(25)
    assert not client.is_alive(), f"silence after the death of {victim}\n{cluster.logs()}"
    return found[0]


@pytest.mark.parametrize("after", [0, 1, 20])
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "router-0"])
def test_killed_process(cluster: OpsCluster, victim: str, after: int) -> None:
    """The client gets its exact answer or a named error within 10 s; the process serves again."""
    prompt = [*f"{victim} {after} ".encode(), *TEXT * (SHORT if after else LONG)]
    _serves(cluster, list(TEXT), 1)
    old = cluster.process(victim)
    answer = _ask_and_kill(cluster, victim, after, prompt)
    assert not answer.broken, f"{answer}\n{cluster.logs()}"
    assert answer.clear, f"no outcome: {answer}\n{cluster.logs()}"
    again = _serves(cluster, prompt)
    assert len(again.ids) == TOKENS
    assert answer.ids == again.ids[: len(answer.ids)], "a wrong token"
    if answer.error is None:
        assert answer.ids == again.ids
        assert answer.done
    else:
        assert answer.error["code"], answer.error
        assert not answer.done
        # An error is bounded by recovery_ms; a right answer takes as long as it takes.
        assert answer.seconds < 10 + 2 * PREFILL_S
    assert cluster.process(victim) != old, "the supervisor did not start it again"


def test_killed_ledger(cluster: OpsCluster) -> None:
    """A running stream does not notice the ledger's death, and new requests are served again."""
    prompt = [*b"ledger ", *TEXT * SHORT]
    _serves(cluster, list(TEXT), 1)
    answer = _ask_and_kill(cluster, "ledger", 5, prompt)
    assert answer.error is None, f"{answer}\n{cluster.logs()}"
    assert answer.ids == _serves(cluster, prompt).ids


def test_disconnect_frees_everything(cluster: OpsCluster) -> None:
    """A client that leaves in any stage leaves no sequence, ticket or block behind."""
    _serves(cluster, list(TEXT), 1)
    for wait_s in (0.0, 0.2, 0.6, 2.5):
        connection = HTTPConnection("127.0.0.1", cluster.port, timeout=20)
        body = (
            '{"model":"m","stream":true,"max_tokens":4000,"ignore_eos":true,"prompt":"'
            + f"leave after {wait_s} " * 20
            + '"}'
        )
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        threading.Event().wait(wait_s)
        connection.close()

    def quiet() -> bool:
        said = cluster.reports()
        decode, prefill, router = (said[name] for name in ("decode-0", "prefill-0", "router-0"))
        if not (decode and prefill and router):
            return False
        busy = sum(
            count for state, count in decode["blocks"].items() if state not in ("free", "cached")
        )
        live = sum(decode["sequences"].values()) + sum(router["requests"].values())
        return busy + live + decode["tickets"] + prefill["jobs"] == 0

    wait_until(quiet, 10, f"everything free: {cluster.status()}")
