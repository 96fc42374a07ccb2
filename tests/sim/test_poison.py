"""Requests that end whatever computes them: they fail in the end, and nobody else does.

Nothing but the poison disturbs here, so every other request has to complete with the right tokens,
however often its worker was taken from under it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.core.outcomes import Ending, Reason
from baton.router import entry
from baton.router.blame import Blames
from sim.cluster import Cluster, Scenario

SEEDS = range(8)
Patch = pytest.MonkeyPatch


def scenario(prefills: int, decodes: int) -> Scenario:
    """Four poison requests among ten others, all within two seconds."""
    return Scenario(
        prefills=prefills,
        decodes=decodes,
        blocks=200,
        requests=14,
        max_tokens=(30, 60),
        spread_s=2.0,
        poisons=4,
    )


def failed(cluster: Cluster) -> list[str]:
    """Return who did not complete although he is no poison."""
    return [
        f"seed {cluster.seed}: {name}: {answer.outcome}"
        for name, answer in cluster.clients.answers.items()
        if name not in cluster.poison
        and (answer.outcome is None or answer.outcome.ending is not Ending.COMPLETED)
    ]


@pytest.mark.parametrize("decodes", [1, 2])
@pytest.mark.parametrize("prefills", [0, 2])
def test_only_the_poison_fails(prefills: int, decodes: int) -> None:
    """Each poison request ends with ``attempts_exhausted`` after ``attempts_max`` deaths in a row,
    whichever stage it is fatal in; all others complete."""
    for seed in SEEDS:
        cluster = Cluster(seed, scenario(prefills, decodes))
        cluster.run()
        for name, fatal in cluster.poison.items():
            answer = cluster.clients.answers[name]
            assert answer.outcome is not None
            assert answer.outcome.reason is Reason.ATTEMPTS_EXHAUSTED, f"{seed}: {answer.outcome}"
            assert len(answer.ids) <= fatal
        assert failed(cluster) == []
        deaths = sum(process.starts - 1 for process in cluster.processes.values())
        assert deaths <= cluster.limits.attempts_max * len(cluster.poison), f"seed {seed}"


def nobody_speaks_for_the_dead(patch: Patch) -> None:
    patch.setattr(Blames, "heard", lambda *_: None)


def suspects_share_their_steps(patch: Patch) -> None:
    patch.setattr(entry, "SUSPECT_AFTER", 1_000)


@pytest.mark.parametrize("mutation", [nobody_speaks_for_the_dead, suspects_share_their_steps])
def test_without_the_rule_somebody_fails_with_it(
    mutation: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    """What keeps the others alive is the rule, not the scenario."""
    mutation(monkeypatch)
    victims: list[str] = []
    for seed in range(15):
        for prefills, decodes in ((2, 2), (0, 1)):
            cluster = Cluster(seed, scenario(prefills, decodes))
            cluster.run()
            victims += failed(cluster)
        if victims:
            break
    assert victims and "attempts_exhausted" in victims[0]
