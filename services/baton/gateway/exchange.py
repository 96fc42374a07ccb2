"""Between the machine and the HTTP layer: one stream a client request.

Decides nothing. It hands events to the driver and gives the machine's deliveries to the task that
writes to the client: what comes in one turn of the event loop wakes that task once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from baton.core.outcomes import Ending, Outcome, Reason
from baton.gateway.vocabulary import (
    ClientGone,
    Deliver,
    End,
    Event,
    ReportsReady,
    ReportsWanted,
    StopMatched,
    Submitted,
)
from baton.wire.messages import RequestSpec

#: What one delivered id, and one log-probability entry, count in the buffer bound.
ID_BYTES = 32
LOGPROB_BYTES = 96

_TOO_LATE = Outcome(
    Ending.REFUSED, reason=Reason.DRAINING, message="the gateway has just shut down"
)

Item = Deliver | End


class Exchange:
    """All open streams of this gateway."""

    def __init__(self, post: Callable[[Event], None], buffer_bytes_max: int) -> None:
        self._post = post
        self._buffer_bytes_max = buffer_bytes_max
        self._streams: dict[str, Stream] = {}
        self._reports: dict[int, asyncio.Future[dict[str, bytes]]] = {}
        self._next_token = 1
        self._over = False

    def execute(self, command: Deliver | End | ReportsReady) -> None:
        """Carry out one of the machine's commands."""
        if isinstance(command, ReportsReady):
            future = self._reports.pop(command.token, None)
            if future is not None and not future.done():
                future.set_result(command.bodies)
            return
        stream = self._streams.get(command.request_id)
        if stream is None:
            return
        if isinstance(command, End):
            del self._streams[command.request_id]
        stream.put(command)

    def open(self, specs: Sequence[RequestSpec]) -> Stream:
        """Submit the choices of one client request; they share a stream."""
        stream = Stream(self, [spec.request_id for spec in specs], self._buffer_bytes_max)
        for spec in specs:
            self._streams[spec.request_id] = stream
        for spec in specs:
            if self._over:
                # The machine hears nothing any more, but the socket is still there for a moment.
                self.execute(End(spec.request_id, _TOO_LATE))
            else:
                self._post(Submitted(spec))
        return stream

    def stop_matched(self, request_id: str, tokens_used: int) -> None:
        """The text of a choice ended with a stop string."""
        self._post(StopMatched(request_id, tokens_used))

    def gone(self, request_ids: Iterable[str], reason: Reason) -> None:
        """Nobody wants these any more; nothing is delivered for them from now on."""
        for request_id in request_ids:
            if self._streams.pop(request_id, None) is not None:
                self._post(ClientGone(request_id, reason))

    def close(self) -> None:
        """The process ends, for whatever reason: nobody is left without an outcome."""
        self._over = True
        outcome = Outcome(
            Ending.FAILED,
            reason=Reason.DRAINING,
            message="the gateway shut down before the answer was complete",
        )
        for request_id in list(self._streams):
            self.execute(End(request_id, outcome))

    async def reports(self, kind: str) -> dict[str, bytes]:
        """Return every linked process's report, by worker id (the machine bounds the wait)."""
        token = self._next_token
        self._next_token += 1
        future: asyncio.Future[dict[str, bytes]] = asyncio.get_running_loop().create_future()
        self._reports[token] = future
        try:
            self._post(ReportsWanted(kind, token))
            return await future
        finally:
            self._reports.pop(token, None)

    @property
    def open_streams(self) -> int:
        """Choices that have not ended."""
        return len(self._streams)

    @property
    def buffered_bytes(self) -> int:
        """What the writing tasks have not taken yet."""
        return sum(stream.buffered_bytes for stream in set(self._streams.values()))


class Stream:
    """Deliveries and ends of one client request's choices, in order."""

    def __init__(self, exchange: Exchange, request_ids: Sequence[str], bytes_max: int) -> None:
        self._exchange = exchange
        self._bytes_max = bytes_max
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self.open_ids = dict.fromkeys(request_ids)
        """Choices without an outcome yet."""
        self.buffered_bytes = 0
        self.left: Reason | None = None
        """Why the client is not there any more; nothing is written from then on."""

    def put(self, item: Item) -> None:
        """Add one item and wake the writer, once a turn of the loop."""
        if isinstance(item, End):
            self.open_ids.pop(item.request_id, None)
        else:
            self.buffered_bytes += ID_BYTES * len(item.ids)
            self.buffered_bytes += sum(
                LOGPROB_BYTES * (1 + len(entry.top)) for entry in item.logprobs
            )
            if self.buffered_bytes > self._bytes_max:
                self.leave(Reason.SLOW_READER)
                return
        self._items.append(item)
        self._wake()

    async def take(self, timeout_s: float) -> list[Item]:
        """Return what has come, or nothing after ``timeout_s`` or when the client has left."""
        if not self._items and self.left is None:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        items, self._items = self._items, []
        self.buffered_bytes = 0
        return items

    def leave(self, reason: Reason) -> None:
        """The client is gone, or is to be: cancel what still runs and wake the writer."""
        if self.left is None:
            self.left = reason
            self._items.clear()
            self.close(reason)
            self._wake()

    def close(self, reason: Reason) -> None:
        """Cancel the choices that have no outcome yet."""
        open_ids = list(self.open_ids)
        self.open_ids.clear()
        self._exchange.gone(open_ids, reason)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
