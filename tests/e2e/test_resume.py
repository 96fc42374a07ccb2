"""Gateways killed in the middle of a stream, with real processes: the client resumes at another."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException

import pytest
import redis

from baton.runtime.dirs import LEDGER_SOCKET
from support.cluster_client import Answer, complete
from support.ops_cluster import OpsCluster, ops_cluster, wait_until

TOKENS = 60
#: A quarter of a minute.
LONG = 700
STREAMS = {"tell me": TOKENS, "another one": TOKENS, "told again": LONG // 2, "a long one": LONG}
HEADERS = {"Content-Type": "application/json", "X-Baton-Resume": "30"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[OpsCluster]:
    """Two gateways on one socket, slow enough to be hit in the middle."""
    with ops_cluster(
        BATON_MODEL_NAME="m",
        BATON_CLUSTER_GATEWAYS="2",
        BATON_FAKE_STEP_MS="20",
        BATON_LIMITS_RESTART_MS="1500",
        BATON_CHECK="1",
    ) as place:
        place.up()
        yield place


class Client:
    """One stream: its events, and the token that resumes it."""

    def __init__(self, cluster: OpsCluster, prompt: str) -> None:
        self.cluster = cluster
        tokens = STREAMS[prompt]
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        self.body = json.dumps({**body, "stream": True, "temperature": 0})
        self.events: list[bytes] = []
        self.token = ""
        self.done = False

    def begin(self, upto: int | None = None) -> None:
        self._read("POST", "/v1/completions", self.body, HEADERS, upto)

    def resume(self) -> None:
        """Come back until somebody has told the rest."""

        def told() -> bool:
            last = self.events[-1].split(b"\n")[0].removeprefix(b"id: ").decode()
            path = f"/v1/requests/{self.token}/events"
            self._read("GET", path, None, {"Last-Event-ID": last}, None)
            return self.done

        wait_until(told, 30, f"the rest of the stream: {self.cluster.logs()}")

    def _read(
        self, method: str, path: str, body: str | None, headers: dict[str, str], upto: int | None
    ) -> None:
        self.connection = HTTPConnection("127.0.0.1", self.cluster.port, timeout=20)
        try:
            self.connection.request(method, path, body, headers)
            response = self.connection.getresponse()
            if response.status != 200:
                assert response.status == 503, response.read()
                return
            self.token = response.headers["X-Baton-Resume-Token"]
            event = b""
            while line := response.readline():
                event += line
                if line == b"\n":
                    if event.startswith(b"id:"):
                        self.events.append(event)
                    self.done = self.done or b"[DONE]" in event
                    event = b""
                    if upto is not None and len(self.events) >= upto:
                        return
        except (OSError, HTTPException):
            pass

    def event_ids(self) -> list[bytes]:
        return [event.split(b"\n")[0] for event in self.events]

    def text(self) -> str:
        said = [event.split(b"data: ")[1].strip() for event in self.events]
        chunks = [json.loads(each) for each in said if each != b"[DONE]"]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.fixture(scope="module")
def calm(cluster: OpsCluster) -> dict[str, Client]:
    """Every stream as it is when nothing happens, all at once."""
    clients = {prompt: Client(cluster, prompt) for prompt in STREAMS}
    threads = [threading.Thread(target=each.begin) for each in clients.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each.done for each in clients.values()), cluster.logs()
    return clients


def serving(cluster: OpsCluster) -> str:
    """Return the gateway that has a request now."""
    (name,) = [each for each, said in cluster.reports().items() if said.get("sessions")]
    return name


def test_a_stream_survives_the_death_of_its_gateway(
    cluster: OpsCluster, calm: dict[str, Client]
) -> None:
    """``kill -9`` in the middle; the text is that of the undisturbed run, each event had once."""
    assert len(calm["tell me"].text()) >= TOKENS
    cut = Client(cluster, "tell me")
    cut.begin(upto=12)
    cluster.process(serving(cluster)).send(signal.SIGKILL)
    cut.connection.close()
    cut.resume()
    ids = cut.event_ids()
    assert len(set(ids)) == len(ids), "an event came twice"
    assert ids == calm["tell me"].event_ids()
    assert cut.text() == calm["tell me"].text()


def test_a_cut_connection_is_resumed(cluster: OpsCluster, calm: dict[str, Client]) -> None:
    """The client's socket breaks; whichever gateway takes the next one goes on, twice."""
    wait_until(lambda: len(gateways(cluster)) == 2, 20, "both gateways")
    cut = Client(cluster, "another one")
    cut.begin(upto=5)
    cut.connection.close()
    cut.resume()
    assert cut.text() == calm["another one"].text()
    again = Client(cluster, "another one")
    again.token, again.events = cut.token, cut.events[:7]
    again.resume()
    assert again.events == cut.events, "complete, and told again from the middle"


def test_an_emptied_ledger_learns_the_tokens_again(
    cluster: OpsCluster, calm: dict[str, Client]
) -> None:
    """FLUSHALL under a stream, and then its gateway dies: the other one is shown a token that the
    ledger knows from the dead one, and tells the rest."""
    wait_until(lambda: len(gateways(cluster)) == 2, 20, "both gateways")
    cut = Client(cluster, "told again")
    cut.begin(upto=12)
    serves = serving(cluster)
    server = redis.Redis(unix_socket_path=str(cluster.run_dir / LEDGER_SOCKET))
    server.flushall()
    wait_until(lambda: list(server.scan_iter("*:resumable:*")), 10, "the token's record")
    server.close()
    cluster.process(serves).send(signal.SIGKILL)
    cut.connection.close()
    cut.resume()
    assert cut.text() == calm["told again"].text()
    assert cut.event_ids() == calm["told again"].event_ids()


def test_a_restart_does_not_wait_for_streams_that_do_not_end(
    cluster: OpsCluster, calm: dict[str, Client]
) -> None:
    """Both gateways are started anew under streams that take much longer than ``restart_ms``: who
    can resume has every event once, everybody else hears why."""
    wait_until(lambda: len(gateways(cluster)) == 2, 20, "both gateways")
    lasting, plain = Client(cluster, "a long one"), Answer()

    def stream() -> None:
        nonlocal plain
        plain = complete(cluster.port, "m", "a long one", max_tokens=LONG, ignore_eos=True)

    threads = [threading.Thread(target=each) for each in (lasting.begin, stream)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(lasting.events) > 3, 20, "the stream runs")
    before = {name: cluster.reports()[name]["incarnation"] for name in gateways(cluster)}
    done = cluster.baton("restart", "gateway-0", "gateway-1")
    assert done.returncode == 0, done.stdout + done.stderr
    after = {name: cluster.reports()[name]["incarnation"] for name in gateways(cluster)}
    assert before.keys() == after.keys() and not set(before.values()) & set(after.values())
    for thread in threads:
        thread.join()
    assert plain.error is not None and plain.error["code"] == "draining"
    assert 0 < len(plain.ids) < LONG
    assert not lasting.done, "it was ended in the middle"
    lasting.resume()
    assert lasting.text() == calm["a long one"].text()
    assert lasting.event_ids() == calm["a long one"].event_ids()


def gateways(cluster: OpsCluster) -> list[str]:
    return [name for name, said in cluster.reports().items() if name.startswith("gateway") and said]


def test_nothing_is_left_behind(cluster: OpsCluster) -> None:
    """The sequences and records of all that was resumed are gone."""

    def quiet() -> bool:
        said = cluster.reports()
        decode, router = said["decode-0"], said["router-0"]
        if not (decode and router):
            return False
        return sum(decode["sequences"].values()) + sum(router["requests"].values()) == 0

    wait_until(quiet, 15, f"everything free: {cluster.status()}")
