"""Real processes killed in the middle of a request: one killed process costs nobody his answer.

With the fake engine, whose answer is a function of the prompt, so that "right" can be checked.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from baton.cli.supervisor import Supervisor
from support.cluster_client import Answer, complete, complete_all, get
from support.ops_cluster import OpsCluster, ops_cluster, wait_until

TEXT = b"The quick brown fox jumps over the lazy dog. "
TOKENS = 60
#: 372 tokens in chunks of 64, 300 ms each: to be hit in the middle. Whoever is hit later is asked
#: for less.
LONG, SHORT = 8, 2
PREFILL_S = 1.8
#: Longer than two leases.
FROZEN_S = 5.0


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


def _quiet(cluster: OpsCluster) -> bool:
    """Whether nothing is held for anybody."""
    said = cluster.reports()
    decode, prefill, router = (said[name] for name in ("decode-0", "prefill-0", "router-0"))
    if not (decode and prefill and router):
        return False
    busy = sum(
        count for state, count in decode["blocks"].items() if state not in ("free", "cached")
    )
    live = sum(decode["sequences"].values()) + sum(router["requests"].values())
    return bool(busy + live + decode["tickets"] + prefill["jobs"] == 0)


def _ask_and_kill(
    cluster: OpsCluster,
    victim: str,
    after: int,
    prompt: list[int],
    how: signal.Signals = signal.SIGKILL,
) -> Answer:
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
    process.send(how)
    thaw = threading.Timer(FROZEN_S, process.send, (signal.SIGCONT,))
    if how is signal.SIGSTOP:
        thaw.start()
    client.join(25)
    thaw.cancel()
    assert not client.is_alive(), f"silence after the death of {victim}\n{cluster.logs()}"
    return found[0]


@pytest.mark.parametrize("after", [0, 1, 20])
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "router-0"])
def test_killed_process(cluster: OpsCluster, victim: str, after: int) -> None:
    """The client gets its exact answer, whoever died; the process is started again."""
    prompt = [*f"{victim} {after} ".encode(), *TEXT * (SHORT if after else LONG)]
    _serves(cluster, list(TEXT), 1)
    old = cluster.process(victim)
    answer = _ask_and_kill(cluster, victim, after, prompt)
    assert answer.error is None, f"{answer}\n{cluster.logs()}"
    assert answer.done and not answer.broken, f"{answer}\n{cluster.logs()}"
    assert len(answer.ids) == TOKENS
    assert answer.ids == _serves(cluster, prompt).ids, "a wrong token"
    assert cluster.process(victim) != old, "the supervisor did not start it again"


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "after"), [("prefill-0", 0), ("router-0", 0), ("router-0", 20)])
def test_asked_to_end(cluster: OpsCluster, victim: str, after: int) -> None:
    """(54) SIGTERM cuts nothing that runs, ends with 0, and nobody starts it again unasked."""
    prompt = [*f"term {victim} {after} ".encode(), *TEXT * LONG]
    _serves(cluster, list(TEXT), 1)
    answer = _ask_and_kill(cluster, victim, after, prompt, signal.SIGTERM)
    assert answer.error is None and answer.done, f"{answer}\n{cluster.logs()}"

    def ended() -> bool:
        states = {each["name"]: each for each in Supervisor(cluster.run_dir).processes()}
        return (states[victim]["statename"], states[victim]["exitstatus"]) == ("EXITED", 0)

    wait_until(ended, 10, f"{victim} has ended with 0")
    assert cluster.baton("start", victim).returncode == 0
    assert answer.ids == _serves(cluster, prompt).ids


@pytest.mark.slow
def test_frozen_prefill(cluster: OpsCluster) -> None:
    """(8) The only one stands still in the middle of a prompt: one answer, late, and exact."""
    prompt = [*b"frozen ", *TEXT * LONG]
    _serves(cluster, list(TEXT), 1)
    answer = _ask_and_kill(cluster, "prefill-0", 0, prompt, signal.SIGSTOP)
    assert answer.error is None and answer.done, f"{answer}\n{cluster.logs()}"
    assert answer.ids == _serves(cluster, prompt).ids


@pytest.mark.slow
def test_health_follows_the_only_decode(cluster: OpsCluster) -> None:
    """(45) Without it nothing could be served, and readiness says so; the process is alive."""
    _serves(cluster, list(TEXT), 1)
    assert get(cluster.port, "/health/ready")[0] == 200
    cluster.process("decode-0").send(signal.SIGTERM)
    wait_until(lambda: get(cluster.port, "/health/ready")[0] == 503, 2.5, "readiness says so")
    assert b"no_decode_worker" in get(cluster.port, "/health/ready")[1]
    assert get(cluster.port, "/health/live")[0] == get(cluster.port, "/v1/models")[0] == 200
    assert cluster.baton("start", "decode-0").returncode == 0
    wait_until(lambda: get(cluster.port, "/health/ready")[0] == 200, 5, "ready again")
    _serves(cluster, list(TEXT), 1)


def test_a_prompt_that_prefill_cannot_compute(cluster: OpsCluster) -> None:
    """(5, 11) Eight of them: one error each, soon and with a name; a ninth, sound one is answered,
    decode has made no step for the others, and nothing is left of them."""
    _serves(cluster, list(TEXT), 1)
    hopeless = [*b"[[forced 99999]]"]
    answers = complete_all(cluster.port, "m", [hopeless] * 8 + [list(b"a sound one")], max_tokens=8)
    *failed, sound = answers
    for answer in failed:
        assert answer.status == 500 and not answer.ids, answer
        assert answer.error is not None and answer.error["code"] == "prefill_error"
    assert sound.error is None and len(sound.ids) == 8
    wait_until(lambda: _quiet(cluster), 5, f"everything free: {cluster.status()}")


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

    wait_until(lambda: _quiet(cluster), 10, f"everything free: {cluster.status()}")
