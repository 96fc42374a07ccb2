"""Replacing processes under load: real processes, the fake engine, streams that must not notice."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.cluster_client import Answer, complete, get
from support.ops_cluster import OpsCluster, ops_cluster, wait_until

#: Long enough that a stream lives through several restarts.
TOKENS = 150
PROMPTS = [[(17 * number + place) % 90 + 1 for place in range(40)] for number in range(3)]


class Load:
    """Streams that start anew when they end, and short requests in between."""

    def __init__(self, cluster: OpsCluster) -> None:
        self.port = cluster.port
        self.model = json.loads(get(self.port, "/v1/models")[1])["data"][0]["id"]
        self.undisturbed = [self._ask(prompt).ids for prompt in PROMPTS]
        self.answers: list[tuple[int, Answer]] = []
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number, tokens))
            for number in range(len(PROMPTS))
            for tokens in (TOKENS, 4)
        ]

    def _ask(self, prompt: list[int], tokens: int = TOKENS) -> Answer:
        return complete(self.port, self.model, prompt, max_tokens=tokens, ignore_eos=True)

    def _run(self, number: int, tokens: int) -> None:
        while not self._stopped.is_set():
            answer = self._ask(PROMPTS[number], tokens)
            self.answers.append((number, answer))
            time.sleep(0.05 if answer.finish else 0.5)

    def wrong(self) -> list[str]:
        """Return what every answer was that is not the undisturbed one, or its beginning."""
        return [
            f"{answer.status} {answer.error or answer.broken} {len(answer.ids)} ids"
            for number, answer in self.answers
            if answer.finish != "length"
            or answer.ids != self.undisturbed[number][: len(answer.ids)]
            or len(answer.ids) not in (TOKENS, 4)
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the streams, and let each end."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            for thread in self._threads:
                thread.join()


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
