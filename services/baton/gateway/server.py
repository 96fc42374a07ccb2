"""uvicorn, set up for long token streams: which protocol classes, which socket options.

Decides how connections are accepted, bounded, kept alive and cut. The application is ``app.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from baton.core.limits import Limits
from baton.gateway.app import App
from baton.gateway.serving import Serving
from baton.runtime import tasks
from baton.runtime.driver import Crash

BACKLOG = 1_024
#: An idle connection is kept for the next request; longer than proxies in front keep theirs.
IDLE_S = 75
#: A client that takes longer than this from its connection, or from the end of an answer, until its
#: next request is complete but for the body is cut: half a request must not hold a connection.
HEAD_READ_S = 30.0
#: The same when the gateway leaves: a client that has just connected may still ask.
LEAVING_READ_S = 2.0
#: Bytes of one request that are not its body; more are answered with 431.
HEAD_BYTES_MAX = 128 * 1024
#: How many bytes of chunk sizes and extensions each byte of a body may come with.
CHUNKING_FACTOR = 16
#: While so many requests wait behind the one being answered the connection is still read: an end of
#: it that is not read is not noticed, and its answer would be computed for nobody.
PIPELINED_MAX = 8
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
    b"retry-after: 1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
)
_FULL_BODY = (
    b'{"error":{"message":"too many connections","type":"service_unavailable_error",'
    b'"param":null,"code":"overloaded"}}'
)


def _last_words(status: bytes, text: bytes) -> bytes:
    """Return an answer that is written where there is no request yet."""
    head = b"HTTP/1.1 %s\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: %d"
    return head % (status, len(text)) + b"\r\n\r\n" + text


_HEAD_TOO_LARGE = _last_words(
    b"431 Request Header Fields Too Large", b"the request's head is too large\n"
)
_HEAD_TOO_SLOW = _last_words(b"408 Request Timeout", b"the request did not arrive in time\n")
_BAD_HANDSHAKE = _last_words(b"400 Bad Request", b"the WebSocket handshake cannot be read\n")


def _protocols(serving: Serving) -> tuple[type[HttpToolsProtocol], type[WebSocketsSansIOProtocol]]:
    """Return the two protocol classes of this gateway."""
    limits = serving.limits

    class Http(HttpToolsProtocol):
        """HTTP/1.1 with a bound on connections and a way to cut one."""

        _refused = False
        _in_head = False
        _wire_bytes = 0
        """Of the request that is being read, all of it."""
        _body_bytes = 0
        _fed = b""
        _again = b""
        """What is to be read a second time, without the upgrade it asked for."""
        _answered: RequestResponseCycle | None = None
        """The request that is being answered; those pipelined behind it wait."""
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._fate: dict[str, bool] = {}
            if len(serving.connections) >= limits.connections_max:
                self._refused = True
                transport.write(_FULL % (len(_FULL_BODY), _FULL_BODY))
                transport.close()
                return
            serving.connections.add(transport)
            _tune(transport, limits)
            self.app_state = {**self.app_state, "abort": transport.abort, "fate": self._fate}
            self._await_head()

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            self._wire_bytes += len(data)
            while data and not self.transport.is_closing():
                self._fed, self._again = data, b""
                super().data_received(data)
                data = self._again
            if self.transport.is_closing():
                return
            allowed = HEAD_BYTES_MAX + CHUNKING_FACTOR * self._body_bytes
            if self._wire_bytes - self._body_bytes > allowed:
                self._cut(_HEAD_TOO_LARGE)
            else:
                self._await_head()

        def on_message_begin(self) -> None:
            self._in_head = True
            self._wire_bytes = self._body_bytes = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._head_came()
            if self.parser.should_upgrade():
                self.scope["method"] = self.parser.get_method().decode("ascii")
            else:
                super().on_headers_complete()
                if serving.leaving:
                    self.cycle.keep_alive = False
                if 0 < len(self.pipeline) <= PIPELINED_MAX:
                    self.flow.resume_reading()

        def on_message_complete(self) -> None:
            if not self.parser.should_upgrade():
                super().on_message_complete()

        def on_body(self, body: bytes) -> None:
            self._body_bytes += len(body)
            super().on_body(body)

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            self._answered = cycle
            super()._start_asgi_task(cycle, app)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._in_head:
                self._unset_keepalive_if_required()
                self._await_head()

        def _should_upgrade_to_ws(self) -> bool:
            # Anything else with these headers is an HTTP request, answered as one.
            names = {name for name, _ in self.headers}
            plain = names.isdisjoint((b"content-length", b"transfer-encoding"))
            return self.scope["method"] == "GET" and plain

        def _unsupported_upgrade_warning(self) -> None:
            """An upgrade that is not taken is ignored, as HTTP says.

            The parser takes what follows such a head for the other protocol, not for a body: so
            the head is read again without what asks for the upgrade.
            """
            method = self.scope["method"].encode()
            ended = sys.exception()
            if method == b"CONNECT" or not isinstance(ended, httptools.HttpParserUpgrade):
                self.send_400_response("Invalid HTTP request received.")
                return
            version = self.parser.get_http_version().encode()
            head = [b"%s %s HTTP/%s" % (method, self.url, version)]
            for name, value in self.headers:
                if name not in (b"upgrade", b"connection"):
                    head.append(b"%s: %s" % (name, value))
            self._again = b"\r\n".join([*head, b"", b""]) + self._fed[ended.args[0] :]
            self._wire_bytes = len(self._again)
            self.parser = httptools.HttpRequestParser(self)

        def shutdown(self) -> None:
            """Close when the answer is complete; whoever has just come may still ask."""
            if self._upgraded():
                return
            if self._in_head or self.cycle is None:
                self._head_came()
                self._head_timer = self.loop.call_later(LEAVING_READ_S, self._head_late)
            else:
                super().shutdown()

        def _await_head(self) -> None:
            """Mind the time until the next head, unless a request is being answered."""
            answering = self.cycle is not None and not self.cycle.response_complete
            resting = self.timeout_keep_alive_task is not None
            if answering or resting or self._head_timer is not None or self._upgraded():
                return
            self._head_timer = self.loop.call_later(HEAD_READ_S, self._head_late)

        def _upgraded(self) -> bool:
            return self.transport.get_protocol() is not self

        def _head_came(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _head_late(self) -> None:
            self._head_timer = None
            self._cut(_HEAD_TOO_SLOW if self._in_head else b"")

        def _cut(self, last_words: bytes) -> None:
            answering = self.cycle is not None and not self.cycle.response_complete
            if answering:
                self.transport.abort()
                return
            self.transport.write(last_words)
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            serving.connection_closed(self.transport)
            self._head_came()
            # uvicorn tells the last request that came; the one being answered may be another.
            for cycle in (self._answered, *(waiting for waiting, _ in self.pipeline)):
                if cycle is not None and not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()
            self.pipeline.clear()
            if isinstance(exc, TimeoutError):
                self._fate["stalled"] = True
            super().connection_lost(exc)

    class WebSocket(WebSocketsSansIOProtocol):
        """A WebSocket whose client is alive as long as it sends or takes anything.

        uvicorn's own keep-alive closes when one pong is late; a client that reads a long answer
        and answers pings late is healthy. Here it is cut only when, after a ping, neither a byte
        came from it nor a byte was acknowledged for ``write_stall_ms``.
        """

        _ping_timer: asyncio.TimerHandle | None = None
        _heard = True
        _silent_since: float | None = None
        _acked = -1

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            serving.connections.add(transport)
            stream = cast(asyncio.Transport, transport)
            self.app_state = {**self.app_state, "abort": stream.abort}
            self._ping_timer = self.loop.call_later(limits.keepalive_ms / 1000, self._keep_alive)

        def data_received(self, data: bytes) -> None:
            self._heard = True
            super().data_received(data)
            if self.conn.handshake_exc is not None and not self.handshake_initiated:
                # A head that HTTP accepts and WebSocket does not (too many headers, too long ones).
                self.transport.write(_BAD_HANDSHAKE)
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            serving.connection_closed(self.transport)
            if self._ping_timer is not None:
                self._ping_timer.cancel()
            super().connection_lost(exc)

        def _keep_alive(self) -> None:
            if self.close_sent or self.transport.is_closing():
                return
            now = self.loop.time()
            acked = _bytes_acked(self.transport)
            if self._heard or acked > self._acked >= 0:
                self._silent_since = None
            elif self._silent_since is None:
                self._silent_since = now
            elif now - self._silent_since >= limits.write_stall_ms / 1000:
                self.transport.abort()
                return
            self._heard = False
            if self.handshake_complete:
                self.conn.send_ping(b"")
                self.transport.write(b"".join(self.conn.data_to_send()))
            # Sampled after the ping was written: its own acknowledgement is no sign of a reader.
            self._acked = acked
            self._ping_timer = self.loop.call_later(limits.keepalive_ms / 1000, self._keep_alive)

    return Http, WebSocket


def _tune(transport: asyncio.Transport, limits: Limits) -> None:
    """A client that acknowledges or takes nothing is cut by the kernel: the gateway's own guard
    cannot see that small writes only fill the kernel's buffer."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    seconds = max(1, limits.write_stall_ms // 3_000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limits.write_stall_ms)


def _bytes_acked(transport: asyncio.Transport) -> int:
    """Bytes the peer's kernel has acknowledged, -1 where the kernel does not say."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return -1
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    # struct tcp_info: tcpi_bytes_acked, a u64, stands at offset 120.
    return int.from_bytes(info[120:128], "little") if len(info) >= 128 else -1


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the runtime."""
        yield


class GatewayServer:
    """The listening server of one gateway process."""

    def __init__(self, serving: Serving, crash: Crash, *, shared: bool = False) -> None:
        """``crash`` hears of an error that ends the server; ``shared``: other gateways of this host
        listen on the same port."""
        self._serving = serving
        self._crash = crash
        self._shared = shared
        http, websocket = _protocols(serving)
        config = uvicorn.Config(
            cast(Any, App(serving)),
            http=http,
            ws=websocket,
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=2,
            ws_max_size=serving.limits.body_bytes_max,
            ws_ping_interval=None,
            ws_ping_timeout=None,
            ws_per_message_deflate=False,
        )
        self._server = HttpServer(config)
        self._task: asyncio.Task[None] | None = None
        self.socket: socket.socket | None = None
        self.address = ""
        """Where it listens, as a URL."""

    async def start(self, listener: socket.socket | None = None) -> None:
        """Listen, on ``listener`` if a supervisor passed one (several gateways share it).

        Raises:
            OSError: the address is in use or not this host's.
        """
        self.socket = listener or bind(self._serving, shared=self._shared)
        self._owned = listener is None
        self.address = _address(self.socket)
        self._task = tasks.begin(self._server.serve(sockets=[self.socket]), self._failed)
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.005)

    def _failed(self, error: BaseException) -> None:
        """Until it has started, whoever starts it hears of it."""
        if self._server.started:
            self._crash(error, "the HTTP server")

    def leave(self, left: Callable[[], None]) -> None:
        """Accept nothing more, close each connection after its answer; call ``left`` when all are.

        The listening socket itself lives on in others.
        """
        for server in self._server.servers:
            server.close()
        self._serving.on_left = left
        for client in list(self._serving.sockets):
            client.leave()
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, HttpToolsProtocol):
                connection.shutdown()
        if not self._serving.connections:
            left()

    async def close(self) -> None:
        """Stop accepting, let answers that are complete leave, cut the rest."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._serving.prompts.close()
        if self._serving.config.uds and self._owned:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._serving.config.uds)


def inherited_listener() -> socket.socket | None:
    """Return the listening socket that a supervisor passed, if any.

    supervisor's ``fcgi-program`` passes it as standard input, systemd as descriptor 3. A shared
    one loses no queued connection when one of several gateways ends; SO_REUSEPORT does.
    """
    ours = os.environ.get("LISTEN_FDS") and os.environ.get("LISTEN_PID") == str(os.getpid())
    for number in (3, 0) if ours else (0,):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                sock = socket.socket(fileno=os.dup(number))
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    sock.setblocking(False)
                    return sock
                sock.close()
    return None


def bind(serving: Serving, *, shared: bool = False) -> socket.socket:
    """Bind the configured address."""
    config = serving.config
    if config.uds:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(config.uds).st_mode) and not _answers(config.uds):
                os.unlink(config.uds)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(config.uds)
        os.chmod(config.uds, 0o600)
    else:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((config.host, config.port))
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def _address(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _answers(path: str) -> bool:
    """Whether somebody listens on a Unix socket: a left-over file of a killed process does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
