"""Files of weights in memory: the right bytes, in huge pages where there are any."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from baton.core.pages import EXTENT
from baton.engine.mapped import map_file, pages_of

#: Some extents and a piece.
SIZE = 6 * EXTENT + 12_345


def written(path: Path) -> bytes:
    """Write a file whose cached pages are small ones, and return its bytes."""
    data = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8).tobytes()
    with path.open("wb", buffering=0) as file:
        for at in range(0, SIZE, 4096):
            file.write(data[at : at + 4096])
        os.fsync(file.fileno())
    return data


@pytest.fixture
def huge_page_files(tmp_path: Path) -> None:
    """Skip where the kernel gives a file of this file system no huge pages."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(4 * EXTENT))
    with probe.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            mapping.madvise(mmap.MADV_HUGEPAGE)
            assert sum(mapping[::4096]) == 0
            if pages_of(mapping).huge_bytes == 0:
                pytest.skip("no huge pages for files here")


def test_a_mapping_has_the_files_bytes(tmp_path: Path) -> None:
    """Whatever its pages look like, a mapped file is the file, again and again."""
    data = written(tmp_path / "file")
    for _ in range(2):
        with map_file(tmp_path / "file") as mapping:
            assert mapping[:] == data


@pytest.mark.usefixtures("huge_page_files")
def test_small_cached_pages_become_huge_ones(tmp_path: Path) -> None:
    """What was cached in small pages is read again in huge ones, and then stays so."""
    data = written(tmp_path / "file")
    with map_file(tmp_path / "file") as mapping:
        assert pages_of(mapping).huge_bytes >= 5 * EXTENT
        assert mapping[:] == data
        with map_file(tmp_path / "file") as other:
            assert pages_of(other).huge_bytes >= 5 * EXTENT


@pytest.mark.usefixtures("huge_page_files")
def test_pages_that_somebody_maps_stay(tmp_path: Path) -> None:
    """While another mapping holds the small pages, they serve both."""
    data = written(tmp_path / "file")
    with (tmp_path / "file").open("rb") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        held = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
    with held, map_file(tmp_path / "file") as mapping:
        assert pages_of(mapping).huge_bytes < 3 * EXTENT
        assert mapping[:] == data == held[:]


def test_a_small_file(tmp_path: Path) -> None:
    """A file of less than an extent is mapped as it is."""
    (tmp_path / "file").write_bytes(b"abc")
    with map_file(tmp_path / "file") as mapping:
        assert mapping[:] == b"abc"
