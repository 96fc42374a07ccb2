"""Two decode workers under load, one of which dies, freezes or shuts down: the other goes on.

The checkers are those of every run; here it is seen that requests go on by import, how much they
compute again, and that nobody is told of a failure.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.core.outcomes import Ending
from sim.cluster import Cluster, Scenario

SEEDS = range(2)
LOAD = Scenario(decodes=2, blocks=200, requests=16, max_tokens=(100, 200), spread_s=1.0)


def disturbed(seed: int, prefills: int, disturb: Callable[[Cluster], None]) -> Cluster:
    """Return a finished run in which ``disturb`` happened under full load."""
    scenario = Scenario(**{**_fields(LOAD), "prefills": prefills})
    cluster = Cluster(seed, scenario)
    cluster.start()
    cluster.disturb()
    cluster.clock.run_for(1.0)
    running = cluster.processes["decode-0"].machine.gauges()["num_requests_running"]
    assert running >= 4, "not under load"
    disturb(cluster)
    cluster.clock.run_for(3.0)
    cluster.calm_down()
    cluster.settle()
    return cluster


def _fields(scenario: Scenario) -> dict[str, object]:
    return {name: getattr(scenario, name) for name in scenario.__dataclass_fields__}


def all_completed(cluster: Cluster) -> None:
    """Nobody noticed."""
    for answer in cluster.clients.answers.values():
        assert answer.outcome is not None
        assert answer.outcome.ending is Ending.COMPLETED, answer.outcome


def killed(cluster: Cluster) -> None:
    cluster.processes["decode-0"].kill()


def frozen(cluster: Cluster) -> None:
    process = cluster.processes["decode-0"]
    process.freeze()
    cluster.clock.call_later(2.9, process.thaw)


def drained(cluster: Cluster) -> None:
    cluster.processes["decode-0"].drain()


@pytest.mark.parametrize("prefills", [0, 1])
@pytest.mark.parametrize("disturb", [killed, frozen, drained])
def test_another_decode_imports_what_one_had(
    disturb: Callable[[Cluster], None], prefills: int
) -> None:
    """Every client gets its answer, and at most the unsealed tail is computed again."""
    for seed in SEEDS:
        cluster = disturbed(seed, prefills, disturb)
        all_completed(cluster)
        counts = cluster.counts
        imports = counts["recoveries_total:import"]
        assert imports >= 3, f"seed {seed}: {counts}"
        again = counts["recomputed_tokens_total:import"] / imports
        # A block, and the tokens of the step that was in flight.
        assert again <= cluster.layout.block_size + 2, f"seed {seed}: {again} tokens each"
        if disturb is drained:
            assert counts["moves_total"] >= 3
            assert (0, "drained") in cluster.processes["decode-0"].exits
            assert not counts["attempts_failed_total"]


def test_a_drain_without_another_decode_lets_everything_end() -> None:
    """Nobody could take it: as long as ``drain_ms`` it runs on."""
    cluster = Cluster(1, Scenario(blocks=200, requests=8, max_tokens=(30, 60), spread_s=1.0))
    cluster.start()
    cluster.disturb()
    cluster.clock.run_for(1.0)
    cluster.processes["decode-0"].drain()
    cluster.clock.run_for(10.0)
    cluster.calm_down()
    cluster.settle()
    assert (0, "drained") in cluster.processes["decode-0"].exits
    assert not cluster.counts["moves_total"] and not cluster.counts["attempts_failed_total"]


def test_a_moving_request_survives_the_death_of_both_sides() -> None:
    """The draining worker dies in mid-move, or the importing one: it goes on with the other."""
    for seed in SEEDS:
        for victim in ("decode-0", "decode-1"):

            def both(cluster: Cluster, victim: str = victim) -> None:
                drained(cluster)
                cluster.clock.call_later(0.02, cluster.processes[victim].kill)

            all_completed(disturbed(seed, 1, both))
