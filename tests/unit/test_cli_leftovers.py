"""What a cluster leaves behind is taken away once its owners are dead, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.channel.arena import SharedArena
from baton.cli import leftovers
from baton.cli.record import ClusterRecord
from baton.ports.channel import ArenaInUse
from support.channel_fixtures import shared_directory
from support.channel_parts import COMPAT, LAYOUT, OWNER


@pytest.fixture
def arena() -> Iterator[SharedArena]:
    with shared_directory() as directory:
        made = SharedArena.create(directory, "test", OWNER, LAYOUT, COMPAT, blocks=8)
        yield made
        made.close(unlink=False)


def record_of(arena: SharedArena) -> ClusterRecord:
    return ClusterRecord(
        name="test",
        mode="split",
        model="tiny",
        url="http://127.0.0.1:8000",
        arena_dir=str(Path(arena.ref.path).parent),
        supervisor_pid=1,
        supervisor_started=1,
        boot_id="b",
        baton_version="0",
        settings_source="",
        arenas="test",
    )


def test_an_arena_whose_owner_is_just_ending_is_waited_for(
    arena: SharedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a killed process ends a moment after the process: that is nothing left behind."""
    looks = []
    real = leftovers.remove_unowned

    def look(path: Path) -> bool:
        looks.append(path)
        try:
            return real(path)
        except ArenaInUse:
            arena.close(unlink=False)
            raise

    monkeypatch.setattr(leftovers, "remove_unowned", look)
    assert leftovers.remove_arenas(record_of(arena)) == []
    assert len(looks) == 2
    assert not Path(arena.ref.path).exists()


def test_an_arena_whose_owner_lives_stays_and_is_named(
    arena: SharedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path stands in the words once, with its owner."""
    monkeypatch.setattr(leftovers, "_UNMAP_S", 0.0)
    (words,) = leftovers.remove_arenas(record_of(arena))
    assert words.count(arena.ref.path) == 1
    assert str(OWNER) in words
    assert Path(arena.ref.path).exists()
    assert leftovers.remove_arenas(record_of(arena), keep={"decode-0"}) == []
