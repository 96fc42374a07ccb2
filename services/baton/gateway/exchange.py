"""Between the machine and the HTTP layer: one stream a client request.

Decides nothing. It hands events to the driver and gives the machine's deliveries to the task that
writes to the client: what comes in one turn of the event loop wakes that task once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.core.outcomes import Ending, Outcome, Reason
from baton.gateway.vocabulary import (
    CancelWanted,
    ClientGone,
    Deliver,
    End,
    Event,
    NotResumed,
    ReaderBack,
    ReaderGone,
    Ready,
    ReportsReady,
    ReportsWanted,
    ResumableWanted,
    ResumeWanted,
    StopMatched,
    Submitted,
    Unresumable,
)
from baton.wire.messages import RequestSpec

#: What one delivered id, and one log-probability entry, count in the buffer bound.
ID_BYTES = 32
LOGPROB_BYTES = 96

_TOO_LATE = Outcome(
    Ending.REFUSED, reason=Reason.DRAINING, message="the gateway has just shut down"
)

Item = Deliver | End


@dataclass(frozen=True, slots=True)
class Claim:
    """A client's wish for a resumable request, and the name under which it is answered."""

    name: str
    event: ResumableWanted | ResumeWanted


class Exchange:
    """All open streams of this gateway."""

    def __init__(
        self, post: Callable[[Event], None], buffer_bytes_max: int, resume_bytes_max: int = 0
    ) -> None:
        self._post = post
        self._buffer_bytes_max = buffer_bytes_max
        self._resume_bytes_max = resume_bytes_max
        """What a reader that comes back may be told at once, beyond the buffer."""
        self._streams: dict[str, Stream] = {}
        self._readers: dict[str, Stream] = {}
        """Who reads a resumable request."""
        self._claims: dict[str, asyncio.Future[Ready | NotResumed]] = {}
        self._reports: dict[int, asyncio.Future[dict[str, bytes]]] = {}
        self._next_token = 1
        self._over = False

    def execute(self, command: Deliver | End | ReportsReady | Ready | NotResumed) -> None:
        """Carry out one of the machine's commands."""
        match command:
            case ReportsReady():
                future = self._reports.pop(command.token, None)
                if future is not None and not future.done():
                    future.set_result(command.bodies)
            case Ready() | NotResumed():
                claim = self._claims.pop(command.claim, None)
                if claim is not None and not claim.done():
                    claim.set_result(command)
                elif isinstance(command, Ready):
                    self.unread(command.resumable_id)
            case Deliver() | End():
                self._tell(command)

    def _tell(self, item: Item) -> None:
        stream = self._streams.get(item.request_id)
        if stream is None:
            return
        if isinstance(item, End):
            del self._streams[item.request_id]
        stream.put(item)
        if not stream.open_ids and self._readers.get(stream.resumable_id) is stream:
            del self._readers[stream.resumable_id]

    # --- streams --------------------------------------------------------------------------------

    def open(self, specs: Sequence[RequestSpec], resumable_id: str = "") -> Stream:
        """Submit the choices of one client request; they share a stream."""
        stream = self._reader(resumable_id, [spec.request_id for spec in specs])
        for spec in specs:
            if self._over:
                # The machine hears nothing any more, but the socket is still there for a moment.
                self.execute(End(spec.request_id, _TOO_LATE))
            else:
                self._post(Submitted(spec, resumable_id))
        return stream

    def attach(self, resumable_id: str, request_ids: Sequence[str]) -> Stream:
        """Read a resumable request that is here, from its first id on; who read it before is told
        so."""
        stream = self._reader(resumable_id, request_ids)
        self._post(ReaderBack(resumable_id, tuple(request_ids)))
        return stream

    def _reader(self, resumable_id: str, request_ids: Sequence[str]) -> Stream:
        bytes_max = self._buffer_bytes_max + (self._resume_bytes_max if resumable_id else 0)
        stream = Stream(self, request_ids, bytes_max, resumable_id)
        if resumable_id:
            before = self._readers.pop(resumable_id, None)
            self._readers[resumable_id] = stream
            if before is not None:
                before.leave(Reason.SUPERSEDED)
        self._streams.update(dict.fromkeys(request_ids, stream))
        return stream

    async def claim(self, claim: Claim) -> Ready | NotResumed:
        """Ask for a resumable request. Whoever is given one opens, attaches or leaves it unread
        before anything else is awaited."""
        future: asyncio.Future[Ready | NotResumed] = asyncio.get_running_loop().create_future()
        if self._over:
            return _too_late(claim.name)
        self._claims[claim.name] = future
        try:
            self._post(claim.event)
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                ready = future.result()
                if isinstance(ready, Ready):
                    self.unread(ready.resumable_id)
            raise
        finally:
            self._claims.pop(claim.name, None)

    def unread(self, resumable_id: str) -> None:
        """Nobody reads what was just given."""
        if resumable_id not in self._readers:
            self._post(ReaderGone(resumable_id))

    def stop_matched(self, request_id: str, tokens_used: int) -> None:
        """The text of a choice ended with a stop string."""
        self._post(StopMatched(request_id, tokens_used))

    def gone(self, stream: Stream, request_ids: Iterable[str], reason: Reason) -> None:
        """Nobody reads these any more; nothing is delivered for them from now on. What may be
        resumed goes on, unless its client does not want it."""
        open_ids = [each for each in request_ids if self._streams.get(each) is stream]
        for request_id in open_ids:
            del self._streams[request_id]
        if not stream.resumable_id:
            for request_id in open_ids:
                self._post(ClientGone(request_id, reason))
        elif self._readers.get(stream.resumable_id) is stream:
            del self._readers[stream.resumable_id]
            cancelled = reason is Reason.CLIENT_CANCELLED
            event = CancelWanted if cancelled else ReaderGone
            self._post(event(stream.resumable_id))

    def close(self) -> None:
        """The process ends, for whatever reason: nobody is left without an outcome."""
        self._over = True
        for name in list(self._claims):
            self.execute(_too_late(name))
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


def _too_late(claim: str) -> NotResumed:
    return NotResumed(claim, Unresumable.REFUSED, Reason.DRAINING, _TOO_LATE.message)


class Stream:
    """Deliveries and ends of one client request's choices, in order."""

    def __init__(
        self,
        exchange: Exchange,
        request_ids: Sequence[str],
        bytes_max: int,
        resumable_id: str = "",
    ) -> None:
        self._exchange = exchange
        self.resumable_id = resumable_id
        """"" if a client that leaves cancels."""
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
        """Nobody reads the choices that have no outcome yet: they are cancelled, or go on for
        whoever resumes them."""
        open_ids = list(self.open_ids)
        self.open_ids.clear()
        if open_ids:
            self._exchange.gone(self, open_ids, reason)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
