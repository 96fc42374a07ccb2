"""At least 10^6 bad transfers against the real channel and decode's hand-over: none accepted."""

from __future__ import annotations

import pytest

from baton.ports.channel import BlockCheck
from support.channel_fixtures import shared_directory
from support.transfers import KINDS, Accepted, Transfers

MOST = 1_000_000


def _inject(transfers: int, seed: int) -> Transfers:
    with shared_directory() as directory:
        place = Transfers(directory, seed)
        try:
            place.run(transfers)
        finally:
            place.close()
    return place


def _all_kinds(place: Transfers) -> None:
    assert set(place.injected) == set(KINDS)
    assert min(place.injected.values()) > place.total / 20, place.injected
    assert place.good > place.total / 20, "good transfers are taken all the while"


def test_no_bad_transfer_is_accepted() -> None:
    """20,000, of every kind; between them good ones complete their requests."""
    _all_kinds(_inject(20_000, seed=3))


@pytest.mark.slow
def test_no_bad_transfer_of_a_million_is_accepted() -> None:
    """The same, a million times."""
    place = _inject(MOST, seed=4)
    _all_kinds(place)
    assert place.total >= MOST


@pytest.mark.parametrize("rule", ["checksum", "fence"])
def test_the_adversary_wins_without_the_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With verification or the writer's fence switched off the first hundreds are accepted."""
    if rule == "checksum":

        def nothing(self: object, checks: list[BlockCheck]) -> list[int]:
            return []

        monkeypatch.setattr("baton.channel.arena.SharedArena.verify", nothing)
    else:
        monkeypatch.setattr("baton.channel.shm.ShmArena.may_write", lambda *_: True)
    with pytest.raises(Accepted):
        _inject(500, seed=5)
