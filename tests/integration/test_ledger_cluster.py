"""The scripts on a server in cluster mode, where a key of another slot is an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from baton.core.lifecycles import RequestState
from baton.ports.ledger import (
    AcquireLease,
    AdmitRequest,
    AdvanceRequest,
    AnyOp,
    ClaimResumable,
    CloseResumable,
    Done,
    EndRequest,
    LeaseHeld,
    LeaseLost,
    OpenResumable,
    PlaceRequest,
    ReleaseLease,
    RenewLease,
    RestoreResumable,
    Resumable,
    RetryRequest,
)
from support.ledger_bench import COMPLETED, DECODE, GATEWAY, PREFILL, ROUTER, TTL, member, spec
from support.ledger_client import ask, open_ledger, until
from support.ledger_server import LedgerServer


@pytest.fixture
def server() -> Iterator[LedgerServer]:
    server = LedgerServer()
    try:
        server.start("--cluster-enabled", "yes")
        server.command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        yield server
    finally:
        server.close()


def test_every_op_stays_in_its_pools_slot(server: LedgerServer) -> None:
    """Each op, on a node that owns all slots and checks every key a script touches."""
    ops: list[tuple[AnyOp, type]] = [
        (AcquireLease(member(ROUTER), TTL), LeaseHeld),
        (RenewLease(ROUTER, TTL), LeaseHeld),
        (AdmitRequest(spec(), ROUTER), Done),
        (PlaceRequest("r1", 1, ROUTER, DECODE, PREFILL), Done),
        (AdvanceRequest("r1", 1, RequestState.DECODING, DECODE), Done),
        (RetryRequest("r1", 1, ROUTER), Done),
        (PlaceRequest("r1", 2, ROUTER, DECODE, None), Done),
        (EndRequest("r1", 2, COMPLETED, GATEWAY), Done),
        (OpenResumable("c", GATEWAY, "t", "", ("r",), b"recipe", 10, 60_000, "i"), Resumable),
        (ClaimResumable("c", GATEWAY, "n", "", repeat="i", new_token="t2"), Resumable),
        (
            RestoreResumable(
                *("d", GATEWAY, "t", "", ("r",), b"recipe", 10, 60_000, "j"), turn=3, again=0
            ),
            Resumable,
        ),
        (CloseResumable("c", 0, 60_000, b"answer", repeat="i"), Resumable),
        (ReleaseLease(ROUTER), LeaseLost),
    ]

    async def test() -> None:
        await until(lambda: b"cluster_state:ok" in server.command("CLUSTER", "INFO"))
        async with open_ledger(server.url) as ledger:
            turn = 0
            for op, wanted in ops:
                if isinstance(op, CloseResumable):
                    op = msgspec.structs.replace(op, turn=turn)  # turns grow with time
                answer = await ask(ledger, op)
                assert isinstance(answer, wanted), op
                if isinstance(op, ClaimResumable):
                    turn = answer.turn

    asyncio.run(test())
