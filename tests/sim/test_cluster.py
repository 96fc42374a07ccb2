"""The whole cluster under faults, seed by seed.

At least 200 seeds, and more while ``$BATON_SIM_BUDGET_S`` seconds (170 unless set) are not used up;
of computing, because beside other tests, at a low priority, time would leave none for more.
`make test-all` runs three thousand others. A seed that fails is named with the command that runs it
again and tells its story.
"""

from __future__ import annotations

import os
import time

import pytest

from sim.cluster import Cluster, Scenario

SEEDS_MIN = 200
BATCH = 10
#: Far beyond what the budget comes to on any machine.
SLOW_SEEDS = range(10_000, 13_000)
BUDGET_S = float(os.environ.get("BATON_SIM_BUDGET_S", "170"))

#: Seeds that have failed once, and what they found.
KEPT = {935: "a router kept what a gateway had ended out of its sight before it died"}


def again(seed: int) -> str:
    """Return the one command that runs ``seed`` again."""
    return f"PYTHONPATH=shared:services:tests python -m sim.run --story --seed {seed}"


def run(seed: int) -> None:
    """Run one seed; whatever it raises names the seed."""
    cluster = Cluster(seed)
    try:
        cluster.run()
    except Exception as error:
        raise AssertionError(
            f"seed {seed}: {type(error).__name__}: {error}\n{cluster.scenario}\n{again(seed)}"
        ) from error


@pytest.fixture(scope="module")
def began() -> float:
    """When the first batch began, in seconds that this process has computed."""
    return time.process_time()


@pytest.mark.parametrize("first", range(0, SEEDS_MIN, BATCH))
def test_the_cluster_keeps_its_promises(first: int, began: float) -> None:
    """No wrong token, one outcome each, nothing left behind, and it serves afterwards."""
    for seed in range(first, first + BATCH):
        run(seed)


@pytest.mark.parametrize("seed", KEPT)
def test_what_has_failed_once(seed: int) -> None:
    """A seed beyond the first ones that found something is run each time."""
    run(seed)


def test_more_seeds_while_there_is_time(began: float) -> None:
    """The budget is used up: every run of the suite may find what no run has found before."""
    seed = SEEDS_MIN
    while time.process_time() - began < BUDGET_S:
        run(seed)
        seed += 1


@pytest.mark.slow
@pytest.mark.parametrize("first", SLOW_SEEDS[::100])
def test_thousands_of_seeds(first: int) -> None:
    """The same promises, for seeds that no other run takes."""
    for seed in range(first, first + 100):
        run(seed)


def test_every_flipped_bit_is_counted() -> None:
    """(24) Between the storing of a chunk and its verification: each costs one block, and no more
    than time."""
    cluster = Cluster(1, Scenario(requests=25, flips=8))
    cluster.run()
    assert cluster.counts["integrity_failures_total"] == cluster.flips >= 4


def test_the_same_seed_is_the_same_run() -> None:
    """A failing seed can be run again: its story is the same, word for word."""
    stories = []
    for _ in range(2):
        cluster = Cluster(17)
        cluster.run()
        stories.append(list(cluster.story))
    assert stories[0] == stories[1]
