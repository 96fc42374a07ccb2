"""A small HTTP/1.1 client: kept connections, responses handed on as their bytes arrive.

Decides how connections are used. It exists because the generator shares its cores with the server
it measures: a token that costs the client 100 us is a measurement of the client
(docs/adr/0020-load-generator.md has the figures). Parsing is httptools', the socket is asyncio's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from time import monotonic
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

IDLE_MAX = 256
#: For a short answer. A server that takes the connection and says nothing is none.
GET_S = 20.0
UNIX_SCHEME = "http+unix"


class Taker(Protocol):
    """Who takes a response in (:class:`~baton.bench.load.answer.Answer` is one)."""

    status: int

    def feed(self, data: bytes, now: float) -> None:
        """A part of the body."""

    def end(self, now: float, error: str = "") -> None:
        """Nothing more comes."""


class Body:
    """A whole response, for short ones."""

    def __init__(self) -> None:
        self.status = 0
        self.error = ""
        self.parts: list[bytes] = []

    def feed(self, data: bytes, now: float) -> None:
        self.parts.append(data)

    def end(self, now: float, error: str = "") -> None:
        self.error = error


class Client:
    """One server; as many connections as there are requests at once."""

    def __init__(self, url: str, api_key: str = "", *, get_s: float = GET_S) -> None:
        self._get_s = get_s
        parts = urlsplit(url)
        self._unix = parts.path if parts.scheme == UNIX_SCHEME else ""
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = "" if self._unix else parts.path.rstrip("/")
        name = "localhost" if self._unix else parts.netloc.rpartition("@")[2]
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {name}\r\n{key}Content-Type: application/json\r\n"
        self._idle: list[_Connection] = []
        self.opened = 0

    async def request(self, method: str, path: str, body: bytes, taker: Taker) -> None:
        """Ask, and return when the response is over; the taker hears of everything, errors too.

        Cancelling it closes the connection, which is how a client cancels a request.
        """
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        while True:
            try:
                connection, fresh = await self._connection()
            except OSError as error:
                taker.end(monotonic(), f"not connected: {error}")
                return
            lost = await connection.ask(head.encode() + body, taker)
            if not lost:
                return
            # A kept connection that the server closed meanwhile has heard nothing: ask again.
            if fresh:
                taker.end(monotonic(), "the connection was closed before an answer")
                return

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body.

        Raises:
            OSError: no answer within ``GET_S``.
        """
        body = Body()
        try:
            async with asyncio.timeout(self._get_s):
                await self.request("GET", path, b"", body)
        except TimeoutError:
            raise OSError(f"{path}: no answer within {self._get_s:g} s") from None
        if body.error:
            raise OSError(f"{path}: {body.error}")
        return body.status, b"".join(body.parts)

    def close(self) -> None:
        """Close the kept connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open():
                return connection, False
        loop = asyncio.get_running_loop()
        self.opened += 1
        if self._unix:
            _, made = await loop.create_unix_connection(self._made, self._unix)
        else:
            _, made = await loop.create_connection(
                self._made, self._host, self._port, ssl=self._ssl
            )
        return made, True

    def _made(self) -> _Connection:
        return _Connection(self._keep)

    def _keep(self, connection: _Connection) -> None:
        if len(self._idle) < IDLE_MAX:
            self._idle.append(connection)
        else:
            connection.close()


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, keep: Callable[[_Connection], None]) -> None:
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._taker: Taker | None = None
        self._over: asyncio.Future[bool] | None = None
        self._heard = False
        self._now = 0.0

    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, raw: bytes, taker: Taker) -> bool:
        """Send one request; return whether the connection was lost before any answer."""
        self._taker, self._heard = taker, False
        self._parser = httptools.HttpResponseParser(self)
        self._over = self._loop.create_future()
        assert self._transport is not None
        self._transport.write(raw)
        try:
            return await self._over
        except asyncio.CancelledError:
            # Cancelled after the end of its response: the connection may be somebody else's by now.
            if self._taker is taker:
                self._taker = None
                self.close()
            raise

    # --- asyncio's calls ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.close()
            return
        self._now = monotonic()
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"no HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._now = monotonic()
        if self._taker is None:
            return
        if not self._heard:
            # The asker decides whether it is worth another try.
            self._taker = None
            self._done(True)
            return
        self._finish("" if self._is_until_close() else "the connection broke")

    def _is_until_close(self) -> bool:
        """Whether the body had no stated length, so that the end is the close."""
        return self._parser is not None and not self._parser.should_keep_alive()

    # --- the parser's calls ---------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        if self._taker is not None and self._parser is not None:
            self._taker.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._taker is not None:
            self._taker.feed(body, self._now)

    def on_message_complete(self) -> None:
        keep = self._parser is not None and self._parser.should_keep_alive()
        self._finish("")
        self._parser = None
        if keep and self.is_open():
            self._keep(self)
        else:
            self.close()

    def _finish(self, error: str) -> None:
        if self._taker is not None:
            taker, self._taker = self._taker, None
            taker.end(self._now, error)
            self._done(False)

    def _done(self, lost: bool) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(lost)
