"""The simulator's ledger answers whatever is asked exactly as the scripts do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.ids import Peer
from baton.core.lifecycles import RequestState
from baton.core.outcomes import Ending, Outcome
from baton.ports.ledger import (
    AcquireLease,
    AdmitRequest,
    AdoptRequest,
    AdvanceRequest,
    AnyOp,
    EndRequest,
    FindOrphans,
    FindOwned,
    LeaseHeld,
    LeaseLost,
    Owned,
    PlaceRequest,
    ReleaseLease,
    RenewLease,
    Reply,
    RetryRequest,
    Unavailable,
)
from baton.sim.ledger import LedgerModel
from support.ledger_bench import (
    CANCELLED,
    COMPLETED,
    DECODE,
    DECODE_2,
    GATEWAY,
    LIMITS,
    PREFILL,
    ROUTER,
    ROUTER_2,
    RealBench,
    member,
    spec,
)
from support.ledger_server import LedgerServer

#: Nothing expires by itself here: time is tested by the conformance tests.
LASTING = msgspec.structs.replace(LIMITS, lease_ttl_ms=600_000, terminal_ttl_ms=600_000)
TTL = LASTING.lease_ttl_ms

ROUTERS = st.sampled_from([ROUTER, ROUTER_2])
DECODES = st.sampled_from([DECODE, DECODE_2, Peer("decode-0", 8)])
WORKERS = st.sampled_from([DECODE, DECODE_2, PREFILL])
IDS = st.sampled_from(["r1", "r2"])
EPOCHS = st.sampled_from([1, 1, 1, 2, 2, 3, 0])
INCARNATIONS = st.builds(Peer, st.sampled_from(["decode-0", "router-0"]), st.integers(1, 4))
OUTCOMES = st.sampled_from([COMPLETED, CANCELLED, Outcome(Ending.FAILED, message="x")])

REQUEST_OPS = st.one_of(
    st.builds(AdmitRequest, st.builds(spec, IDS), ROUTERS),
    st.builds(PlaceRequest, IDS, EPOCHS, ROUTERS, DECODES, st.sampled_from([None, PREFILL])),
    st.builds(AdvanceRequest, IDS, EPOCHS, st.sampled_from(RequestState), WORKERS),
    st.builds(
        AdoptRequest,
        st.builds(spec, IDS),
        ROUTERS,
        st.integers(1, 4),
        EPOCHS,
        st.sampled_from([None, DECODE, DECODE_2]),
        st.sampled_from([None, PREFILL]),
    ),
    st.builds(RetryRequest, IDS, EPOCHS, ROUTERS, st.integers(0, 2)),
    st.builds(
        EndRequest,
        *(IDS, EPOCHS, OUTCOMES, st.sampled_from([GATEWAY, DECODE, ROUTER])),
        st.sampled_from([0, 0, 1, 3]),
    ),
    st.builds(FindOwned, st.sampled_from([GATEWAY, DECODE, ROUTER]), st.sampled_from([0, 9])),
)
LEASE_OPS = st.one_of(
    st.builds(AcquireLease, st.builds(member, INCARNATIONS), st.just(TTL)),
    st.builds(RenewLease, INCARNATIONS, st.just(TTL)),
    st.builds(ReleaseLease, INCARNATIONS),
    st.builds(
        FindOrphans,
        INCARNATIONS,
        st.just(TTL),
        st.integers(0, 5),
        st.lists(INCARNATIONS, max_size=3).map(tuple),
    ),
)


@pytest.fixture(scope="module")
def bench() -> Iterator[RealBench]:
    with LedgerServer() as server:
        bench = RealBench(server, "twins", LASTING)
        yield bench
        bench.close()


def comparable(answer: Reply | Unavailable) -> object:
    """The two ledgers' ids are random: leave them out."""
    match answer:
        case LeaseHeld():
            return ("held", answer.rebuilding, answer.members, answer.lost)
        case LeaseLost():
            return "lost"
        case Owned():
            return ("owned", sorted(answer.request_ids))  # ordered by clocks that differ
        case _:
            return answer


def text(stored: object) -> str:
    assert isinstance(stored, bytes)
    return stored.decode()


def both(bench: RealBench, ops: list[AnyOp]) -> LedgerModel:
    """Execute ``ops`` on both, each from empty; compare all answers; return the model."""
    bench.wipe()
    model, now_ms = LedgerModel(LASTING, Random(1)), itertools.count(1_000_000)
    real = [comparable(answer) for _, answer in bench.ask_all(ops)]
    assert real == [comparable(model.execute(op, next(now_ms))) for op in ops]
    return model


@given(ops=st.lists(REQUEST_OPS, max_size=40))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_requests(bench: RealBench, ops: list[AnyOp]) -> None:
    """Any order of transitions: the same answers, the same records, the same owners."""
    model = both(bench, ops)
    for request_id in ("r1", "r2"):
        record = model.records.get(request_id)
        stored = bench.redis.hmget(bench.keys.request(request_id), "state", "epoch", "attempts")
        if record is None:
            assert stored == [None, None, None]
        else:
            wanted = [record.state.value, str(record.epoch), str(record.attempts)]
            assert [text(each) for each in stored] == wanted
    for peer in (ROUTER, ROUTER_2, GATEWAY, PREFILL, DECODE, DECODE_2, Peer("decode-0", 8)):
        assert bench.owned(peer) == model.owned(peer)


@given(ops=st.lists(LEASE_OPS, max_size=30))
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_leases(bench: RealBench, ops: list[AnyOp]) -> None:
    """Any order of starts, renewals and ends of four incarnations: the same members."""
    model = both(bench, ops)
    stored = {text(key) for key in bench.redis.hkeys(bench.keys.members)}
    assert stored == {str(peer) for peer in model.members}
    leases = {text(key) for key in bench.redis.zrange(bench.keys.leases, 0, -1)}
    assert leases == {str(peer) for peer in model.leases}
