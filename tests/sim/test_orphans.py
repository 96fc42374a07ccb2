"""Records of which nobody knows: the ledger has again what was over, and then its owners die.

Scripted runs: a ledger is failed over with lost writes, and before anybody has looked, whoever the
live record names dies or says goodbye. The whole of the faults at random is in ``test_cluster.py``;
that no live record names the dead for long is looked at in every run (``oracles.Nobodys``).
"""

from __future__ import annotations

import pytest

from baton.core.outcomes import Ending, Reason
from baton.router.orphans import OrphanSweep
from sim import oracles
from sim.clients import Answer
from sim.cluster import Cluster, Scenario
from sim.comebacks import WINDOW_S

CALM = Scenario(gateways=2, routers=2, decodes=2, blocks=200, requests=0)


def asked(cluster: Cluster, *, tokens: int = 30, resumable: bool = False) -> Answer:
    """Ask at gateway-1, and wait until it is decoded."""
    gateway = cluster.processes["gateway-1"]
    answer = cluster.clients.ask(max_tokens=tokens, tokens=40, resumable=resumable, gateway=gateway)
    begun = cluster.clock.run_while(lambda: len(answer.ids) < 1, 5.0)
    assert begun
    return answer


def again(cluster: Cluster) -> tuple[Answer, str]:
    """One request is over, and its record is live again; return who decoded it."""
    answer = asked(cluster)
    replica = cluster.ledger.replica()
    assert cluster.clock.run_while(lambda: answer.outcome is None, 10.0)
    cluster.clock.run_for(0.2)
    cluster.ledger.fail_over(replica)
    record = cluster.ledger.model.records[answer.spec.request_id]
    assert record.outcome is None and record.decode is not None
    return answer, record.decode.worker_id


@pytest.mark.parametrize("also", ["nobody", "router", "another router"])
@pytest.mark.parametrize("leaves", ["kill", "drain"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_live_again_ends_although_its_owners_are_gone(
    seed: int, leaves: str, also: str
) -> None:
    """Its gateway dies before it has looked, its decode dies or says goodbye with nothing in hand;
    its router, alive or not, does not know it."""
    cluster = Cluster(seed, CALM)
    cluster.start()
    answer, decode = again(cluster)
    record = cluster.ledger.model.records[answer.spec.request_id]
    cluster.clients.gateway_dies(cluster.processes["gateway-1"])
    cluster.processes["gateway-1"].kill()
    getattr(cluster.processes[decode], leaves)()
    for name in ("router-0", "router-1"):
        mine = name == record.router.worker_id
        if (also == "router" and mine) or (also == "another router" and not mine):
            cluster.processes[name].kill()
    oracles.Nobodys(cluster).look()
    cluster.settle()
    record = cluster.ledger.model.records[answer.spec.request_id]
    assert record.outcome is not None
    assert (record.outcome.ending, record.outcome.reason) == (
        Ending.CANCELLED,
        Reason.GATEWAY_LOST,
    )


def test_the_oracle_objects_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails if routers do not look through the ledger."""
    monkeypatch.setattr(OrphanSweep, "found", lambda *_: None)
    with pytest.raises(AssertionError, match="which is gone"):
        test_what_is_live_again_ends_although_its_owners_are_gone(0, "kill", "nobody")


@pytest.mark.parametrize("seed", range(3))
def test_what_its_client_cannot_resume_ends_with_its_window(seed: int) -> None:
    """The ledger is emptied, and the gateway dies before it has told it the token: the client asks
    anew, and the former request goes on for nobody. Whoever has it says so, and for how long."""
    cluster = Cluster(seed, CALM)
    cluster.start()
    answer = asked(cluster, tokens=200, resumable=True)
    cluster.wiped = True
    cluster.ledger.wipe()
    died_at = cluster.clock.now()
    cluster.clients.gateway_dies(cluster.processes["gateway-1"])
    cluster.processes["gateway-1"].kill()
    oracles.Nobodys(cluster).look()
    cluster.clock.run_for(WINDOW_S - 1.0)
    assert answer.outcome is not None and answer.outcome.ending is Ending.CANCELLED
    record = cluster.ledger.model.records[answer.spec.request_id]
    assert record.outcome is None
    holds = [
        each.window_ms
        for name in ("router-0", "router-1", "decode-0", "decode-1")
        for each in cluster.processes[name].machine.holdings().requests
        if each.request_id == answer.spec.request_id
    ]
    assert holds == [WINDOW_S * 1000] * 2, "its router and its decode say so"
    assert cluster.clock.run_while(lambda: record.outcome is None, 3.0)
    assert cluster.clock.now() - died_at > WINDOW_S - 0.5
    cluster.settle()


def test_nobody_computes_for_what_was_ended_as_nobodys() -> None:
    """Gateway and router die, and its client does not come back: whoever ends it for them says so
    to the worker, which would wait for the rest of the window."""
    cluster = Cluster(1, CALM)
    cluster.start()
    answer = asked(cluster, tokens=900, resumable=True)
    answer.abandoned = True
    record = cluster.ledger.model.records[answer.spec.request_id]
    cluster.processes[record.router.worker_id].kill()
    cluster.clients.gateway_dies(cluster.processes["gateway-1"])
    cluster.processes["gateway-1"].kill()
    assert cluster.clock.run_while(lambda: record.outcome is None, WINDOW_S + 12.0)
    cluster.clock.run_for(0.5)
    decodes = [cluster.processes[name].machine.state for name in ("decode-0", "decode-1")]
    assert not any(state.sequences for state in decodes)
    cluster.settle()


def test_who_comes_back_late_finds_its_answer_although_gateway_and_router_died() -> None:
    """Its window is its window: longer than anybody else waits for the dead."""
    cluster = Cluster(1, CALM)
    cluster.start()
    answer = asked(cluster, tokens=60, resumable=True)
    answer.abandoned = True  # until it comes back below
    record = cluster.ledger.model.records[answer.spec.request_id]
    cluster.processes[record.router.worker_id].kill()
    cluster.clients.gateway_dies(cluster.processes["gateway-1"])
    cluster.processes["gateway-1"].kill()
    oracles.Nobodys(cluster).look()
    cluster.clock.run_for(0.8 * WINDOW_S)
    record = cluster.ledger.model.records[answer.spec.request_id]
    assert record.outcome is None
    answer.abandoned = False
    cluster.clients.comebacks.come_back(answer)
    assert cluster.clock.run_while(lambda: answer.outcome is None, 30.0)
    assert answer.outcome is not None and answer.outcome.ending is Ending.COMPLETED
    cluster.settle()


def test_what_runs_is_not_taken_for_over_where_its_record_went_back() -> None:
    """Gateway and router were both replaced, and the ledger forgot it: the record names the dead,
    and the request runs on for longer than anybody waits for them."""
    cluster = Cluster(1, CALM)
    cluster.start()
    answer = asked(cluster, tokens=900, resumable=True)
    request_id = answer.spec.request_id
    replica = cluster.ledger.replica()
    router = cluster.ledger.model.records[request_id].router.worker_id
    cluster.processes[router].kill()
    cluster.clients.gateway_dies(cluster.processes["gateway-1"])
    cluster.processes["gateway-1"].kill()

    former = replica.records[request_id]

    def stays() -> bool:
        record = cluster.ledger.model.records[request_id]
        return former.router == record.router or former.spec.gateway == record.spec.gateway

    assert cluster.clock.run_while(stays, 10.0)
    cluster.ledger.model.records[request_id] = former
    assert cluster.clock.run_while(lambda: answer.outcome is None, 60.0)
    assert answer.outcome is not None and answer.outcome.ending is Ending.COMPLETED
    assert cluster.clock.now() > 10.0, "it ended before anybody could have taken it for over"
    cluster.settle()
