"""What only a GPU can show: graphs, the real model, and what the driver does with the dead.

Skipped where there is none. **Never run yet**: `make gpu` on a machine that has one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.channel.keeping import KeeperLink
from baton.channel.on_device import OnDevice, OwnBlocks, Whose
from baton.engine.build import build_device, build_engine
from baton.engine.kernels import device_kernels
from support.channel_parts import until
from support.device_parts import DEVICE_LAYOUT, running_keeper
from support.engine_device import device_engine, needs_gpu
from support.engine_models import VOCAB
from support.engine_steps import GREEDY, Arena, Sequel, child_env, ids_of

pytest_plugins = ["support.engine_fixtures"]
pytestmark = [needs_gpu, pytest.mark.gpu]

DRAW = np.random.default_rng(8)
BLOCKS = 8


def test_a_shape_that_comes_again_is_a_graph_with_the_same_bits() -> None:
    """The first step runs as it is, the second is captured, the third replayed: one result."""
    engine: Any = device_engine(device="cuda", rows=128)
    Arena(engine, 8)
    sequel = Sequel(engine, DRAW.integers(0, VOCAB, 40).astype(np.int32), ids_of(range(6)))
    sequel.prefill()
    row = sequel.decode_row()
    first = engine.logits([row])
    others = [engine.logits([row]) for _ in range(3)]
    assert engine._opened()._graphs, "nothing was captured"
    for found in others:
        assert np.array_equal(found, first)
    engine.detach("arena")
    assert not engine._opened()._graphs


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_models_tokens_are_the_reference_s(model_dir: Path, dtype: str) -> None:
    """In float32 the very same; in bfloat16 what can be said is that rows do not see each other,
    which opening the engine asked."""
    kernels = device_kernels("cuda", invariance="on")
    engine: Any = build_engine(model_dir, dtype=dtype, kernels=kernels)
    engine.use_threads(1)
    prompt = DRAW.integers(0, engine.info.vocab_size, 300).astype(np.int32)
    found = _greedy(engine, prompt, cuda=True)
    if dtype == "float32":
        reference: Any = build_engine(model_dir, dtype=dtype, threads=1)
        assert found == _greedy(reference, prompt, cuda=False)
    assert len(found) == 24


def _greedy(engine: Any, prompt: Any, *, cuda: bool) -> list[int]:
    size = 24 * engine.layout.block_bytes
    memory: Any = torch.zeros(size, dtype=torch.uint8, device="cuda") if cuda else None
    engine.attach("arena", memory if cuda else memoryview(bytearray(size)))
    sequel = Sequel(engine, prompt, ids_of(range(24)), params=GREEDY)
    sequel.prefill([128, 100])
    sequel.decode(24)
    return sequel.output


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[KeeperLink]:
    with running_keeper(tmp_path) as link:
        yield link


CHILD = """
import os, sys
from pathlib import Path
import torch
from baton.channel.keeping import KeeperLink
from baton.engine.build import build_device
from support.device_parts import DEVICE_LAYOUT
link, device = KeeperLink(Path(sys.argv[1])), build_device("cuda")
if sys.argv[2] == "make":
    length = int(sys.argv[3]) * DEVICE_LAYOUT.block_bytes
    fd = device.make(length)
    link.keep("decode-0", "id", fd, 100, fresh=True)
else:
    fd = link.fetch("id", 100)
blocks = device.map(fd, DEVICE_LAYOUT, int(sys.argv[3]))
blocks.memory[:] = 77
torch.cuda.synchronize()
print("ready", flush=True)
if sys.argv[2] == "spin":
    while True:
        torch.cuda._sleep(1 << 30)
        blocks.memory[:] = 77
sys.stdin.read()
"""


def child(run_dir: Path, what: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(run_dir), what, str(BLOCKS)],
        env=child_env(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_memory_outlives_the_process_that_made_it(keeper: KeeperLink, tmp_path: Path) -> None:
    """Killed while it has it mapped: the keeper's descriptor is enough to find every byte. All of
    ADR 27 rests on this."""
    device = build_device("cuda")
    maker = child(tmp_path, "make")
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    fd = keeper.fetch("id", 7)
    blocks = device.map(fd, DEVICE_LAYOUT, BLOCKS)
    assert bool((blocks.memory == 77).all())
    os.close(fd)


def test_a_dead_writer_is_shown_until_its_kernels_are_over(
    keeper: KeeperLink, tmp_path: Path
) -> None:
    """The driver shows it while it lives and not for ever after; once it is not shown nothing is
    stored any more."""
    device = build_device("cuda")
    place = OnDevice(device, keeper)
    own = OwnBlocks.made(place, Whose("decode-0", "id", 5), DEVICE_LAYOUT, BLOCKS)
    writer = child(tmp_path, "spin")
    assert writer.pid in (device.processes() or ())
    own.seen(100)
    assert not own.over(100)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    until(lambda: own.over(100), "the driver shows the dead writer no more")
    own.blocks.memory.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)
    torch.cuda.synchronize()
    assert not own.blocks.memory.any()
