"""Server-sent events: one answer as a stream of ``data:`` lines.

Decides when the stream starts (with the first token, an error before it is still a plain HTTP
error), what is written while nothing happens, and how it ends: ``[DONE]`` only after success.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import orjson

from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.gateway.asgi import Headers, Request, WriteGuard, watched
from baton.gateway.errors import ApiError
from baton.gateway.generation import ClientLeft, Generation, Part

HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"x-should-retry", b"false"),
]
KEEP_ALIVE = b": keep-alive\n\n"
DONE = "[DONE]"

Event = dict[str, Any] | str
"""One event: a JSON object, or :data:`DONE`."""


class Format(Protocol):
    """An endpoint's way to say what happens, as events."""

    def opening(self) -> list[Event]:
        """Return the events before the first part."""
        ...

    def part(self, part: Part) -> list[Event]:
        """Return the events of one choice's part."""
        ...

    def closing(self) -> list[Event]:
        """Return the events after the last part, the end mark included."""
        ...

    def failure(self, error: ApiError) -> list[Event]:
        """Return the events of a failure in mid-stream; nothing follows."""
        ...


def lines(events: Iterable[Event]) -> bytes:
    """Return ``events`` as they go over HTTP; what has a type is named by it."""
    return b"".join([_lines(event) for event in events])


def _lines(event: Event) -> bytes:
    if isinstance(event, str):
        return b"data: " + event.encode() + b"\n\n"
    kind = event.get("type")
    name = b"event: " + kind.encode() + b"\n" if kind is not None else b""
    return name + b"data: " + orjson.dumps(event) + b"\n\n"


async def stream(request: Request, generation: Generation, form: Format, limits: Limits) -> None:
    """Write the whole answer.

    Raises:
        ApiError: it failed before the first byte of the answer.
    """

    def cut() -> None:
        generation.stream.leave(Reason.SLOW_READER)
        request.abort()

    guard = WriteGuard(cut, limits.write_stall_ms)
    try:
        async with watched(request, generation.stream):
            await _run(request, generation, form, limits, guard)
    except ClientLeft as left:
        if left.reason is Reason.SLOW_READER:
            request.abort()
    finally:
        guard.close()


async def _run(
    request: Request, generation: Generation, form: Format, limits: Limits, guard: WriteGuard
) -> None:
    started = False
    while not generation.done:
        try:
            parts = await generation.parts(limits.keepalive_ms / 1000)
        except ApiError as error:
            if not started:
                raise
            await guard.guard(request.write(lines(form.failure(error)), more=False))
            return
        if started:
            out = b""
        else:
            started = True
            await request.start(200, HEADERS)
            out = lines(form.opening())
        out += b"".join([lines(form.part(part)) for part in parts]) if parts else KEEP_ALIVE
        if out:
            await guard.guard(request.write(out))
    await guard.guard(request.write(lines(form.closing()), more=False))
