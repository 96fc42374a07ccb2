"""Routers learn what is in prefix caches although news of it are lost, late, too many, or from
workers that die: the checkers of every run hold what they know against the caches at the end."""

from __future__ import annotations

import pytest

from sim.cluster import Cluster, Scenario


@pytest.mark.parametrize("names_max", [4_096, 5])
@pytest.mark.parametrize("lost", [0.05, 0.4])
def test_what_routers_know_comes_right(lost: float, names_max: int) -> None:
    """Each of two routers, of each of two decode workers that die, are stopped and evict."""
    counts: dict[str, float] = {}
    for seed in range(3):
        scenario = Scenario(
            prefills=1,
            decodes=2,
            routers=2,
            blocks=32,
            requests=60,
            kills=3,
            drains=1,
            news_lost=lost,
            names_max=names_max,
        )
        cluster = Cluster(seed, scenario)
        cluster.run()
        for name, count in cluster.counts.items():
            counts[name] = counts.get(name, 0) + count
    assert counts["news_lost"] > 10 and counts["news_late"] > 10
    assert counts["prefix_resyncs_total:gap"] > 3
    # Where most is lost, little that is told follows on what is known.
    assert names_max > 5 or lost > 0.1 or counts["prefix_resyncs_total:too_many"] > 3


def test_undisturbed_news_need_no_second_asking() -> None:
    """The link keeps their order, nothing is too much, and prompts are found where they are."""
    cluster = Cluster(1, Scenario(prefills=1, decodes=2, routers=2, blocks=32, requests=60))
    cluster.run()
    assert cluster.counts["prefix_resyncs_total"] == 0
    assert cluster.counts["prefix_expected_tokens_total"] > 0
    assert cluster.counts["prefix_found_tokens_total"] > 0
