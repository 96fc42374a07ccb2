"""The start's benchmark: whose memory is counted, and what its page says."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from baton.bench.start import PHASES, Shared, own_memory, page

MIB = 2**20


def test_neither_arenas_nor_models_are_own_memory(tmp_path: Path) -> None:
    """What a process writes for itself counts; an arena without a name when it was mapped, and a
    mapped model file, do not."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "packed").write_bytes(bytes(32 * MIB))
    unnamed = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    os.truncate(unnamed, 32 * MIB)

    def now() -> int:
        return own_memory(os.getpid(), Shared.of(tmp_path, str(models))).private_kb // 1024

    before = now()
    with (
        mmap.mmap(unnamed, 32 * MIB) as arena,
        (models / "packed").open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as packed,
    ):
        arena[:] = b"a" * (32 * MIB)
        assert now() - before >= 32, "an arena that has no name is nobody's"
        folder = os.open(tmp_path, os.O_RDONLY)
        # A directory descriptor makes this linkat(AT_SYMLINK_FOLLOW), see open(2).
        os.link(f"/proc/self/fd/{unnamed}", tmp_path / "x.arena", src_dir_fd=folder)
        os.close(folder)
        assert sum(packed[:: mmap.PAGESIZE]) == 0
        assert abs(now() - before) <= 4
        mine = bytearray(b"m" * (32 * MIB))
        assert now() - before >= 32
        del mine
    os.close(unnamed)


def test_page_tells_each_phase_and_each_process() -> None:
    """One table of phases with least, median and most, one of memory, for each way to start."""
    starts = [dict.fromkeys(PHASES, float(second)) for second in (3, 1, 2)]
    memory = {"decode-0": {"worker": 40.0, "guard": 20.0, "pair": 70.0}}
    series = {"starts": starts, "memory_mb": memory}
    text = page({"up": series, "make up": series})
    assert text.count("| first token at the client | 3 | 1.00 | 2.00 | 3.00 |") == 2
    assert text.count("| decode-0 | 40.0 | 20.0 | 70.0 |") == 2
    assert "## make up" not in page({"up": series})
