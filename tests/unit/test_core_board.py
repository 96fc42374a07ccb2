"""The core board's file: shared by all workers of a cluster, refused if it is another."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from baton.ports.engine import CORE_LINE_BYTES
from baton.runtime.core_board import FILE, NoCoreBoard, open_core_board

COMPUTING = 2**64 - 1


def word(lines: memoryview, core: int) -> int:
    """What the owner of ``core`` says."""
    return int(struct.unpack_from("<Q", lines, core * CORE_LINE_BYTES)[0])


def say(lines: memoryview, core: int, value: int) -> None:
    """Be the owner of ``core``."""
    struct.pack_into("<Q", lines, core * CORE_LINE_BYTES, value)


def test_what_one_worker_says_all_others_see(tmp_path: Path) -> None:
    """Each for its own cores; of a core without a worker nobody says anything."""
    prefill = open_core_board(tmp_path / FILE, (0, 1))
    decode = open_core_board(tmp_path / FILE, (2,))
    say(prefill, 1, COMPUTING)
    say(decode, 2, 77)
    assert [word(decode, core) for core in range(4)] == [1, COMPUTING, 77, 0]
    assert [word(prefill, core) for core in range(4)] == [1, COMPUTING, 77, 0]
    assert word(prefill, 4095) == 0
    assert os.stat(tmp_path / FILE).st_mode & 0o777 == 0o600


def test_a_worker_that_was_killed_while_it_computed_leaves_its_core_to_its_successor(
    tmp_path: Path,
) -> None:
    """Until that one starts nobody borrows it; what other workers say stays."""
    killed, other = (open_core_board(tmp_path / FILE, (core,)) for core in (0, 1))
    say(killed, 0, COMPUTING)
    say(other, 1, COMPUTING)
    killed.release()
    assert word(other, 0) == COMPUTING
    open_core_board(tmp_path / FILE, (0,))
    assert [word(other, core) for core in (0, 1)] == [1, COMPUTING]


def test_a_file_that_was_removed_under_a_worker_lends_nothing_of_it(tmp_path: Path) -> None:
    """Whoever starts then does not see what that worker says, so its core is nobody's."""
    open_core_board(tmp_path / FILE, (0,))
    (tmp_path / FILE).unlink()
    assert word(open_core_board(tmp_path / FILE, (1,)), 0) == 0


@pytest.mark.parametrize("content", [b"x", b"\0" * 100, b"\0" * 64 * 4096, b"\0" * 64 * 4098])
def test_a_file_of_another_size_is_refused(tmp_path: Path, content: bytes) -> None:
    """Cut off, or somebody else's."""
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(NoCoreBoard, match=rf"{FILE} has {len(content)} bytes instead of 262208"):
        open_core_board(tmp_path / FILE, (0,))
    assert (tmp_path / FILE).read_bytes() == content


def test_what_another_version_or_somebody_else_wrote_is_refused(tmp_path: Path) -> None:
    """By the first line; the error says what to do, and the file stays as it was."""
    open_core_board(tmp_path / FILE, (0,))
    whole = bytearray((tmp_path / FILE).read_bytes())
    whole[17] += 1
    (tmp_path / FILE).write_bytes(whole)
    with pytest.raises(NoCoreBoard, match=r"not written by this version.*remove it while no"):
        open_core_board(tmp_path / FILE, (0,))
    assert (tmp_path / FILE).read_bytes() == whole


def test_a_start_that_was_killed_half_way_is_gone_on_with(tmp_path: Path) -> None:
    """Empty, or without its first line."""
    for size in (0, 64 * 4097):
        (tmp_path / FILE).write_bytes(b"\0" * size)
        assert word(open_core_board(tmp_path / FILE, (3,)), 3) == 1
        (tmp_path / FILE).unlink()


def test_a_link_and_a_folder_are_refused(tmp_path: Path) -> None:
    """Neither is followed, opened or waited for."""
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe"):
        with pytest.raises(NoCoreBoard, match=name):
            open_core_board(tmp_path / name, (0,))
    assert (tmp_path / "elsewhere").read_bytes() == b""
