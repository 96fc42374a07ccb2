"""Server-sent events: one answer as a stream of ``data:`` lines.

Decides when the stream starts (with the first token, an error before it is still a plain HTTP
error), what is written while nothing happens, and how it ends: ``[DONE]`` only after success.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import orjson

from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.gateway.asgi import Headers, Request, WriteGuard, watched
from baton.gateway.errors import ApiError, resumed_elsewhere
from baton.gateway.events import Event
from baton.gateway.generation import ClientLeft
from baton.gateway.telling import Telling

HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"x-should-retry", b"false"),
]
KEEP_ALIVE = b": keep-alive\n\n"


def line(event: Event, event_id: str = "") -> bytes:
    """Return one event as it goes over HTTP; what has a type is named by it."""
    number = b"id: " + event_id.encode() + b"\n" if event_id else b""
    if isinstance(event, str):
        return number + b"data: " + event.encode() + b"\n\n"
    kind = event.get("type")
    name = b"event: " + kind.encode() + b"\n" if kind is not None else b""
    return number + name + b"data: " + orjson.dumps(event) + b"\n\n"


def lines(events: Iterable[tuple[str, Event]]) -> bytes:
    """Return events with their ids."""
    return b"".join([line(event, event_id) for event_id, event in events])


async def stream(request: Request, telling: Telling, limits: Limits) -> None:
    """Write the whole answer.

    Raises:
        ApiError: it failed before the first byte of the answer.
    """
    live = telling.generation.stream

    def cut() -> None:
        live.leave(Reason.SLOW_READER)
        request.abort()

    guard = WriteGuard(cut, limits.write_stall_ms)
    writer = _Writer(request, telling, limits, guard)
    try:
        async with watched(request, live):
            await writer.run()
    except ClientLeft as left:
        if left.reason is Reason.SLOW_READER:
            request.abort()
        elif left.reason is Reason.SUPERSEDED:
            await writer.fail(resumed_elsewhere())
    finally:
        guard.close()


class _Writer:
    """Writes one stream."""

    def __init__(
        self, request: Request, telling: Telling, limits: Limits, guard: WriteGuard
    ) -> None:
        self._request = request
        self._telling = telling
        self._keepalive_s = limits.keepalive_ms / 1000
        self._guard = guard
        self._started = False
        self._now = asyncio.get_running_loop().time
        self._silent_until = self._now() + self._keepalive_s

    async def run(self) -> None:
        """Write until the end, or until it fails."""
        generation, labels = self._telling.generation, self._telling.labels
        form = self._telling.form
        opened = False
        while not generation.done:
            try:
                parts = await generation.parts(max(0.0, self._silent_until - self._now()))
                out = b"" if opened else lines(labels.opening(self._telling.opening()))
                opened = True
                for part in parts:
                    out += lines(labels.part(part, form.part(part)))
            except ApiError as error:
                await self.fail(error)
                return
            # Ids alone are no sign of life: what gives no text gives no event.
            if out or self._now() >= self._silent_until:
                await self._write(out or KEEP_ALIVE)
        out = lines(labels.closing(form.closing()))
        if out or self._started:
            await self._write(out, more=False)
        else:
            # The client has every event already: 204 tells an EventSource to stay away.
            await self._request.start(204, self._telling.headers())
            await self._request.write(b"", more=False)

    async def fail(self, error: ApiError) -> None:
        """End without success: an error of HTTP if nothing was written yet, else an event.

        Raises:
            ApiError: nothing was written yet.
        """
        if not self._started:
            raise error
        events = b"".join([line(event) for event in self._telling.form.failure(error)])
        await self._write(events, more=False)

    async def _write(self, out: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await self._request.start(200, [*HEADERS, *self._telling.headers()])
        await self._guard.guard(self._request.write(out, more=more))
        self._silent_until = self._now() + self._keepalive_s
