"""The two ledgers that every conformance test of the port runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ledger_bench import LedgerBench, RealBench, SimBench
from support.ledger_server import LedgerServer


@pytest.fixture(scope="module")
def server() -> Iterator[LedgerServer]:
    with LedgerServer() as server:
        yield server


@pytest.fixture(params=["redis", "sim"])
def bench(request: pytest.FixtureRequest) -> Iterator[LedgerBench]:
    bench: RealBench | SimBench
    if request.param == "redis":
        server: LedgerServer = request.getfixturevalue("server")
        server.command("FLUSHALL")
        bench = RealBench(server)
    else:
        bench = SimBench()
    yield bench
    bench.close()
