"""uvicorn, set up for long token streams: which protocol classes, which socket options.

Decides how connections are accepted, bounded, kept alive and cut. The application is ``app.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from baton.core.limits import Limits
from baton.gateway.app import App
from baton.gateway.serving import Serving

BACKLOG = 1_024
#: An idle connection is kept for the next request; longer than proxies in front keep theirs.
IDLE_S = 75
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
    b"retry-after: 1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
)
_FULL_BODY = (
    b'{"error":{"message":"too many connections","type":"service_unavailable_error",'
    b'"param":null,"code":"overloaded"}}'
)


def _protocols(serving: Serving) -> tuple[type[HttpToolsProtocol], type[WebSocketsSansIOProtocol]]:
    """Return the two protocol classes of this gateway."""
    limits = serving.limits

    class Http(HttpToolsProtocol):
        """HTTP/1.1 with a bound on connections and a way to cut one."""

        _refused = False

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

        def data_received(self, data: bytes) -> None:
            if not self._refused:
                super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            serving.connections.discard(self.transport)
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

        def connection_lost(self, exc: Exception | None) -> None:
            serving.connections.discard(self.transport)
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

    def __init__(self, serving: Serving, *, shared: bool = False) -> None:
        """``shared``: other gateways of this host listen on the same port."""
        self._serving = serving
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

    @property
    def address(self) -> str:
        """Where it listens, as a URL."""
        if self._serving.config.uds:
            return f"unix:{self._serving.config.uds}"
        assert self.socket is not None
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self, listener: socket.socket | None = None) -> None:
        """Listen, on ``listener`` if a supervisor passed one (several gateways share it).

        Raises:
            OSError: the address is in use or not this host's.
        """
        self.socket = listener or bind(self._serving, shared=self._shared)
        self._task = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[self.socket])
        )
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Stop accepting, let answers that are complete leave, cut the rest."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._serving.prompts.close()
        if self._serving.config.uds:
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


def _answers(path: str) -> bool:
    """Whether somebody listens on a Unix socket: a left-over file of a killed process does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
