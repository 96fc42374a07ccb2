"""Arenas with blocks on a device: what a successor may take over, and what it may not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.channel import on_device
from baton.channel.arena import SharedArena
from baton.channel.layout import PAGE
from baton.channel.sizing import choose_device_size
from baton.core.ids import Peer
from baton.ports.channel import ArenaGone, ArenaTooSmall
from baton.ports.device import NotKept
from support.channel_parts import COMPAT, LAYOUT, OWNER, WRITER
from support.device_parts import DEVICE_LAYOUT, PIDS, DeviceHost, device_host

HEIR = Peer(OWNER.worker_id, 1003)


@pytest.fixture
def host() -> Iterator[DeviceHost]:
    with device_host() as found:
        yield found


def test_the_file_has_no_bytes_of_blocks(host: DeviceHost) -> None:
    """Header and records: all that decides who may do what."""
    arena = host.create(blocks=8)
    assert Path(arena.ref.path).stat().st_size == 2 * PAGE
    assert len(arena.memory) == 8 * LAYOUT.block_bytes


def test_layouts_of_host_and_device_never_meet() -> None:
    """Their words differ, so do their digests and all block names."""
    assert LAYOUT.describe() != DEVICE_LAYOUT.describe()


def test_blocks_that_nobody_keeps_are_made_anew(
    host: DeviceHost, capfd: pytest.CaptureFixture[str]
) -> None:
    """Owner and keeper died: records without memory are worth nothing."""
    old = host.create()
    old.memory[0] = 1
    host.die(old, OWNER.incarnation)
    host.link.drop(Path(old.ref.path).name)
    new = host.open(HEIR, blocks=8)
    assert new.former is None
    assert not any(new.memory)
    assert "its blocks are gone" in "".join(capfd.readouterr())


def test_an_arena_of_the_mebibytes_asked_for_is_taken_over(host: DeviceHost) -> None:
    """They are the device's, not the file's, also when they are compared with what is there."""
    sized = {"size_mb": 1, "place": host._place}
    args = (host._directory, "test", OWNER, DEVICE_LAYOUT, COMPAT)
    old = SharedArena.open(*args, **sized)  # type: ignore[arg-type]
    assert old.blocks_total == 2**20 // LAYOUT.block_bytes
    host.die(old, OWNER.incarnation)
    new = SharedArena.open(*args[:2], HEIR, *args[3:], **sized)  # type: ignore[arg-type]
    assert (new.former, new.blocks_total) == (OWNER, old.blocks_total)
    new.close(unlink=True)


def test_an_owner_whose_kernels_may_run_is_not_succeeded_in_place(
    host: DeviceHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last step may still store: the successor gets other memory, which that step cannot
    reach."""
    monkeypatch.setattr(on_device, "_LOOKS", 2)
    monkeypatch.setattr(on_device, "_PAUSE_S", 0.0)
    old = host.create()
    late = old._own.blocks.memory  # type: ignore[union-attr]
    host.die(old, OWNER.incarnation)
    host.device.pids |= {PIDS + OWNER.incarnation}  # type: ignore[operator]
    new = host.open(HEIR, blocks=8)
    late[:] = 255
    assert new.former is None
    assert not any(new.memory)


def test_a_writer_whose_kernels_may_run_lives_on(host: DeviceHost) -> None:
    """To the successor as to the owner; its blocks stay in quarantine."""
    arena = host.create()
    mapped = host.channel().map(arena.ref, WRITER)
    host.die(mapped, WRITER.incarnation)
    host.device.pids |= {PIDS + WRITER.incarnation}  # type: ignore[operator]
    assert arena.writer_alive(WRITER.incarnation)
    host.die(arena, OWNER.incarnation)
    heir = host.open(HEIR)
    assert heir.former == OWNER
    assert heir.writer_alive(WRITER.incarnation)
    host.device.pids -= {PIDS + WRITER.incarnation}  # type: ignore[operator]
    assert not heir.writer_alive(WRITER.incarnation)


def test_without_a_keeper_nothing_is_mapped(host: DeviceHost) -> None:
    """The owner goes on with what it has; a writer is told."""
    arena = host.create()
    host.link.drop(Path(arena.ref.path).name)
    with pytest.raises(ArenaGone, match="cannot be had"):
        host.channel().map(arena.ref, WRITER)
    arena.offer()
    assert len(host.channel().map(arena.ref, WRITER).memory) == len(arena.memory)


def test_an_orderly_end_leaves_nothing_kept(host: DeviceHost) -> None:
    """The device's memory goes with the file."""
    arena = host.create()
    arena.close(unlink=True)
    with pytest.raises(NotKept):
        host.link.takers(arena.ref.file_id)


def test_sizes_on_a_device() -> None:
    """Blocks or MiB asked for, else half of what is free; too much is refused with both sizes."""
    size = LAYOUT.block_bytes
    assert choose_device_size(DEVICE_LAYOUT, 100 * size).blocks_total == 50
    assert choose_device_size(DEVICE_LAYOUT, 100 * size, blocks=99).blocks_total == 99
    assert choose_device_size(DEVICE_LAYOUT, 2**30, size_mb=3).blocks_total == 3 * 2**20 // size
    with pytest.raises(ArenaTooSmall, match=r"needs .* MiB of the device .*are free"):
        choose_device_size(DEVICE_LAYOUT, 100 * size, blocks=101)
    with pytest.raises(ArenaTooSmall):
        choose_device_size(DEVICE_LAYOUT, size)
