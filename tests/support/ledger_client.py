"""One process of a cluster as the ledger sees it: an adapter, and a lease keeper's small shell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.core.events import LeaseChanged, TimePassed
from baton.core.ids import Member
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.ledger.redis_ledger import RedisLedger
from baton.ports.driving import CallLedger, LedgerAnswered
from baton.ports.lease import LeaseEvent, LeaseGivenUp, LeaseKeeper, MembersChanged, Replaced
from baton.ports.ledger import AnyOp, Reply, Unavailable
from support.ledger_bench import LIMITS, WAIT_S


@asynccontextmanager
async def open_ledger(
    url: str, limits: Limits = LIMITS, pool: str = "t"
) -> AsyncIterator[RedisLedger]:
    """Open an adapter, and close it at the end. A bug it reports fails the test."""
    bugs: list[BaseException] = []
    ledger = RedisLedger(url, "t", limits, bugs.append)
    await ledger.start()
    try:
        yield ledger
    finally:
        await ledger.close()
        assert not bugs, bugs


def ask(ledger: RedisLedger, op: AnyOp) -> asyncio.Future[Reply | Unavailable]:
    """Call; the answer is the future's result. A second answer would raise."""
    future: asyncio.Future[Reply | Unavailable] = asyncio.get_running_loop().create_future()
    ledger.call(op, future.set_result)
    return future


async def ask_until_available(ledger: RedisLedger, op: AnyOp) -> Reply:
    """Repeat ``op`` while the ledger is unavailable, at most :data:`WAIT_S`."""
    async with asyncio.timeout(WAIT_S):
        while isinstance(answer := await ask(ledger, op), Unavailable):
            pass
    return answer


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another task or process does, at most :data:`WAIT_S`."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - conditions over several processes
            await asyncio.sleep(0.002)


class LeaseShell:
    """Runs a :class:`LeaseKeeper` over an adapter, as the runtime does, and notes what it says."""

    def __init__(self, me: Member, ledger: RedisLedger, limits: Limits = LIMITS) -> None:
        self._loop = asyncio.get_running_loop()
        self.keeper = LeaseKeeper(me, limits, self._loop.time())
        self.states: list[tuple[float, LeaseState]] = []
        self.members: tuple[Member, ...] = ()
        self.ledger_ids: list[str] = []
        self.replaced = False
        self._ledger = ledger
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self.feed(TimePassed())

    def feed(self, event: LeaseEvent) -> None:
        if self._stopped:
            return
        for command in self.keeper.handle(event, self._loop.time()):
            match command:
                case CallLedger(op=op):
                    self._call(op)
                case LeaseChanged(state=state):
                    self.states.append((self._loop.time(), state))
                case MembersChanged(members=members, ledger_id=ledger_id):
                    self.members = members
                    if [ledger_id] != self.ledger_ids[-1:]:
                        self.ledger_ids.append(ledger_id)
                case Replaced():
                    self.replaced = True
        self.keeper.check()
        if self._timer is not None:
            self._timer.cancel()
        at = self.keeper.deadline()
        self._timer = None if at is None else self._loop.call_at(at, self.feed, TimePassed())

    def _call(self, op: AnyOp) -> None:
        self._ledger.call(op, lambda reply: self.feed(LedgerAnswered(op, reply)))

    def stop(self) -> None:
        """Die: no renewal, no release."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def leave(self) -> None:
        self.feed(LeaseGivenUp())
