"""What the channel relies on in a device's memory: the host in its place, and CUDA."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from baton.engine.build import build_device
from baton.ports.channel import BlockCheck
from baton.ports.device import Device, DeviceFull
from support.channel_parts import CHAIN
from support.device_parts import DEVICE_LAYOUT
from support.engine_device import needs_gpu

BLOCKS = 9
LENGTH = BLOCKS * DEVICE_LAYOUT.block_bytes


@pytest.fixture(
    params=["memfd", pytest.param("cuda", marks=[needs_gpu, pytest.mark.gpu])], scope="module"
)
def device(request: pytest.FixtureRequest) -> Device:
    return build_device(request.param)


def made(device: Device) -> tuple[int, Any]:
    fd = device.make(LENGTH)
    return fd, device.map(fd, DEVICE_LAYOUT, BLOCKS)


def test_new_memory_is_zero_and_of_the_size_asked_for(device: Device) -> None:
    """Nothing of whoever had it before shows, and nothing is behind its end."""
    fd, blocks = made(device)
    assert len(blocks.memory) == LENGTH
    assert not blocks.memory.any()
    assert not os.get_inheritable(fd)
    assert blocks.close()
    os.close(fd)


def test_two_mappings_show_the_same_bytes(device: Device) -> None:
    """What one stores the other reads, without a copy."""
    fd, one = made(device)
    other = device.map(fd, DEVICE_LAYOUT, BLOCKS)
    one.memory[:5] = 7
    other.memory[-1] = 9
    assert other.memory[:6].tolist() == [7, 7, 7, 7, 7, 0]
    assert one.memory[-1].item() == 9
    assert one.close() and other.close()
    os.close(fd)


def test_a_descriptor_alone_keeps_the_memory(device: Device) -> None:
    """Its maker has unmapped it; whoever has the descriptor finds every byte."""
    fd, blocks = made(device)
    blocks.memory[:] = torch.arange(LENGTH, device=blocks.memory.device) % 251
    kept = os.dup(fd)
    assert blocks.close()
    os.close(fd)
    again = device.map(kept, DEVICE_LAYOUT, BLOCKS)
    wanted = torch.arange(LENGTH, device=again.memory.device) % 251
    assert torch.equal(again.memory.to(torch.int64), wanted)
    assert again.close()
    os.close(kept)


def test_a_view_keeps_the_mapping(device: Device) -> None:
    """Closing under a tensor unmaps nothing: the last view does."""
    fd, blocks = made(device)
    view = blocks.memory[8:16]
    assert not blocks.close()
    view[:] = 3
    assert view.tolist() == [3] * 8
    os.close(fd)


def test_blocks_are_copied_whole(device: Device) -> None:
    """Into a slice of other memory of the device; done when it returns."""
    (fd, source), (other, target) = made(device), made(device)
    size = DEVICE_LAYOUT.block_bytes
    source.memory[2 * size : 3 * size] = 5
    source.copy_out(2, target.memory[4 * size : 5 * size])
    assert target.memory.view(BLOCKS, size).any(1).nonzero().flatten().tolist() == [4]
    assert bool((target.memory[4 * size : 5 * size] == 5).all())
    for each in (fd, other):
        os.close(each)


def test_checksums_are_the_same_on_every_device(device: Device) -> None:
    """The sums of words have one value, whoever makes them."""
    fd, blocks = made(device)
    blocks.memory[:] = torch.arange(LENGTH, device=blocks.memory.device) * 131 % 251
    checks = [BlockCheck(0, 0, 4, CHAIN), BlockCheck(1, 8, 3, CHAIN), BlockCheck(2, 5, 4, CHAIN)]
    assert blocks.checksums(checks) == WANTED
    assert blocks.checksums([*checks[::-1], *checks]) == [*WANTED[::-1], *WANTED]
    os.close(fd)


#: In Python's integers, see ``tests/unit/test_engine_device_checksum.py``.
WANTED = [10486159698555377323, 1451362301378294239, 18067170403696510449]


def test_more_than_there_is_is_refused(device: Device) -> None:
    """With a text for people, and nothing taken."""
    before = device.free_bytes()
    with pytest.raises(DeviceFull):
        device.make(before + 2**30)
    assert device.free_bytes() >= before - 2**26


def test_the_driver_shows_this_process(device: Device) -> None:
    """It has the device open; if it is not shown, no death on it can ever be proved here."""
    assert os.getpid() in (device.processes() or ())
