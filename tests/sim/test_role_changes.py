"""Workers change their role under load, and are killed in the middle of it.

The checkers are those of every run: no wrong token, one outcome each, nothing left behind, and it
serves afterwards.
"""

from __future__ import annotations

import pytest

from baton.core.ids import Role
from baton.core.outcomes import Ending
from baton.ports.driving import EXIT_ROLE
from sim.cluster import Cluster, Scenario
from sim.process import Process

OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
CALM = Scenario(prefills=2, decodes=2, blocks=200, requests=20, max_tokens=(20, 120), spread_s=3.0)
HARD = Scenario(
    prefills=2,
    decodes=2,
    routers=2,
    blocks=64,
    requests=25,
    max_tokens=(1, 30, 200),
    spread_s=3.0,
    kills=2,
    freezes=1,
    cancels=3,
    cuts=1,
    stalls=1,
)
CHANGES = 6


def _change_one(cluster: Cluster, *, kill: bool) -> None:
    """Have a worker change that is not the last of its kind, as the ledger would allow."""
    random = cluster.clock.random
    workers = [p for p in cluster.processes.values() if p.role in OTHER and p.alive]
    if any(p.role is not p.becomes for p in workers):
        return  # one at a time
    able = [p for p in workers if not p.frozen and _has_another(p, workers)]
    if not able:
        return
    victim = random.choice(able)
    victim.change_role(OTHER[victim.role])
    if kill:
        cluster.clock.call_later(random.uniform(0, 0.3), victim.kill)


def _has_another(one: Process, workers: list[Process]) -> bool:
    return any(p is not one and p.role is one.role and not p.frozen for p in workers)


def _run(seed: int, scenario: Scenario, *, kills: float) -> Cluster:
    cluster = Cluster(seed, scenario)
    cluster.start()
    cluster.disturb()
    random = cluster.clock.random
    for _ in range(CHANGES):
        kill = random.random() < kills
        at = random.uniform(0, scenario.spread_s)
        cluster.clock.call_later(at, lambda kill=kill: _change_one(cluster, kill=kill))
    cluster.clock.run_for(scenario.spread_s)
    cluster.calm_down()
    cluster.settle()
    return cluster


def _changes(cluster: Cluster) -> int:
    exits = [exit_ for p in cluster.processes.values() for exit_ in p.exits]
    return sum(code == EXIT_ROLE for code, _ in exits)


@pytest.mark.parametrize("seed", range(12))
def test_changes_under_load_cost_nobody_an_answer(seed: int) -> None:
    """Every client gets its whole answer; roles did change."""
    cluster = _run(seed, CALM, kills=0.0)
    assert _changes(cluster) >= 1
    for answer in cluster.clients.answers.values():
        assert answer.outcome is not None
        assert answer.outcome.ending is Ending.COMPLETED, answer.outcome


@pytest.mark.parametrize("seed", range(24))
def test_changes_among_faults_keep_the_promises(seed: int) -> None:
    """Kills in the middle of a change among them: the word is kept, so it comes back as what it was
    told to be."""
    cluster = _run(seed, HARD, kills=0.5)
    assert all(p.role is p.becomes for p in cluster.processes.values())
