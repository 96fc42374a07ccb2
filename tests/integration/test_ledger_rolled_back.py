"""A ledger that goes on with an older state, on a real server: what ended meanwhile ends again."""

from __future__ import annotations

import asyncio
import shutil

from baton.core.events import LeaseChanged, TimePassed
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.gateway.machine import GatewayMachine
from baton.gateway.vocabulary import Event
from baton.ledger.redis_ledger import RedisLedger
from baton.ports.driving import CallLedger, LedgerAnswered
from baton.ports.ledger import (
    AdmitRequest,
    AnyOp,
    Conflict,
    EndRequest,
    FindOwned,
    Owned,
    PlaceRequest,
    RetryRequest,
)
from support.ledger_bench import COMPLETED, DECODE, GATEWAY, PREFILL, ROUTER, spec
from support.ledger_client import ask_until_available, open_ledger
from support.ledger_server import LedgerServer

PATIENT = Limits(ledger_timeout_ms=8_000)
LIFE: tuple[AnyOp, ...] = (
    AdmitRequest(spec("r1"), ROUTER),
    PlaceRequest("r1", 1, ROUTER, DECODE, PREFILL),
    RetryRequest("r1", 1, ROUTER),
    PlaceRequest("r1", 2, ROUTER, DECODE, PREFILL),
)


async def feed(machine: GatewayMachine, ledger: RedisLedger, event: Event, now: float) -> None:
    """Feed ``event`` and everything that the ledger answers to what follows."""
    events: list[Event] = [event]
    while events:
        for command in machine.handle(events.pop(), now):
            if isinstance(command, CallLedger):
                reply = await ask_until_available(ledger, command.op)
                events.append(LedgerAnswered(command.op, reply))


def test_a_gateway_ends_what_has_ended_before() -> None:
    """(DESIGN 4.10) The server dies with its last writes; the record of a request that is over is
    live again, at the epoch that it had, until its gateway looks."""

    async def test() -> None:
        with LedgerServer() as server:
            # What was acknowledged is in the file that is copied, also while the disk is busy.
            assert server.command("CONFIG", "SET", "appendfsync", "always") == b"+OK\r\n"
            async with open_ledger(server.url, PATIENT) as ledger:
                for op in LIFE:
                    await ask_until_available(ledger, op)
                past = server.run_dir / "past"
                shutil.copytree(server.data_dir, past)
                end = EndRequest("r1", 2, COMPLETED, GATEWAY)
                await ask_until_available(ledger, end)
                server.kill()
                shutil.rmtree(server.data_dir)
                past.rename(server.data_dir)
                server.start()
                owned = FindOwned(GATEWAY, 10)
                assert await ask_until_available(ledger, owned) == Owned(("r1",))
                gateway = GatewayMachine(GATEWAY, PATIENT)
                await feed(gateway, ledger, LeaseChanged(LeaseState.HELD), 0.0)
                await feed(gateway, ledger, TimePassed(), PATIENT.lease_ttl_ms / 1000)
                assert await ask_until_available(ledger, owned) == Owned(())
                again = await ask_until_available(ledger, AdmitRequest(spec("r1"), ROUTER))
                assert isinstance(again, Conflict)
                assert (again.epoch, again.state) == (2, RequestState.REFUSED)

    asyncio.run(test())
