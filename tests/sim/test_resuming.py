"""Gateways die and freeze, connections break: whoever comes back in time gets the whole answer.

Only gateways and connections are disturbed here, so nobody has an excuse.
"""

from __future__ import annotations

import pytest

from baton.core.outcomes import Ending
from baton.decode.readers import Readers
from sim.cluster import Cluster, Scenario

SEEDS = range(6)
BROKEN = Scenario(
    gateways=2, decodes=2, blocks=200, resumable=1.0, max_tokens=(30, 200), breaks=25, requests=25
)
DYING = Scenario(
    gateways=2, decodes=2, blocks=200, resumable=1.0, max_tokens=(30, 200), gateway_kills=4
)
FROZEN = Scenario(
    gateways=2, blocks=200, resumable=1.0, max_tokens=(30, 200), gateway_freezes=3, breaks=10
)


@pytest.mark.parametrize(
    "scenario", [BROKEN, DYING, FROZEN], ids=["connections", "deaths", "freezes"]
)
def test_who_comes_back_gets_the_whole_answer(scenario: Scenario) -> None:
    """Every request whose client had its token completes, with the ids of an undisturbed run."""
    claims = 0
    for seed in SEEDS:
        cluster = Cluster(seed, scenario)
        cluster.run()
        for answer in cluster.clients.answers.values():
            if answer.known and not answer.cancelled:
                assert answer.outcome is not None
                ended = answer.outcome.ending
                assert ended is Ending.COMPLETED, f"seed {seed}: {answer.outcome}"
                claims += answer.claims
    assert claims > 20, "nobody had to come back"


def test_nothing_is_computed_twice_when_a_connection_breaks() -> None:
    """A running attempt goes on: no epoch but the first, at whatever gateway it is read."""
    cluster = Cluster(1, BROKEN)
    cluster.run()
    assert cluster.counts["resumes_total:moved"] > 0
    epochs = {record.epoch for record in cluster.ledger.model.records.values()}
    assert epochs == {1}


def test_a_gateway_that_is_sent_only_what_is_new_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tests above fail if decode goes on in the middle for a gateway that has nothing."""

    def mutant(self: Readers, seq: object) -> None:
        seq.away_since = None  # type: ignore[attr-defined]

    monkeypatch.setattr(Readers, "_back", mutant)
    monkeypatch.setattr("baton.decode.output.Output.resend", lambda *_: None)
    with pytest.raises(AssertionError, match="no outcome"):
        Cluster(0, BROKEN).run()
