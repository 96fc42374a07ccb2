"""GET /v1/responses as a WebSocket: several responses at once over one socket.

Decides what a client may send (``response.create``, ``response.resume``, ``response.cancel``) and
in which lane a response runs: those with the same ``stream_id`` one after the other, all others at
once. Events are those of the HTTP stream plus ``response_id``, ``stream_id`` where it was given,
and ``event_id`` where the response can be resumed.
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
from baton.gateway.errors import ApiError, resumed_elsewhere
from baton.gateway.fields import Fields, parse_object
from baton.gateway.generation import ClientLeft
from baton.gateway.numbering import NoSuchEvent, Numbered, unlabelled
from baton.gateway.response_format import ResponseFormat
from baton.gateway.responses import response_recipe
from baton.gateway.serving import Serving
from baton.gateway.telling import Telling, begin, resume, wanted_by_field
from baton.runtime import tasks

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
class _Asked:
    """A ``response.create`` or ``response.resume`` that has not started."""

    fields: Fields
    size: int
    resumes: bool


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
        self._lanes: dict[str, deque[_Asked]] = {}
        self._running: dict[str, Telling] = {}
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
            if kind in ("response.create", "response.resume"):
                self._ask(fields, stream_id, len(body), resumes=kind == "response.resume")
            elif kind == "response.cancel":
                await self._cancel(fields)
            else:
                known = "'response.create', 'response.resume' or 'response.cancel'"
                raise fields.fail("type", f"must be {known}")
        except ApiError as error:
            await self._error(error, stream_id)

    def leave(self) -> None:
        """Close when nothing runs on it any more: its client connects to another gateway."""
        if not self._tasks and not self._goodbye:
            self._goodbye = True
            self._start(self._say_goodbye())

    def close(self) -> None:
        """The socket is gone: everything on it is cancelled, or waits to be resumed."""
        self._guard.close()
        self._lanes.clear()
        for telling in list(self._running.values()):
            telling.generation.stream.leave(Reason.CLIENT_DISCONNECTED)
        for task in self._tasks:
            task.cancel()

    # --- what the client asks for ---------------------------------------------------------------

    def _stream_id(self, fields: Fields) -> str | None:
        stream_id = fields.text("stream_id")
        if stream_id is not None and not _STREAM_ID.fullmatch(stream_id):
            raise fields.fail("stream_id", "must match ^[A-Za-z0-9_.-]{1,256}$")
        return stream_id

    def _ask(self, fields: Fields, stream_id: str | None, size: int, *, resumes: bool) -> None:
        bytes_max = WAITING_BODIES_MAX * self._serving.limits.body_bytes_max
        if self._count >= STREAMS_MAX or self._waiting_bytes + size > bytes_max:
            message = "too many responses on one socket"
            raise ApiError(429, message, None, "overloaded", retry_after_ms=1_000)
        nested = fields.object("response")
        values = {**fields.values, **(nested.values if nested is not None else {})}
        values.pop("response", None)
        asked = _Asked(Fields({**values, "stream": True}), size, resumes)
        self._count += 1
        self._waiting_bytes += size
        if stream_id is None:
            self._start(self._respond(asked, None))
        elif stream_id in self._lanes:
            self._lanes[stream_id].append(asked)
        else:
            self._lanes[stream_id] = deque([asked])
            self._start(self._run_lane(stream_id))

    async def _cancel(self, fields: Fields) -> None:
        response_id = fields.text("response_id")
        if response_id is None:
            raise fields.fail("response_id", "is required")
        telling = self._running.get(response_id)
        if telling is None:
            raise ApiError(
                404, "no such response is running on this socket", "response_id", "not_found"
            )
        telling.generation.stream.leave(Reason.CLIENT_CANCELLED)

    # --- responses ------------------------------------------------------------------------------

    def _start(self, work: Any) -> None:
        task = tasks.begin(work, self._crashed)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._serving.leaving:
            self.leave()

    def _crashed(self, error: BaseException) -> None:
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

    async def _respond(self, asked: _Asked, stream_id: str | None) -> None:
        try:
            try:
                telling = await self._begin(asked)
            except ApiError as error:
                await self._error(error, stream_id)
                return
            finally:
                self._waiting_bytes -= asked.size
            response_id = telling.recipe.request_id
            if (before := self._running.get(response_id)) is not None:
                before.generation.stream.leave(Reason.SUPERSEDED)
            self._running[response_id] = telling
            try:
                await self._stream(telling, stream_id)
            finally:
                if self._running.get(response_id) is telling:
                    del self._running[response_id]
                telling.generation.close(Reason.CLIENT_DISCONNECTED)
        except ConnectionError:
            return
        finally:
            self._count -= 1

    async def _begin(self, asked: _Asked) -> Telling:
        serving, request, fields = self._serving, self._request, asked.fields
        if not asked.resumes:
            wanted = wanted_by_field(fields, serving.limits)
            recipe = await response_recipe(serving, fields)
            return await begin(serving, recipe, wanted, request.owner, request.traceparent)
        token = fields.text("resume_token")
        if token is None:
            raise fields.fail("resume_token", "is required")
        last = fields.text("last_event_id") or ""
        telling = await resume(serving, token, request.owner, last)
        if telling.recipe.kind != "response":
            telling.generation.close(Reason.CLIENT_DISCONNECTED)
            raise fields.fail("resume_token", "is that of a request over HTTP: resume it there")
        return telling

    async def _stream(self, telling: Telling, stream_id: str | None) -> None:
        generation, form, labels = telling.generation, telling.form, telling.labels
        assert isinstance(form, ResponseFormat)
        # At once, unlike over HTTP: the client needs the id to cancel what still waits.
        await self._events(telling, labels.opening(telling.opening()), stream_id)
        try:
            while not generation.done:
                for part in await generation.parts(self._serving.limits.keepalive_ms / 1000):
                    await self._events(telling, labels.part(part, form.part(part)), stream_id)
        except NoSuchEvent as error:
            await self._error(error, stream_id)  # the message was wrong; the response is not
            return
        except ApiError as error:
            await self._events(telling, unlabelled(form.failure(error)), stream_id)
            return
        except ClientLeft as left:
            if left.reason is Reason.CLIENT_CANCELLED:
                await self._events(telling, unlabelled(form.cancelled()), stream_id)
            elif left.reason is Reason.SUPERSEDED:
                failed = unlabelled(form.failure(resumed_elsewhere()))
                await self._events(telling, failed, stream_id)
            elif left.reason is Reason.SLOW_READER:
                self._request.abort()
            return
        await self._events(telling, labels.closing(form.closing()), stream_id)

    # --- writing --------------------------------------------------------------------------------

    async def _events(self, telling: Telling, events: Numbered, stream_id: str | None) -> None:
        for event_id, event in events:
            assert isinstance(event, dict)
            event["response_id"] = telling.recipe.request_id
            if event_id:
                event["event_id"] = event_id
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
        for telling in list(self._running.values()):
            telling.generation.stream.leave(Reason.SLOW_READER)
        self._request.abort()
