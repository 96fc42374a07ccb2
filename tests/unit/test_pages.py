"""What the kernel says of huge pages, read; and what is made of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from baton.core.ids import Role
from baton.core.pages import EXTENT, Pages, pages_at
from baton.engine.packed import PackedSpec, PackedWeights, write_packed
from baton.runtime.metrics import Metrics
from baton.runtime.worker import huge_gauges

SMAPS = """\
7f0000000000-7f0000400000 r--s 00000000 08:01 77 /cache/packed.bin
Size:               4096 kB
FilePmdMapped:      2048 kB
ShmemPmdMapped:        0 kB
VmFlags: rd sh mr mw me ms
7f0000400000-7f0000800000 rw-s 00000000 00:1a 78 /dev/shm/arena (deleted)
FilePmdMapped:         0 kB
ShmemPmdMapped:     4096 kB
7f0000800000-7f0000801000 rw-s 00400000 00:1a 78 /dev/shm/arena (deleted)
ShmemPmdMapped:        0 kB
7f0000900000-7f0000b00000 rw-p 00000000 00:00 0 [heap]
AnonHugePages:      2048 kB
"""
START = 0x7F0000000000


def test_only_what_lies_in_the_mapping_counts() -> None:
    """Each mapping's own huge pages, of a disk's file or a tmpfs's, in however many pieces."""
    assert pages_at(SMAPS, START, 2 * EXTENT) == Pages(2 * EXTENT, EXTENT)
    arena = pages_at(SMAPS, START + 2 * EXTENT, 2 * EXTENT + 4096)
    assert arena == Pages(2 * EXTENT + 4096, 2 * EXTENT)
    assert pages_at(SMAPS, START, 4 * EXTENT).huge_bytes == 3 * EXTENT
    assert pages_at(SMAPS, START + 0x900000, EXTENT).huge_bytes == 0
    assert pages_at(SMAPS, START + 0xF00000, EXTENT) == Pages(EXTENT, 0)


def test_the_share_of_nothing_is_nothing() -> None:
    """An empty mapping has none."""
    assert (Pages(0, 0).huge_share, Pages(4 * EXTENT, 3 * EXTENT).huge_share) == (0.0, 0.75)


def test_packed_weights_tell_of_their_own_file(tmp_path: Path) -> None:
    """All of the file is mapped, and no more than that is in huge pages."""
    spec = PackedSpec(
        model="m",
        dtype="float32",
        hidden=1,
        heads=1,
        kv_heads=1,
        head_dim=1,
        intermediate=1,
        vocab=1,
        context=1,
        rotary=1,
        norm_eps=1.0,
        scale=1.0,
        layers=(),
    )
    path = tmp_path / "packed.bin"
    write_packed(path, spec, {"head": np.zeros(3 * EXTENT, np.uint8)})
    pages = PackedWeights(path).pages()
    assert pages.total_bytes == path.stat().st_size > 3 * EXTENT
    assert 0 <= pages.huge_bytes <= 3 * EXTENT


def test_metrics_tell_the_share_of_what_is_mapped() -> None:
    """A gauge for each; none for what a worker does not have."""
    metrics = Metrics(Role.DECODE, "decode-0", "tiny")
    metrics.gauges(huge_gauges(weights=Pages(4 * EXTENT, 3 * EXTENT), arena=None))
    lines = [line for line in metrics.render().decode().splitlines() if "huge_pages_ratio{" in line]
    assert len(lines) == 1 and 'memory="weights"' in lines[0] and lines[0].endswith(" 0.75")
