"""The only decode worker dies under load and comes back: it goes on from its own old memory.

The checkers are those of every run; here it is seen that it is a take-over by which requests go on,
how much is computed again, and that what a living prefill worker stores late harms nobody.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.lifecycles import BlockState
from baton.core.outcomes import Ending
from sim.cluster import Cluster, Scenario

SEEDS = range(4)
LOAD = Scenario(blocks=200, requests=16, max_tokens=(100, 200), spread_s=1.0)


def under_load(seed: int, prefills: int) -> Cluster:
    """Return a run in which some requests are decoding."""
    cluster = Cluster(seed, replace(LOAD, prefills=prefills))
    cluster.start()
    cluster.disturb()
    cluster.clock.run_for(1.0)
    running = cluster.processes["decode-0"].machine.gauges()["num_requests_running"]
    assert running >= 4, "not under load"
    return cluster


def finish(cluster: Cluster) -> None:
    """Let everything end; nobody noticed."""
    cluster.clock.run_for(3.0)
    cluster.calm_down()
    cluster.settle()
    for answer in cluster.clients.answers.values():
        assert answer.outcome is not None
        assert answer.outcome.ending is Ending.COMPLETED, answer.outcome


@pytest.mark.parametrize("prefills", [0, 1])
def test_a_restarted_decode_goes_on_from_its_own_memory(prefills: int) -> None:
    """Every client gets its answer, and at most the unsealed tail is computed again."""
    for seed in SEEDS:
        cluster = under_load(seed, prefills)
        cluster.processes["decode-0"].kill()
        finish(cluster)
        counts = cluster.counts
        resumed = counts["recoveries_total:take_over"]
        assert counts["taken_over"] == 1 and resumed >= 4, f"seed {seed}: {counts}"
        again = counts["recomputed_tokens_total:take_over"] / resumed
        # A block, and the tokens of the step that was in flight.
        assert again <= cluster.layout.block_size + 2, f"seed {seed}: {again} tokens each"


def test_a_decode_that_dies_twice_goes_on_from_what_both_have_computed() -> None:
    """Blocks that were taken over and blocks that the successor filled are the same to the next."""
    for seed in SEEDS:
        cluster = under_load(seed, 1)
        decode = cluster.processes["decode-0"]
        decode.kill()
        cluster.clock.run_for(1.5)
        before = cluster.counts["recoveries_total:take_over"]
        decode.kill()
        finish(cluster)
        assert cluster.counts["taken_over"] == 2
        assert cluster.counts["recoveries_total:take_over"] > before >= 4, f"seed {seed}"


def test_what_a_stalled_prefill_may_still_store_is_nobodys_until_it_has_stopped() -> None:
    """It sleeps between its look at the fence and its stores while decode dies and comes back."""
    seen = 0
    for seed in range(6):
        cluster = Cluster(seed, replace(LOAD, blocks=80, max_tokens=(30,), stalls=1, prefills=2))
        cluster.start()
        cluster.disturb()
        if not cluster.clock.run_while(lambda c=cluster: not c.stalls, 2.0):
            continue
        decode = cluster.processes["decode-0"]
        decode.kill()
        cluster.clock.run_for(1.5)
        counts = decode.machine.state.pool.counts()
        if counts[BlockState.QUARANTINED]:
            assert decode.machine.handover.former
            seen += 1
        finish(cluster)
        assert not decode.machine.handover.former
    assert seen >= 2
