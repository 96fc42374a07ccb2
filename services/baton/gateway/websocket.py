"""GET /v1/responses as a WebSocket: several responses at once over one socket.

Decides what a client may send (``response.create``, ``response.cancel``) and in which lane a
response runs: those with the same ``stream_id`` one after the other, all others at once. Events
are those of the HTTP stream plus ``response_id`` and, where given, ``stream_id``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from dataclasses import dataclass
from typing import Any

import orjson

from baton.core.outcomes import Reason
from baton.gateway.asgi import Receive, Request, Send, WriteGuard
from baton.gateway.errors import ApiError
from baton.gateway.fields import Fields, parse_object
from baton.gateway.generation import ClientLeft
from baton.gateway.responses import ResponseFormat, start_response
from baton.gateway.serving import Serving
from baton.gateway.sse import Event

#: More responses running or waiting on one socket are refused with an error event.
STREAMS_MAX = 64
#: Requests of one socket that wait or are being tokenized, in units of the largest message.
WAITING_BODIES_MAX = 2
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")


async def serve_socket(serving: Serving, request: Request, receive: Receive, send: Send) -> None:
    """Serve one accepted socket until it closes."""
    await send({"type": "websocket.accept", "headers": request.common_headers})
    socket = _Socket(serving, request, send)
    serving.sockets.add(socket)
    try:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            if message["type"] != "websocket.receive":
                continue
            text = message.get("text")
            body = text.encode() if text is not None else message.get("bytes") or b""
            await socket.received(body)
    finally:
        serving.sockets.discard(socket)
        socket.close()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A ``response.create`` that has not started."""

    fields: Fields
    size: int


class _Socket:
    """One client's socket: its lanes and running responses."""

    def __init__(self, serving: Serving, request: Request, send: Send) -> None:
        self._serving = serving
        self._request = request
        self._send = send
        self._guard = WriteGuard(self._cut, serving.limits.write_stall_ms)
        self._turn = asyncio.Lock()
        """One write at a time: the guard measures the one that waits for the client."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._lanes: dict[str, deque[_Wanted]] = {}
        self._running: dict[str, ResponseFormat] = {}
        self._count = 0
        self._waiting_bytes = 0
        self._goodbye = False

    async def received(self, body: bytes) -> None:
        """Handle one message of the client."""
        stream_id: str | None = None
        try:
            fields = parse_object(body)
            stream_id = self._stream_id(fields)
            kind = fields.text("type")
            if kind == "response.create":
                self._create(fields, stream_id, len(body))
            elif kind == "response.cancel":
                await self._cancel(fields)
            else:
                raise fields.fail("type", "must be 'response.create' or 'response.cancel'")
        except ApiError as error:
            await self._error(error, stream_id)

    def leave(self) -> None:
        """Close when nothing runs on it any more: its client connects to another gateway."""
        if not self._tasks and not self._goodbye:
            self._goodbye = True
            self._start(self._say_goodbye())

    def close(self) -> None:
        """The socket is gone: everything on it is cancelled."""
        self._guard.close()
        self._lanes.clear()
        for form in list(self._running.values()):
            form.generation.stream.leave(Reason.CLIENT_DISCONNECTED)
        for task in self._tasks:
            task.cancel()

    # --- what the client asks for ---------------------------------------------------------------

    def _stream_id(self, fields: Fields) -> str | None:
        stream_id = fields.text("stream_id")
        if stream_id is not None and not _STREAM_ID.fullmatch(stream_id):
            raise fields.fail("stream_id", "must match ^[A-Za-z0-9_.-]{1,256}$")
        return stream_id

    def _create(self, fields: Fields, stream_id: str | None, size: int) -> None:
        bytes_max = WAITING_BODIES_MAX * self._serving.limits.body_bytes_max
        if self._count >= STREAMS_MAX or self._waiting_bytes + size > bytes_max:
            message = "too many responses on one socket"
            raise ApiError(429, message, None, "overloaded", retry_after_ms=1_000)
        nested = fields.object("response")
        values = {**fields.values, **(nested.values if nested is not None else {})}
        values.pop("response", None)
        wanted = _Wanted(Fields({**values, "stream": True}), size)
        self._count += 1
        self._waiting_bytes += size
        if stream_id is None:
            self._start(self._respond(wanted, None))
        elif stream_id in self._lanes:
            self._lanes[stream_id].append(wanted)
        else:
            self._lanes[stream_id] = deque([wanted])
            self._start(self._run_lane(stream_id))

    async def _cancel(self, fields: Fields) -> None:
        response_id = fields.text("response_id")
        if response_id is None:
            raise fields.fail("response_id", "is required")
        form = self._running.get(response_id)
        if form is None:
            raise ApiError(
                404, "no such response is running on this socket", "response_id", "not_found"
            )
        form.generation.stream.leave(Reason.CLIENT_CANCELLED)

    # --- responses ------------------------------------------------------------------------------

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._serving.leaving:
            self.leave()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._serving.log.error("response_crashed", exc_info=error)
            self._request.abort()

    async def _run_lane(self, stream_id: str) -> None:
        lane = self._lanes[stream_id]
        while lane:
            await self._respond(lane[0], stream_id)
            if lane:
                lane.popleft()
        if self._lanes.get(stream_id) is lane:
            del self._lanes[stream_id]

    async def _respond(self, wanted: _Wanted, stream_id: str | None) -> None:
        try:
            try:
                form = await start_response(self._serving, wanted.fields, self._request.traceparent)
            except ApiError as error:
                await self._error(error, stream_id)
                return
            finally:
                self._waiting_bytes -= wanted.size
            self._running[form.response_id] = form
            try:
                await self._stream(form, stream_id)
            finally:
                del self._running[form.response_id]
                form.generation.close(Reason.CLIENT_DISCONNECTED)
        except ConnectionError:
            return
        finally:
            self._count -= 1

    async def _stream(self, form: ResponseFormat, stream_id: str | None) -> None:
        # At once, unlike over HTTP: the client needs the id to cancel what still waits.
        await self._events(form, form.opening(), stream_id)
        generation = form.generation
        try:
            while not generation.done:
                for part in await generation.parts(self._serving.limits.keepalive_ms / 1000):
                    await self._events(form, form.part(part), stream_id)
        except ApiError as error:
            failed = form.failure(error)
            await self._events(form, failed, stream_id)
            return
        except ClientLeft as left:
            if left.reason is Reason.CLIENT_CANCELLED:
                await self._events(form, form.cancelled(), stream_id)
            elif left.reason is Reason.SLOW_READER:
                self._request.abort()
            return
        await self._events(form, form.closing(), stream_id)

    # --- writing --------------------------------------------------------------------------------

    async def _events(
        self, form: ResponseFormat, events: list[Event], stream_id: str | None
    ) -> None:
        for event in events:
            assert isinstance(event, dict)
            event["response_id"] = form.response_id
            if stream_id is not None:
                event["stream_id"] = stream_id
            await self._write(event)

    async def _error(self, error: ApiError, stream_id: str | None) -> None:
        event: dict[str, Any] = {
            "type": "error",
            "status": error.status,
            "error": error.object(),
        }
        if error.retry_after_ms:
            event["retry_after_ms"] = error.retry_after_ms
        if stream_id is not None:
            event["stream_id"] = stream_id
        await self._write(event)

    async def _write(self, event: dict[str, Any]) -> None:
        text = orjson.dumps(event).decode()
        try:
            async with self._turn:
                await self._guard.guard(self._send({"type": "websocket.send", "text": text}))
        except (OSError, RuntimeError) as error:
            # The server's words for a socket that closed under the write.
            raise ConnectionError(str(error)) from None

    async def _say_goodbye(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            await self._send({"type": "websocket.close", "code": 1012})

    def _cut(self) -> None:
        for form in list(self._running.values()):
            form.generation.stream.leave(Reason.SLOW_READER)
        self._request.abort()
