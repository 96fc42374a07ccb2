"""Clients that leave, stall, half-open or come in numbers: work is cancelled, others unharmed."""

from __future__ import annotations

import itertools
import json
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.core.limits import Limits
from baton.core.outcomes import Ending, Reason
from baton.runtime.settings import GatewayConfig
from support.gateway_cluster import GatewayCluster, Script
from support.raw_sockets import read_until

CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
LIMITS = Limits(write_stall_ms=1_500, keepalive_ms=500)


@pytest.fixture(params=["plain", "everything on"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[GatewayCluster]:
    """A gateway, also with every optional feature on: none may hide a disconnect."""
    config = GatewayConfig(port=0)
    if request.param != "plain":
        config = GatewayConfig(port=0, api_keys=("k",), cors_origins=("*",), root_path="/llm")
    script = Script(ids=tuple(b"token "), endless=True, step_s=0.01)
    with GatewayCluster(tmp_path, limits=LIMITS, config=config, script=script) as running:
        yield running


def open_stream(cluster: GatewayCluster, rcvbuf: int = 0, **values: Any) -> socket.socket:
    """Start a stream on a socket of our own and read until its first content."""
    raw = socket.socket()
    if rcvbuf:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    raw.settimeout(10)
    raw.connect(("127.0.0.1", cluster.port))
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 8000, **values}).encode()
    raw.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer k\r\norigin: https://a.example\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    return raw


def leave(raw: socket.socket, *, reset: bool) -> None:
    if reset:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
def test_a_client_that_leaves_cancels(cluster: GatewayCluster, reset: bool) -> None:
    """FIN or RST in mid-stream: the workers are told within a few steps, 20 times of 20."""
    idle = cluster.tasks()
    for _ in range(20):
        cluster.works.clear()
        raw = open_stream(cluster)
        read_until(raw, b'"content":"t', 2)
        work = cluster.only_work()
        sent = work.sent
        leave(raw, reset=reset)
        outcome = cluster.wait(lambda work=work: work.ended)  # type: ignore[misc]
        assert outcome is not None
        assert outcome.ending is Ending.CANCELLED
        assert outcome.reason is Reason.CLIENT_DISCONNECTED
        assert work.sent - sent <= 12
    assert_quiet(cluster, idle)


def test_leaving_before_the_first_token_cancels(cluster: GatewayCluster) -> None:
    """Also while the request still waits, and for an answer that is not streamed."""
    cluster.script = Script(first_s=60)
    idle = cluster.tasks()
    for stream in (True, False):
        cluster.works.clear()
        raw = open_stream(cluster, stream=stream)
        work = cluster.wait(lambda: next(iter(cluster.works.values()), None))
        leave(raw, reset=False)
        outcome = cluster.wait(lambda work=work: work.ended)  # type: ignore[misc]
        assert outcome is not None
        assert outcome.reason is Reason.CLIENT_DISCONNECTED
    assert_quiet(cluster, idle)


def test_leaving_cancels_every_choice(cluster: GatewayCluster) -> None:
    """n choices are n cancelled requests."""
    raw = open_stream(cluster, n=4)
    read_until(raw, b'"content":"t', 4)
    leave(raw, reset=True)
    assert len(cluster.works) == 4
    cluster.wait(lambda: all(work.ended for work in cluster.works.values()))


def test_a_slow_reader_is_cut_and_others_are_not(tmp_path: Path) -> None:
    """A client that takes nothing is cut after write_stall_ms as slow_reader; memory stays
    bounded, and another stream meets no gap."""
    script = Script(ids=tuple(b"x" * 200), endless=True, step_s=0.01, per_step=16)
    with GatewayCluster(tmp_path, limits=LIMITS, script=script) as cluster:
        idle = cluster.tasks()
        other = open_stream(cluster, logprobs=False)
        read_until(other, b'"content":"x', 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        slow = [open_stream(cluster, rcvbuf=2048, logprobs=True, top_logprobs=20) for _ in range(4)]
        gap = largest_gap(other, 2.0)
        cut = [work for work in cluster.works.values() if work.spec.sampling.logprobs == 20]
        cluster.wait(lambda: all(work.ended for work in cut), 10)
        assert {work.ended.reason for work in cut if work.ended} == {Reason.SLOW_READER}
        assert gap < 0.5
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
        for raw in (*slow, other):
            leave(raw, reset=True)
        assert_quiet(cluster, idle)


def test_a_slow_reader_that_resets_leaves_nothing(tmp_path: Path) -> None:
    """A close wakes a writer that waits for its client."""
    script = Script(ids=tuple(b"x" * 200), endless=True, step_s=0.001, per_step=16)
    limits = Limits(write_stall_ms=60_000)
    with GatewayCluster(tmp_path, limits=limits, script=script) as cluster:
        idle = cluster.tasks()
        raw = open_stream(cluster, rcvbuf=2048, logprobs=True, top_logprobs=20)
        work = cluster.wait(lambda: next(iter(cluster.works.values()), None))
        cluster.wait(lambda: work.sent > 2000)
        leave(raw, reset=True)
        cluster.wait(lambda: work.ended)
        assert_quiet(cluster, idle)


def test_buffer_is_bounded_while_a_writer_waits(tmp_path: Path) -> None:
    """More than session_buffer_bytes_max not taken: cut at once, before the stall limit."""
    script = Script(ids=tuple(b"x" * 200), endless=True, step_s=0.001, per_step=16)
    limits = Limits(write_stall_ms=60_000, session_buffer_bytes_max=64 * 1024)
    with GatewayCluster(tmp_path, limits=limits, script=script) as cluster:
        raw = open_stream(cluster, rcvbuf=2048, logprobs=True, top_logprobs=20)
        work = cluster.wait(lambda: next(iter(cluster.works.values()), None))
        outcome = cluster.wait(lambda: work.ended)
        assert outcome is not None
        assert outcome.reason is Reason.SLOW_READER
        leave(raw, reset=True)


def test_chunks_leave_one_by_one(tmp_path: Path) -> None:
    """With 100 ms between tokens, chunks arrive 100 ms apart: nothing collects them."""
    script = Script(ids=tuple(b"abcdefghij"), step_s=0.1)
    with GatewayCluster(tmp_path, script=script) as cluster:
        for attempt in range(3):
            raw = open_stream(cluster)
            times = []
            data = b""
            while b"[DONE]" not in data:
                data = raw.recv(65536)
                if b'"content":"' in data:
                    times.append(time.monotonic())
            raw.close()
            gaps = [b - a for a, b in itertools.pairwise(times)]
            if len(times) >= 10 and max(gaps[1:]) < 0.15 and min(gaps[1:]) > 0.05:
                return
            assert attempt < 2, gaps


def test_large_prompt_does_not_stop_streams(tmp_path: Path) -> None:
    """While a prompt of 200 kB is tokenized, streams meet no gap and live answers."""
    script = Script(ids=tuple(b"token "), endless=True, step_s=0.02)
    with GatewayCluster(tmp_path, script=script) as cluster:
        for attempt in range(3):
            raw = open_stream(cluster)
            read_until(raw, b'"content":"t')
            sender = threading.Thread(
                target=lambda: cluster.http.post(
                    "/v1/completions", json={"model": "fake", "prompt": "word " * 40_000}
                )
            )
            sender.start()
            gap = largest_gap(raw, 1.0)
            sender.join()
            leave(raw, reset=False)
            if gap < 0.15:
                return
            assert attempt < 2, gap


def test_connections_are_bounded(tmp_path: Path) -> None:
    """One connection too many is answered with 503 and closed; a free place serves again."""
    with GatewayCluster(tmp_path, limits=Limits(connections_max=5)) as cluster:
        held = [socket.create_connection(("127.0.0.1", cluster.port)) for _ in range(5)]
        # Each was accepted once it answers.
        for raw in held:
            raw.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            read_until(raw, b"alive")
        with socket.create_connection(("127.0.0.1", cluster.port), timeout=5) as extra:
            assert extra.recv(4096).startswith(b"HTTP/1.1 503 ")
        held.pop().close()
        cluster.wait_until(lambda: len(cluster.serving.connections) == 4)
        assert cluster.http.get("/live").status_code == 200
        for raw in held:
            raw.close()


def test_dead_peers_are_noticed_by_the_kernel(tmp_path: Path) -> None:
    """Accepted sockets have a user timeout and keep-alive: a client whose host is gone cannot
    hold a place for ever."""
    with (
        GatewayCluster(tmp_path, limits=Limits(write_stall_ms=6_000)) as cluster,
        socket.create_connection(("127.0.0.1", cluster.port)) as raw,
    ):
        raw.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        read_until(raw, b"alive")

        def options() -> list[int]:
            (transport,) = cluster.serving.connections
            sock = transport.get_extra_info("socket")  # type: ignore[attr-defined]
            names = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_NODELAY")
            return [sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, n)) for n in names]

        assert cluster.call(options) == [6_000, 2, 1]


def test_garbage_and_half_requests_harm_nobody(cluster: GatewayCluster) -> None:
    """Bytes that are no HTTP, a cut request, a body that never comes: others are unharmed."""
    stream = open_stream(cluster)
    read_until(stream, b'"content":"t')
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{",
        b"GET /" + b"a" * 70_000,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", cluster.port), timeout=5) as raw:
            raw.sendall(data)
    read_until(stream, b'"content":"t', 3)
    leave(stream, reset=False)
    assert b"request_crashed" not in cluster.log.getvalue()


def largest_gap(raw: socket.socket, seconds: float) -> float:
    """Read for that long; return the longest wait between two arrivals."""
    until = time.monotonic() + seconds
    last, gap = time.monotonic(), 0.0
    while (now := time.monotonic()) < until:
        ready, _, _ = select.select([raw], [], [], until - now)
        if ready:
            assert raw.recv(1 << 20), "the stream was cut"
            gap, last = max(gap, time.monotonic() - last), time.monotonic()
    return max(gap, time.monotonic() - last)


def assert_quiet(cluster: GatewayCluster, tasks: int) -> None:
    """No session, stream, body or task is left."""
    cluster.wait_until(lambda: cluster.exchange.open_streams == 0)
    cluster.wait_until(lambda: cluster.tasks() <= tasks)
    status = cluster.call(cluster.machine.status)
    assert status["sessions"] == 0
    assert cluster.call(lambda: cluster.serving.bodies._held) == 0
