"""Adaptive clusters: requests go both ways, workers of both kinds die, every promise is kept."""

from __future__ import annotations

import pytest

from baton.core.slo import Slo
from sim.cluster import SLOS, Cluster, Scenario


@pytest.mark.parametrize("slo", SLOS, ids=["loose", "tight", "refusing"])
@pytest.mark.parametrize("decodes", [1, 2])
def test_whatever_way_was_chosen_nothing_is_lost(slo: Slo, decodes: int) -> None:
    """Both ways are taken; what one worker had begun goes on elsewhere after its death."""
    ways = dict.fromkeys(("local", "remote"), 0.0)
    failed = 0.0
    for seed in range(3):
        scenario = Scenario(
            prefills=2, decodes=decodes, blocks=200, requests=60, kills=9, slo=slo, spread_s=4.0
        )
        cluster = Cluster(seed, scenario)
        cluster.run()
        for way in ways:
            ways[way] += cluster.counts[f"ways_total:{way}"]
        failed += cluster.counts["attempts_failed_total"]
    assert ways["local"] > 10 and ways["remote"] > 10, ways
    assert failed > 0


def test_a_prompt_that_a_dead_decode_was_computing_is_computed_elsewhere() -> None:
    """Nothing of an attempt says which way it went: the next one is placed like any other."""
    scenario = Scenario(
        prefills=0, decodes=2, blocks=200, requests=60, kills=6, slo=SLOS[0], max_tokens=(30,)
    )
    cluster = Cluster(5, scenario)
    cluster.run()
    assert cluster.counts["attempts_failed_total:worker_lost"] > 0
    assert not cluster.counts["ways_total:remote"]
