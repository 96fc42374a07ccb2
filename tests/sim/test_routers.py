"""Routers die, freeze and come back, and the ledger with them: streams do not notice.

Only routers (and the ledger) are disturbed here, so nobody has an excuse: every request completes
with the right tokens, and one that had begun to stream keeps its epoch and does not even pause.
"""

from __future__ import annotations

import pytest

from baton.core.outcomes import Ending
from sim.cluster import Cluster, Scenario

SEEDS = range(5)
#: A step takes 20 ms on average, of which as many may come in a row as requests share the worker.
PAUSE_S = 0.3


def run(seed: int, scenario: Scenario) -> Cluster:
    """Run ``seed``; in front of each router's death note which request streams in which epoch."""
    cluster = Cluster(seed, scenario)
    streaming: dict[str, int] = {}

    def note() -> None:
        for request_id, session in cluster.processes["gateway-0"].machine.state.sessions.items():
            if session.decode_spoke:
                streaming[request_id] = session.epoch

    for process in cluster.processes.values():
        if process.worker_id.startswith("router"):
            for name in ("kill", "freeze"):
                act = getattr(process, name)
                setattr(process, name, lambda act=act: (note(), act()))
    cluster.run()
    for request_id, epoch in streaming.items():
        record = cluster.ledger.model.records.get(request_id)
        assert record is None or record.epoch == epoch, f"{request_id} was placed again"
    for answer in cluster.clients.answers.values():
        assert answer.outcome is not None
        assert answer.outcome.ending is Ending.COMPLETED, f"{answer.spec.request_id} {answer}"
        assert answer.longest_gap_s < PAUSE_S, f"{answer.spec.request_id} paused"
    cluster.counts["streaming"] = len(streaming)
    return cluster


@pytest.mark.parametrize("routers", [1, 2])
def test_streams_do_not_notice_the_death_of_routers(routers: int) -> None:
    """With another router, and with none until the dead one is started again."""
    scenario = Scenario(
        routers=routers, decodes=2, prefills=2, blocks=200, router_kills=4, max_tokens=(30, 200)
    )
    total = sum(run(seed, scenario).counts["streaming"] for seed in SEEDS)
    assert total > 20, "no stream was there to notice anything"


@pytest.mark.parametrize("routers", [1, 2])
def test_streams_do_not_notice_frozen_routers(routers: int) -> None:
    """One that thaws finds itself superseded, or goes on if nobody else was there."""
    scenario = Scenario(
        routers=routers, decodes=2, prefills=2, blocks=200, router_freezes=4, max_tokens=(30, 200)
    )
    total = sum(run(seed, scenario).counts["streaming"] for seed in SEEDS)
    assert total > 20, "no stream was there to notice anything"
