"""A beacon tells changes soon, bursts once, and nothing new at every beat."""

from __future__ import annotations

import pytest

from baton.core.beacon import Beacon


def test_unchanged_state_is_told_at_every_beat() -> None:
    """Silence is a sign of death, so the same state is told again and again."""
    beacon = Beacon(beat_s=0.5, pause_s=0.05)
    assert beacon.must_tell("a", 1.0)
    assert not beacon.must_tell("a", 1.4)
    assert beacon.deadline() == 1.5
    assert beacon.must_tell("a", 1.5)


def test_burst_of_changes_is_told_twice() -> None:
    """The first change goes out at once, the last one when the pause is over."""
    beacon = Beacon(beat_s=0.5, pause_s=0.05)
    beacon.must_tell(0, 1.0)
    told = [n for n in range(1, 40) if beacon.must_tell(n, 1.2 + n / 1000)]
    assert told == [1]
    assert beacon.deadline() == pytest.approx(1.251)
    assert beacon.must_tell(40, 1.26)


def test_change_and_back_is_no_change() -> None:
    """What came back to what was told needs no message before the beat."""
    beacon = Beacon(beat_s=0.5, pause_s=0.05)
    beacon.must_tell("a", 1.0)
    assert not beacon.must_tell("b", 1.01)
    assert not beacon.must_tell("a", 1.06)
    assert beacon.deadline() == 1.5


def test_new_listener_hears_at_once() -> None:
    """Who just came must not wait for the next change."""
    beacon = Beacon(beat_s=0.5, pause_s=0.05)
    beacon.must_tell("a", 1.0)
    beacon.forget()
    assert beacon.deadline() < 1.0
    assert beacon.must_tell("a", 1.001)
