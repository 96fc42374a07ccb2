"""Work that is begun beside other work: its error is heard by whoever began it, and by nobody else.

A gateway's watch of a client is such work.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.gateway.asgi import BodyBudget, Request, watched
from baton.gateway.exchange import Exchange, Stream
from baton.runtime import tasks


def test_an_error_is_heard_at_once_and_a_cancel_is_none() -> None:
    """The loop's own handler, which hears of what nobody asked for, hears nothing."""
    heard: list[object] = []

    async def fails() -> None:
        raise ValueError("a bug")

    async def waits() -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: heard.append(context))
        failing, waiting = tasks.begin(fails(), heard.append), tasks.begin(waits(), heard.append)
        await asyncio.wait({failing})
        waiting.cancel()
        await asyncio.wait({waiting})
        del failing, waiting
        gc.collect()

    asyncio.run(run())
    assert [str(each) for each in heard] == ["a bug"]


def test_a_watch_that_fails_ends_its_request() -> None:
    """(127) Nobody would notice any more that the client left: its answer ends with the error."""

    async def receive() -> Any:
        raise ValueError("a bug of the server's")

    async def send(message: Any) -> None:
        pass

    left: list[Reason | None] = []

    async def answer() -> None:
        stream = Stream(Exchange(lambda event: None, 1_000, 1_000), ["r"], 1_000)
        request = Request({"headers": []}, receive, send, BodyBudget(Limits()))
        async with watched(request, stream):
            assert await stream.take(10.0) == []
            left.append(stream.left)

    with pytest.raises(ValueError, match="a bug of the server's"):
        asyncio.run(answer())
    assert left == [Reason.CLIENT_DISCONNECTED]
