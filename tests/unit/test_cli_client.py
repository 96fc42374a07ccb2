"""The command's HTTP client reads streams as they come and tells errors in the gateway's words."""

from __future__ import annotations

import http.server
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from baton.cli.client import Answer, Delta, GatewayClient
from baton.cli.terminal import CommandError

CHUNK = 'data: {"choices":[{"delta":{"content":"%s"},"finish_reason":%s}]}\n\n'
USAGE = 'data: {"choices":[],"usage":{"completion_tokens":7}}\n\n'
DONE = "data: [DONE]\n\n"


class _Handler(http.server.BaseHTTPRequestHandler):
    status: ClassVar[int] = 200
    body: ClassVar[str] = ""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body.encode())

    def address_string(self) -> str:
        return "client"

    def log_message(self, format: str, *args: object) -> None:
        del format, args


class _UnixServer(socketserver.UnixStreamServer):
    pass


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def _ask(url: str, status: int, body: str) -> list[Delta | Answer]:
    _Handler.status, _Handler.body = status, body
    stream = GatewayClient(url).stream_chat([], model="m", max_tokens=1, temperature=0.0)
    return list(stream)


def _url(server: http.server.HTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_pieces_then_the_figures(server: http.server.HTTPServer) -> None:
    """Texts come in order, comments are skipped, the last item holds usage and finish."""
    body = ": wait\n\n" + CHUNK % ("", "null") + CHUNK % ("Par", "null") + CHUNK % ("is", '"stop"')
    *pieces, answer = _ask(_url(server), 200, body + USAGE + DONE)
    assert [piece.text for piece in pieces if isinstance(piece, Delta)] == ["Par", "is"]
    assert isinstance(answer, Answer)
    assert (answer.tokens, answer.finish) == (7, "stop")
    assert 0 < answer.ttft_s <= answer.seconds


def test_an_error_object_is_told_in_its_own_words(server: http.server.HTTPServer) -> None:
    """The gateway's message and the status reach the user."""
    with pytest.raises(CommandError, match=r"no such model \(HTTP 404\)"):
        _ask(_url(server), 404, '{"error":{"message":"no such model"}}')


def test_an_error_in_mid_stream_is_an_error(server: http.server.HTTPServer) -> None:
    """An error event after some text raises, so that half an answer is never taken for one."""
    body = CHUNK % ("half", "null") + 'data: {"error":{"message":"decode died"}}\n\n'
    with pytest.raises(CommandError, match="decode died"):
        _ask(_url(server), 200, body)


def test_a_stream_without_its_end_mark_is_an_error(server: http.server.HTTPServer) -> None:
    """A connection that just ends did not finish."""
    with pytest.raises(CommandError, match="end mark"):
        _ask(_url(server), 200, CHUNK % ("half", "null"))


class _Resuming(http.server.BaseHTTPRequestHandler):
    """Cuts the stream after each event, and goes on after the one that the client had last."""

    events: ClassVar[list[str]] = []
    seen: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._serve("", f"POST {self.headers['X-Baton-Resume']}")

    def do_GET(self) -> None:
        last = self.headers["Last-Event-ID"]
        self._serve(last, f"GET {self.path} {last}")

    def do_DELETE(self) -> None:
        self.seen.append(f"DELETE {self.path}")
        self.send_response(204)
        self.end_headers()

    def _serve(self, last: str, line: str) -> None:
        self.seen.append(line)
        self.send_response(200)
        self.send_header("X-Baton-Resume-Token", "c.t")
        self.end_headers()
        position = int(last) + 1 if last else 0
        self.wfile.write(f"id: {position}\n{self.events[position]}".encode())

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def cutting(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A gateway whose connections break after every event."""
    monkeypatch.setattr("baton.cli.client.RESUME_PAUSE_S", 0.0)
    _Resuming.seen, _Resuming.events = [], [CHUNK % ("a", "null"), CHUNK % ("b", '"stop"'), DONE]
    with http.server.HTTPServer(("127.0.0.1", 0), _Resuming) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield _url(running)
        running.shutdown()
        thread.join()


def test_a_stream_that_breaks_is_resumed_where_it_was(cutting: str) -> None:
    """However often; nothing is said twice, and what is complete is not cancelled."""
    stream = GatewayClient(cutting).stream_chat([], model="m", max_tokens=1, temperature=0.0)
    *pieces, answer = list(stream)
    assert [piece.text for piece in pieces if isinstance(piece, Delta)] == ["a", "b"]
    assert isinstance(answer, Answer)
    assert answer.finish == "stop"
    path = "/v1/requests/c.t/events"
    assert _Resuming.seen == ["POST 60", f"GET {path} 0", f"GET {path} 1"]


def test_leaving_a_stream_cancels_what_could_be_resumed(cutting: str) -> None:
    """A closed connection alone would leave it running."""
    stream = GatewayClient(cutting).stream_chat([], model="m", max_tokens=1, temperature=0.0)
    next(stream)
    stream.close()
    assert _Resuming.seen == ["POST 60", "DELETE /v1/requests/c.t"]


def test_a_unix_socket_is_reached_too(tmp_path: Path) -> None:
    """http+unix:// addresses name a socket's path."""
    path = tmp_path / "g.sock"
    with _UnixServer(str(path), _Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        *_, answer = _ask(f"http+unix://{path}", 200, CHUNK % ("x", '"stop"') + DONE)
        running.shutdown()
        thread.join()
    assert isinstance(answer, Answer)


def test_nobody_there_is_not_ready() -> None:
    """health() answers instead of raising while the gateway is not up."""
    ready, words = GatewayClient("http://127.0.0.1:9").health()
    assert not ready
    assert "not answer" in words


def test_health_is_told_in_the_gateways_words(server: http.server.HTTPServer) -> None:
    """Of a JSON body only the message; of another body what it says."""
    client = GatewayClient(f"http://127.0.0.1:{server.server_port}")
    _Handler.status = 503
    _Handler.body = '{"status":"unavailable","reason":"no_router","message":"no router here"}'
    assert client.health() == (False, "no router here")
    _Handler.body = "bad gateway"
    assert client.health() == (False, "bad gateway")
