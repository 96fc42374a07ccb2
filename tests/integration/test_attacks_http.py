"""Hostile HTTP: heads and bodies that never end, upgrades and pipelines that nobody means well."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.core.limits import Limits
from baton.gateway import server
from support.gateway_cluster import GatewayCluster, Script
from support.raw_sockets import read_until

LIMITS = Limits(body_bytes_max=1_000_000)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[GatewayCluster]:
    """A gateway whose workers send tokens for as long as they may."""
    script = Script(ids=tuple(b"token "), endless=True, step_s=0.01)
    with GatewayCluster(tmp_path, limits=LIMITS, script=script) as running:
        yield running


def post(cluster: GatewayCluster, **values: Any) -> socket.socket:
    """Send a long request on a socket of its own."""
    body = json.dumps({"model": "fake", "prompt": "hi", "max_tokens": 4_000, **values}).encode()
    raw = socket.create_connection(("127.0.0.1", cluster.port), timeout=10)
    raw.sendall(POST + b"content-length: %d\r\n\r\n%b" % (len(body), body))
    return raw


def ask_raw(cluster: GatewayCluster, data: bytes, *more: bytes) -> bytes:
    """Send ``data`` and return all that comes until the gateway closes the connection."""
    with socket.create_connection(("127.0.0.1", cluster.port), timeout=10) as raw:
        raw.sendall(data)
        for part in more:
            raw.sendall(part)
        answer = b""
        while part := raw.recv(65536):
            answer += part
        return answer


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = b'{"model": "fake", "prompt": "hi", "max_tokens": 2}'
HANDSHAKE = (
    b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


def test_half_a_request_holds_no_connection(
    cluster: GatewayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence, half a head, blank lines, half a second head: cut in time; a stream is not."""
    monkeypatch.setattr(server, "HEAD_READ_S", 0.6)
    stream = post(cluster, stream=True)
    try:
        assert ask_raw(cluster, b"") == b""
        assert ask_raw(cluster, b"\r\n\r\n") == b""
        assert ask_raw(cluster, b"GET /live HTTP/1.1\r\nx: y").startswith(b"HTTP/1.1 408 ")
        answers = ask_raw(cluster, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\nGET /live HT")
        assert answers.startswith(b"HTTP/1.1 200 ")
        assert b"HTTP/1.1 408 " in answers
        read_until(stream, b'"text":"', 80)
    finally:
        stream.close()


@pytest.mark.parametrize(
    ("first", "part"),
    [
        (b"GET /live HTTP/1.1\r\nhost: x\r\n", b"x: y" * 1_000 + b"\r\n"),
        (b"GET /live HTTP/1.1\r\nhost: x\r\nx: ", b"y" * 10_000),
        (b"GET /", b"y" * 10_000),
        (
            b"POST /live HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
            b"1;" + b"y" * 9_000,
        ),
    ],
    ids=["headers", "one header", "path", "chunk extension"],
)
def test_a_head_is_bounded(cluster: GatewayCluster, first: bytes, part: bytes) -> None:
    """What is not a body and never ends is cut, before it takes memory."""
    sent = 0
    with socket.create_connection(("127.0.0.1", cluster.port), timeout=10) as raw:
        raw.sendall(first)
        try:
            while sent < 50_000_000:
                raw.sendall(part)
                sent += len(part)
        except ConnectionError:
            pass
    assert sent < 20_000_000


def test_a_body_that_is_too_large_is_answered_all_the_same(cluster: GatewayCluster) -> None:
    """A client that sends it all before it reads gets the 413, not a reset connection."""
    size = 3 * LIMITS.body_bytes_max
    answer = ask_raw(
        cluster,
        POST + b"content-length: %d\r\n\r\n" % size,
        b"y" * size,
        b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    )
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"HTTP/1.1 200 " in answer


@pytest.mark.parametrize("upgrade", [b"connection: Upgrade\r\nupgrade: h2c\r\n", HANDSHAKE])
def test_an_upgrade_that_is_not_taken_is_ignored(cluster: GatewayCluster, upgrade: bytes) -> None:
    """The body of such a POST is its body, however it arrives, and never a request."""
    head = POST + upgrade + b"content-length: %d\r\n\r\n" % len(BODY)
    last = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    together = ask_raw(cluster, (head + BODY) * 3 + last)
    assert together.count(b"HTTP/1.1 200 OK") == 4
    with socket.create_connection(("127.0.0.1", cluster.port), timeout=10) as raw:
        for part in (head[:40], head[40:], BODY[:9], BODY[9:]):
            raw.sendall(part)
            time.sleep(0.02)  # so that each is read alone
        read_until(raw, b'"finish_reason"')


def test_a_handshake_that_cannot_be_read_is_answered(cluster: GatewayCluster) -> None:
    """WebSocket bounds its head more tightly than HTTP: a 400, not silence."""
    head = b"GET /v1/responses HTTP/1.1\r\nhost: x\r\n"
    for much in (b"x: " + b"y" * 10_000 + b"\r\n", b"x: y\r\n" * 200):
        assert ask_raw(cluster, head + much + HANDSHAKE + b"\r\n").startswith(b"HTTP/1.1 400 ")


def test_a_client_that_pipelined_and_left_cancels(cluster: GatewayCluster) -> None:
    """The request being answered hears of it, not only the last one that came."""
    raw = post(cluster, stream=False)
    raw.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
    cluster.wait_until(lambda: bool(cluster.works) and cluster.only_work().sent > 2)
    raw.close()
    cluster.wait_until(lambda: cluster.only_work().ended is not None)


def test_an_end_without_a_drain_leaves_nobody_without_an_outcome(cluster: GatewayCluster) -> None:
    """The machine is stopped already: the streams and the waiting hear of it all the same."""
    streamed, whole = post(cluster, stream=True), post(cluster, stream=False)
    with streamed, whole:
        read_until(streamed, b'"text":"', 2)
        cluster.wait_until(lambda: len(cluster.works) == 2)
        cluster.call(cluster.exchange.close)
        read_until(streamed, b'"code":"draining"')
        read_until(whole, b'"code":"draining"')
    with post(cluster, stream=True) as late:
        read_until(late, b'"code":"draining"')
