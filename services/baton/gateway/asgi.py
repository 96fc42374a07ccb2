"""One HTTP request and its answer, over plain ASGI.

Decides limits of reading (size, time, memory of all bodies together) and of writing (a client that
takes nothing is cut). No framework: nothing stands between the token path and the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.gateway.errors import ApiError
from baton.gateway.exchange import Stream
from baton.runtime import tasks

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON = b"application/json"
#: A client that takes longer than this to send its body is answered with 408.
BODY_READ_S = 60.0
#: Bodies held at once, in units of the largest body allowed; more are answered with 503.
BODIES_MAX = 16
_ID_CHARS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")


class BodyBudget:
    """Bytes of request bodies in memory, over all connections."""

    def __init__(self, limits: Limits) -> None:
        self.one_max = limits.body_bytes_max
        self._all_max = BODIES_MAX * limits.body_bytes_max
        self._held = 0

    def take(self, count: int) -> None:
        """Count bytes that arrived.

        Raises:
            ApiError: too many bodies are being read at once.
        """
        if self._held + count > self._all_max:
            raise ApiError(
                503, "too many large requests at once", None, "overloaded", retry_after_ms=1_000
            )
        self._held += count

    def give_back(self, count: int) -> None:
        """Bytes that are not held any more."""
        self._held -= count
        assert self._held >= 0


class Request:
    """A request being answered."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, budget: BodyBudget) -> None:
        self.scope = scope
        self.method: str = scope.get("method", "GET")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self._budget = budget
        self._held = 0
        self._closes = False
        self.route = "other"
        """The endpoint's name in metrics."""
        self.owner = ""
        """Digest of the API key it came with, "" where there are none."""
        self.body_digest = ""
        """Of path and body, for a request with an idempotency key."""
        self.status = 0
        """Status answered; 0 until then."""
        self.common_headers: Headers = []
        given = self.headers.get(b"x-request-id", b"")
        usable = 0 < len(given) <= 128 and _ID_CHARS.issuperset(given)
        self.client_request_id = given if usable else secrets.token_hex(16).encode()

    @property
    def traceparent(self) -> str:
        """The W3C trace context given, if it looks like one."""
        value = self.headers.get(b"traceparent", b"")
        return value.decode("ascii") if len(value) == 55 and value.isascii() else ""

    async def body(self) -> bytes:
        """Read the body.

        Raises:
            ApiError: 413 over the limit (before reading it all), 408 if it takes too long.
            ConnectionError: the client left.
        """
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._budget.one_max:
            raise self._too_large()
        try:
            async with asyncio.timeout(BODY_READ_S):
                return await self._read()
        except TimeoutError:
            self._closes = True
            raise ApiError(408, "the request body did not arrive in time") from None

    async def _read(self) -> bytes:
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client left while sending")
            part = message.get("body", b"")
            self._budget.take(len(part))
            self._held += len(part)
            if self._held > self._budget.one_max:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        # The connection is kept while the rest arrives and is thrown away: closed with unread bytes
        # it would be reset, and the client would never see the answer. Who asked before sending
        # may send the next request instead, so there it is closed.
        self._closes = b"expect" in self.headers
        return ApiError(
            413, f"the request body is larger than {self._budget.one_max} bytes", None, "too_large"
        )

    def release(self) -> None:
        """The body is not needed any more."""
        self._budget.give_back(self._held)
        self._held = 0

    async def wait_gone(self) -> Reason:
        """Return when and why the client is gone. Only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        stalled = self.scope.get("state", {}).get("fate", {}).get("stalled", False)
        return Reason.SLOW_READER if stalled else Reason.CLIENT_DISCONNECTED

    def abort(self) -> None:
        """Cut the connection at once, without waiting for what was not taken."""
        abort = self.scope.get("state", {}).get("abort")
        if abort is not None:
            abort()

    # --- answering ------------------------------------------------------------------------------

    async def respond(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers | None = None
    ) -> None:
        """Send a whole answer."""
        await self.start(
            status,
            [
                (b"content-type", content_type),
                (b"content-length", str(len(body)).encode()),
                *(headers or []),
            ],
        )
        await self._send({"type": "http.response.body", "body": body})

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers."""
        assert self.status == 0, "an answer starts once"
        self.status = status
        closing: Headers = [(b"connection", b"close")] if self._closes else []
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"x-request-id", self.client_request_id),
                    *self.common_headers,
                    *headers,
                    *closing,
                ],
            }
        )

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of the body; waits while the client takes nothing."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def fail(self, error: ApiError) -> None:
        """Answer with an error."""
        await self.respond(error.status, error.body(), JSON, error.extra_headers())


@contextlib.asynccontextmanager
async def watched(request: Request, stream: Stream) -> AsyncIterator[None]:
    """While inside, a disconnect of the client cancels what ``stream`` waits for. An error of that
    watch is raised here: nobody would notice any more that the client left."""
    bug: BaseException | None = None

    async def watch() -> None:
        stream.leave(await request.wait_gone())

    def failed(error: BaseException) -> None:
        nonlocal bug
        bug = error
        stream.leave(Reason.CLIENT_DISCONNECTED)

    task = tasks.begin(watch(), failed)
    try:
        yield
    finally:
        task.cancel()
        # Whatever the way out (an error, a cancelled task): nothing goes on computing.
        stream.close(Reason.CLIENT_DISCONNECTED)
        if bug is not None:
            raise bug


class WriteGuard:
    """Cuts a client that takes nothing for too long: one timer a stream, none a write."""

    def __init__(self, abort: Callable[[], None], stall_ms: int) -> None:
        self._abort = abort
        self._stall_s = stall_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def guard(self, write: Awaitable[None]) -> None:
        """Await one write under the bound."""
        self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._stall_s, self._look)
        try:
            await write
        finally:
            self._since = None

    def close(self) -> None:
        """No more writes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._since is None:
            return
        due = self._since + self._stall_s
        if self._loop.time() >= due:
            self._abort()
        else:
            self._timer = self._loop.call_at(due, self._look)
