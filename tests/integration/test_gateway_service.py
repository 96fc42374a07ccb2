"""A gateway beside its answers: what it tells of itself, who may ask, how it ends."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.ports.driving import EXIT_RESTART
from baton.runtime.settings import GatewayConfig
from support.gateway_cluster import CHAT, DECODE, GatewayCluster, Script
from support.sse_events import joined, parse


def test_tokenize_agrees_with_usage(cluster: GatewayCluster) -> None:
    """tokenize(messages) counts what chat reports; detokenize is its inverse."""
    counted = cluster.http.post("/tokenize", json=CHAT).json()
    whole = cluster.http.post("/v1/chat/completions", json=CHAT).json()
    assert counted["count"] == whole["usage"]["prompt_tokens"] == len(counted["tokens"])
    assert counted["max_model_len"] == 8192
    text = {"prompt": "Grüße"}
    tokens = cluster.http.post("/tokenize", json=text).json()["tokens"]
    assert cluster.http.post("/detokenize", json={"tokens": tokens}).json() == text


def test_models_version_and_metrics(cluster: GatewayCluster) -> None:
    """The list and its item; one scrape has every worker, one HELP a family."""
    item = cluster.http.get("/v1/models/fake").json()
    assert item == cluster.http.get("/v1/models").json()["data"][0]
    assert item["max_model_len"] == 8192
    assert cluster.http.get("/version").json()["version"]
    text = cluster.http.get("/metrics").text
    for worker in ("gateway-0", "decode-0", "prefill-0", "router-0"):
        assert f'worker="{worker}"' in text
    helps = [line.split()[2] for line in text.split("\n") if line.startswith("# HELP")]
    assert len(helps) == len(set(helps))
    assert 'baton_requests_total{model_name="fake",outcome="completed",reason=""' in text


def test_metrics_do_not_grow_with_what_clients_send(cluster: GatewayCluster) -> None:
    """Random paths, models, ids make no series."""

    def lines() -> int:
        cluster.http.get("/metrics")
        return cluster.http.get("/metrics").text.count("\n")

    def noise(count: int) -> None:
        for i in range(count):
            cluster.http.get(f"/some/{i}", headers={"x-request-id": f"id{i}"})
            cluster.http.post("/v1/completions", json={"model": f"m{i}", "user": f"u{i}"})

    noise(3)
    before = lines()
    noise(60)
    assert lines() == before


def test_health_follows_the_workers(cluster: GatewayCluster) -> None:
    """200 while prefill and decode are linked, 503 with the reason otherwise; live regardless."""
    assert cluster.http.get("/health").status_code == 200
    cluster.lose(DECODE)
    try:
        answer = cluster.http.get("/health/ready")
        assert answer.status_code == 503
        assert answer.json()["reason"] == "no_decode_worker"
        assert cluster.http.get("/live").status_code == 200
        assert cluster.http.get("/health/live").status_code == 200
    finally:
        from baton.core.ids import Role
        from baton.ports.transport import PeerUp
        from support.gateway_cluster import member

        cluster.feed(PeerUp(member(DECODE, Role.DECODE)))


def test_drain_answers_what_runs(tmp_path: Any) -> None:
    """A draining gateway finishes its streams, answers new requests with 503, and exits 0."""
    with GatewayCluster(tmp_path, script=Script(stall_after=3)) as cluster:
        with cluster.http.stream(
            "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
        ) as answer:
            work = cluster.wait(lambda: next(iter(cluster.works.values()), None))
            cluster.wait(lambda: work.sent == 3)
            cluster.drain()
            refused = httpx.post(cluster.url + "/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            cluster.script.stall_after = None
            cluster.call(lambda: cluster.step(work))
            answer.read()
        assert joined(parse(answer.text)) == "Hello from Baton!"
        cluster.wait(lambda: cluster.exits)
        assert cluster.exits == [(0, "drained")]


def test_a_restart_closes_each_connection_after_its_answer(tmp_path: Any) -> None:
    """Idle connections close at once, one that is being answered after the answer, one that has
    just come after its request; the listening socket takes nothing more, and nothing fails."""
    with GatewayCluster(tmp_path, script=Script(stall_after=3)) as cluster:
        port = cluster.port
        body = json.dumps({**CHAT, "stream": True})
        idle, running, fresh = (http.client.HTTPConnection("127.0.0.1", port) for _ in range(3))
        idle.request("GET", "/live")
        idle.getresponse().read()
        running.request("POST", "/v1/chat/completions", body)
        work = cluster.wait(lambda: next(iter(cluster.works.values()), None))
        cluster.wait(lambda: work.sent == 3)
        fresh.connect()
        cluster.wait_until(lambda: len(cluster.serving.connections) == 3)
        cluster.restart()
        assert idle.sock.recv(1) == b""
        fresh.request("POST", "/v1/chat/completions", json.dumps(CHAT))
        cluster.wait(lambda: len(cluster.works) == 2)
        assert cluster.exits == []
        cluster.script.stall_after = None
        for stalled in list(cluster.works.values()):
            cluster.call(lambda stalled=stalled: cluster.step(stalled))
        text = running.getresponse().read().decode()
        assert joined(parse(text)) == "Hello from Baton!"
        answer = json.loads(fresh.getresponse().read())
        assert answer["choices"][0]["message"]["content"] == "Hello from Baton!"
        cluster.wait_until(lambda: bool(cluster.exits))
        assert cluster.exits == [(EXIT_RESTART, "drained")]
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_keys_cors_prefix(tmp_path: Any) -> None:
    """Keys guard /v1, health and metrics stay open; CORS is for the origins named; a prefix is
    taken with or without the proxy stripping it."""
    config = GatewayConfig(
        port=0,
        api_keys=("one", "two"),
        cors_origins=("https://app.example",),
        root_path="/llm",
    )
    with GatewayCluster(tmp_path, config=config) as cluster:
        http = cluster.http
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "one"}):
            answer = http.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert http.post("/tokenize", json={"prompt": "x"}).status_code == 401
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            assert http.get("/llm/v1/models", headers=headers).status_code == 200
            assert http.get("/v1/models", headers=headers).status_code == 200
        for path in ("/health", "/metrics", "/live", "/", "/llm/", "/llm/health"):
            assert http.get(path).status_code == 200, path
        asked = {"origin": "https://app.example", "access-control-request-headers": "x-a"}
        answer = http.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.headers["access-control-allow-headers"] == "x-a"
        answer = http.options("/v1/chat/completions", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
        answer = http.get("/v1/models", headers={"origin": "https://app.example"})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"


def test_unix_socket(tmp_path: Any) -> None:
    """On a Unix socket of mode 0600; a left-over file of a killed gateway is no obstacle."""
    path = tmp_path / "gateway.sock"
    config = GatewayConfig(uds=str(path))
    for _ in range(2):
        with GatewayCluster(tmp_path, config=config):
            assert path.stat().st_mode & 0o777 == 0o600
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://gateway") as http:
                answer = http.post("/v1/chat/completions", json=CHAT)
                assert answer.json()["choices"][0]["message"]["content"] == "Hello from Baton!"
        assert not path.exists()
        import socket

        with socket.socket(socket.AF_UNIX) as left_over:
            left_over.bind(str(path))


def test_playground_is_served_safely(cluster: GatewayCluster) -> None:
    """Files of the package only, with a policy that allows nothing from elsewhere."""
    answer = cluster.http.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    for name in ("style.css", "app.js", "icon.svg"):
        assert f"page/{name}" in answer.text
        assert cluster.http.get(f"/page/{name}").status_code == 200
    assert "http://" not in answer.text.replace("http://www.w3.org", "")
    again = cluster.http.get("/", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/app.py", "/page/"):
        assert cluster.http.get(path).status_code == 404


def test_no_prompt_in_the_logs(cluster: GatewayCluster) -> None:
    """Neither prompt nor answer is ever logged."""
    secret = "a very secret sentence"
    cluster.script.ids = tuple(b"another hidden sentence")
    messages = [{"role": "user", "content": secret}]
    cluster.http.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    log = cluster.log.getvalue()
    assert secret.encode() not in log
    assert b"another hidden" not in log
    assert b"request_ended" in log


def test_a_server_that_fails_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(127) The crash barrier hears of it at once: a gateway that serves nobody is no gateway."""
    crashed: list[BaseException] = []

    async def fail(counter: int) -> bool:
        raise ValueError("a bug of the server's")

    def serve() -> None:
        with gateway:
            # This one's alone: another gateway runs for the other tests of this file.
            monkeypatch.setattr(gateway.server._server, "on_tick", fail)
            gateway.wait_until(lambda: bool(crashed))

    gateway = GatewayCluster(tmp_path)
    monkeypatch.setattr(gateway, "_crashed", lambda error, during: crashed.append(error))
    with pytest.raises(ValueError, match="a bug of the server's"):
        serve()
    assert "a bug of the server's" in str(crashed[0])
