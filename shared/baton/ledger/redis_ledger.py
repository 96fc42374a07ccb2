"""The ledger in Redis: one connection, one writer, replies in the order of the calls.

Decides queueing, timeouts and reconnecting. ``call`` puts an op into a queue; one task writes all
that is queued in one go and does nothing else meanwhile; replies come back in order. Whatever
leaves a reply unread (a timeout, a broken stream) ends the connection, and everything on it that
was not answered is ``Unavailable``: in effect or not, the caller repeats it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.core.limits import Limits
from baton.ledger.connection import (
    RECONNECT_CODES,
    Connection,
    LedgerUnfit,
    LedgerUnreachable,
    connect,
    error_code,
    load,
    parse_url,
)
from baton.ledger.resp import RespError, RespReply
from baton.ledger.scripts import ReplyBroken, Scribe, read_reply
from baton.ports.ledger import AnyOp, Reply, Unavailable

BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 1.0

OnAnswer = Callable[[Reply | Unavailable], None]


class ScriptFailed(Exception):
    """A script raised: a bug in it."""


@dataclass(slots=True, eq=False)
class _Call:
    op: AnyOp
    done: OnAnswer
    expires_at: float
    answered: bool = False

    def answer(self, reply: Reply | Unavailable) -> None:
        if not self.answered:
            self.answered = True
            self.done(reply)


class RedisLedger:
    """The adapter of :class:`baton.ports.ledger.Ledger` for a Redis-protocol server."""

    def __init__(
        self,
        url: str,
        pool: str,
        limits: Limits,
        on_bug: Callable[[BaseException], None],
    ) -> None:
        """``on_bug`` is called when a script or this adapter is wrong; the process should end.

        Raises:
            LedgerUnfit: ``url`` cannot be read.
        """
        self.target = parse_url(url)
        self.calls: Counter[str] = Counter()
        """Ops sent, by name; one sent again after NOSCRIPT counts twice."""
        self.connects = 0
        """Connections made."""
        self._scribe = Scribe(pool, limits)
        self._sources = [script.source for script in self._scribe.scripts.values()]
        self._limits = limits
        self._timeout_s = limits.ledger_timeout_ms / 1000
        self._on_bug = on_bug
        self._queue: deque[_Call] = deque()
        self._sent: deque[_Call] = deque()
        self._unscripted: list[_Call] = []
        """Calls answered with NOSCRIPT, in order: sent again once all in flight are answered."""
        self._work = asyncio.Event()
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None
        """Somebody waits until nothing is in flight."""
        self._down = "not started"
        self._closing = False

    @property
    def up(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None

    async def start(self, patience_s: float = 5.0) -> None:
        """Connect, look whether the server is fit, and begin to take calls.

        Raises:
            LedgerUnfit: it never will be.
            LedgerUnreachable: no fit server answered within ``patience_s``.
        """
        assert self._task is None, "started twice"
        loop = asyncio.get_running_loop()
        gives_up_at = loop.time() + patience_s
        wait_s = BACKOFF_FIRST_S
        while True:
            try:
                connection = await self._connect()
                break
            except LedgerUnreachable:
                if loop.time() + wait_s > gives_up_at:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, BACKOFF_MAX_S)
        self._connection = connection
        self._task = asyncio.create_task(self._run(connection), name="ledger-writer")
        self._task.add_done_callback(self._task_ended)

    def call(self, op: AnyOp, done: OnAnswer) -> None:
        loop = asyncio.get_running_loop()
        if self._closing or self._task is None:
            loop.call_soon(done, Unavailable("the ledger's client is closed"))
            return
        unanswered = len(self._queue) + len(self._sent) + len(self._unscripted)
        if unanswered >= self._limits.ledger_inflight_max:
            loop.call_soon(done, Unavailable("too many ledger calls are unanswered"))
            return
        self._queue.append(_Call(op, done, loop.time() + self._timeout_s))
        self._work.set()
        self._watch()

    async def close(self) -> None:
        self._closing = True
        if self._task is None:
            return
        loop = asyncio.get_running_loop()
        gives_up_at = loop.time() + self._timeout_s
        while self._connection is not None and self._oldest() and loop.time() < gives_up_at:
            drained = loop.create_future()
            self._drained = drained
            await asyncio.wait(
                [drained, self._task],
                timeout=gives_up_at - loop.time(),
                return_when=asyncio.FIRST_COMPLETED,
            )
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._timer is not None:
            self._timer.cancel()
        self._drop("the ledger's client is closed", everything=True)

    # --- the writer ---------------------------------------------------------------------------

    async def _run(self, connection: Connection) -> None:
        while True:
            self._connection = connection
            self._down = "the server takes nothing"
            await self._write_until_lost(connection)
            self._drop(connection.lost.result())
            connection = await self._reconnect()

    async def _write_until_lost(self, connection: Connection) -> None:
        """Write what is queued, all at once, until the connection is over."""
        connection.lost.add_done_callback(lambda _: self._work.set())
        while not connection.lost.done():
            await connection.writable.wait()
            if self._unscripted:
                if self._sent:
                    # Nothing is sent behind them, so that the order of the calls is kept.
                    self._work.clear()
                    await self._work.wait()
                    continue
                await self._load_scripts(connection)
            elif not self._queue:
                self._work.clear()
                await self._work.wait()
                continue
            if not connection.lost.done():
                self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        batch = []
        while self._queue:
            call = self._queue.popleft()
            self.calls[type(call.op).__name__] += 1
            self._sent.append(call)
            batch.append(self._scribe.command(call.op))
        if batch:
            connection.write(b"".join(batch))

    async def _load_scripts(self, connection: Connection) -> None:
        """The server forgot the scripts (a restart, SCRIPT FLUSH): load them, repeat the calls."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await load(connection, self._sources)
        except (TimeoutError, LedgerUnreachable) as error:
            connection.abort(f"loading scripts: {error}")
            return
        self._queue.extendleft(reversed(self._unscripted))
        self._unscripted.clear()

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await connect(self.target, self._on_reply, self._sources)
        except TimeoutError:
            raise LedgerUnreachable(f"{self.target}: no answer") from None
        self.connects += 1
        return connection

    async def _reconnect(self) -> Connection:
        """Try until it works: at once, then with growing and random waits, so that all processes
        of a cluster do not come back in the same instant."""
        wait_s = BACKOFF_FIRST_S
        while True:
            try:
                return await self._connect()
            except (LedgerUnreachable, LedgerUnfit) as error:
                self._down = str(error)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, BACKOFF_MAX_S)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_bug(error)

    # --- replies ------------------------------------------------------------------------------

    def _on_reply(self, reply: RespReply) -> None:
        connection = self._connection
        if not self._sent or connection is None:
            self._on_bug(ReplyBroken("a reply that nobody waits for"))
            return
        call = self._sent.popleft()
        if isinstance(reply, RespError):
            self._on_error(call, reply, connection)
        else:
            try:
                answer = read_reply(reply)
            except ReplyBroken as error:
                call.answer(Unavailable("the reply cannot be read"))
                self._on_bug(error)
                return
            call.answer(answer)
        if not self._sent:
            self._all_answered()

    def _on_error(self, call: _Call, error: RespError, connection: Connection) -> None:
        if error.text.startswith("NOSCRIPT"):
            self._unscripted.append(call)
            return
        code = error_code(error)
        call.answer(Unavailable(error.text))
        if code in RECONNECT_CODES:
            connection.abort(error.text)
        elif not code:
            self._on_bug(ScriptFailed(f"{type(call.op).__name__}: {error.text}"))

    def _all_answered(self) -> None:
        if self._unscripted:
            self._work.set()
        waiter, self._drained = self._drained, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- what is not answered -----------------------------------------------------------------

    def _oldest(self) -> _Call | None:
        for calls in (self._sent, self._unscripted, self._queue):
            if calls:
                return calls[0]
        return None

    def _watch(self) -> None:
        """Keep one timer, for the oldest call: all wait equally long."""
        if self._timer is not None:
            return
        oldest = self._oldest()
        if oldest is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(oldest.expires_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        awaited = self._sent[0] if self._sent else None
        if awaited is not None and awaited.expires_at <= now and self._connection is not None:
            self._connection.abort("timeout")
            self._drop("timeout")
        for call in [call for call in self._unscripted if call.expires_at <= now]:
            self._unscripted.remove(call)
            call.answer(Unavailable("timeout"))
        while self._queue and self._queue[0].expires_at <= now:
            self._queue.popleft().answer(Unavailable(f"timeout: {self._down}"))
        self._watch()

    def _drop(self, reason: str, *, everything: bool = False) -> None:
        """The connection is over: what was sent on it is unanswered for good."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort(reason)
        self._down = reason
        gone = [*self._sent, *self._unscripted]
        self._sent.clear()
        self._unscripted.clear()
        if everything:
            gone.extend(self._queue)
            self._queue.clear()
        for call in gone:
            call.answer(Unavailable(reason))
        self._all_answered()
