"""The arena's file, its permissions, its views and its end (real shared memory)."""

from __future__ import annotations

import gc
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from baton.channel import sizing
from baton.channel.arena import SharedArena
from baton.channel.files import read_header, reclaim_unlocked
from baton.channel.layout import PAGE, RECORD_BYTES, SLOT
from baton.channel.shm import ShmChannel
from baton.core.ids import Peer
from baton.core.lifecycles import BlockState
from baton.ports.channel import ArenaGone, ArenaInUse, ArenaTooSmall, BlockMark
from support.channel_fixtures import shared_directory
from support.channel_parts import COMPAT, LAYOUT, OWNER, WRITER


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_directory() as path:
        yield path


@pytest.fixture
def arena(directory: Path) -> Iterator[SharedArena]:
    made = create(directory)
    yield made
    made.close(unlink=True)


def create(
    directory: Path, *, incarnation: int = OWNER.incarnation, blocks: int = 8
) -> SharedArena:
    owner = Peer(OWNER.worker_id, incarnation)
    return SharedArena.create(directory, "test", owner, LAYOUT, COMPAT, blocks=blocks)


def maps(arena: SharedArena) -> list[str]:
    """This process's mappings of an arena; the owner's has no name, it is older than the link."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if line.split()[4] == str(arena.ref.inode)]


def test_the_file_has_the_documented_name_and_is_its_users_alone(
    arena: SharedArena, directory: Path
) -> None:
    """Mode 0600 whatever the umask was."""
    path = directory / "baton-test-decode-0.arena"
    info = path.stat()
    assert arena.ref.path == str(path)
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert (info.st_dev, info.st_ino) == (arena.ref.device, arena.ref.inode)


def test_a_loose_umask_does_not_open_the_file(directory: Path) -> None:
    """And a strict one does not lock its owner out."""
    for umask in (0o000, 0o777):
        old = os.umask(umask)
        try:
            made = create(directory)
        finally:
            os.umask(old)
        assert stat.S_IMODE(os.stat(made.ref.path).st_mode) == 0o600
        made.close(unlink=True)


def test_every_page_is_allocated_and_mapped_before_the_arena_is_given_out(
    directory: Path,
) -> None:
    """A first touch is never paid by a request, and never a bus error."""
    arena = create(directory, blocks=2000)
    info = os.stat(arena.ref.path)
    assert info.st_blocks * 512 >= info.st_size > 2000 * LAYOUT.block_bytes
    smaps = Path("/proc/self/smaps").read_text().split(maps(arena)[0])[1]
    fields = [line.split() for line in smaps.splitlines()[1:]]
    size, rss, flags = (
        next(field[1:] for field in fields if field[0] == name)
        for name in ("Size:", "Rss:", "VmFlags:")
    )
    assert rss == size
    assert "dc" in flags, "inherited by forks"
    assert "dd" in flags, "part of core dumps"
    arena.close(unlink=True)


def test_a_failed_creation_leaves_nothing(directory: Path) -> None:
    """No name, no descriptor, no mapping."""
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ArenaTooSmall):
        create(directory, blocks=2**40)
    assert os.listdir(directory) == []
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("worker_id", ["../escape", "a/b", "", "x" * 65, "spaced out"])
def test_a_name_that_is_no_file_name_is_refused(directory: Path, worker_id: str) -> None:
    """A worker id never leads out of the directory."""
    with pytest.raises(ValueError, match="file name"):
        SharedArena.create(directory, "test", Peer(worker_id, 1), LAYOUT, COMPAT, blocks=1)


def test_a_link_in_the_arenas_place_is_neither_followed_nor_removed(directory: Path) -> None:
    """In a directory everybody may write to, a name proves nothing."""
    victim = directory / "victim"
    victim.write_bytes(b"mine")
    os.symlink(victim, directory / "baton-test-decode-0.arena")
    with pytest.raises(PermissionError):
        create(directory)
    assert victim.read_bytes() == b"mine"
    assert reclaim_unlocked(directory, "test") == []


def test_a_foreign_file_in_the_arenas_place_is_replaced_if_nobody_locks_it(
    directory: Path,
) -> None:
    """What an older version or a full disk left behind does not keep the worker from starting."""
    (directory / "baton-test-decode-0.arena").write_bytes(b"no header")
    assert reclaim_unlocked(directory, "test") == []
    arena = create(directory)
    assert not any(arena.memory)
    arena.close(unlink=True)


def test_a_damaged_header_is_not_mapped(arena: SharedArena) -> None:
    """The file is checked before it is trusted, and the check leaves no lock behind."""
    fd = os.open(arena.ref.path, os.O_RDWR)
    os.pwrite(fd, b"\xff", 40)
    os.close(fd)
    with pytest.raises(ArenaGone, match="checksum"):
        ShmChannel(LAYOUT, COMPAT).map(arena.ref, WRITER)
    assert not arena.writer_alive(WRITER.incarnation)


def test_a_truncated_file_is_not_mapped(arena: SharedArena) -> None:
    """Reading behind the end would be a bus error."""
    os.truncate(arena.ref.path, PAGE)
    with pytest.raises(ArenaGone, match="4096 bytes"):
        ShmChannel(LAYOUT, COMPAT).map(arena.ref, WRITER)
    os.truncate(arena.ref.path, 0)
    with pytest.raises(ArenaGone, match="ends after 0"):
        ShmChannel(LAYOUT, COMPAT).map(arena.ref, WRITER)


def test_a_writer_cannot_store_into_the_records(arena: SharedArena) -> None:
    """The writer's mapping of header and records is read-only."""
    mapped = ShmChannel(LAYOUT, COMPAT).map(arena.ref, WRITER)
    regions = [line.split()[1:3] for line in maps(arena)]
    mapped.close()
    blocks_at = PAGE + PAGE
    assert sorted(regions) == [
        ["r--s", f"{PAGE:08x}"],
        ["rw-s", f"{0:08x}"],
        ["rw-s", f"{blocks_at:08x}"],
    ]


def test_the_records_lie_where_the_document_says(arena: SharedArena) -> None:
    """A custodian or a debugger finds block n's word at 4096 + 64 n."""
    arena.mark([BlockMark(2, BlockState.CACHED, 0x11223344, filled=3)])
    fd = os.open(arena.ref.path, os.O_RDONLY)
    word = int.from_bytes(os.pread(fd, 8, PAGE + 2 * RECORD_BYTES), "little")
    os.close(fd)
    assert word == 0x11223344 | BlockState.CACHED << 32 | 3 << 40


def test_closing_removes_name_mapping_and_descriptors(directory: Path) -> None:
    """An orderly end leaves nothing of the arena in process or directory."""
    before = os.listdir("/proc/self/fd")
    arena = create(directory)
    mapped = ShmChannel(LAYOUT, COMPAT).map(arena.ref, WRITER)
    assert len(maps(arena)) == 3
    mapped.close()
    arena.close(unlink=True)
    assert not (arena.lingering or mapped.lingering)
    assert maps(arena) == []
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(directory) == []


def test_closing_never_removes_a_successors_file(directory: Path) -> None:
    """Only the file that is one's own is unlinked."""
    arena = create(directory)
    os.unlink(arena.ref.path)
    successor = create(directory, incarnation=1003)
    arena.close(unlink=True)
    assert os.stat(successor.ref.path).st_ino == successor.ref.inode
    successor.close(unlink=True)


def test_closing_with_a_view_open_is_logged_and_the_pages_stay_until_it_goes(
    arena: SharedArena,
) -> None:
    """Fifty times: no crash, no exception; mapping and lock go with the last view."""
    channel = ShmChannel(LAYOUT, COMPAT)
    for number in range(50):
        mapped = channel.map(arena.ref, Peer("prefill-0", 3000 + number))
        view = np.frombuffer(mapped.memory, dtype=np.uint8)[8:16]
        with capture_logs() as logs:
            mapped.close()
        assert [entry["event"] for entry in logs] == ["arena_views_open"]
        assert mapped.lingering
        view[:] = number
        assert arena.memory[8] == number
        assert arena.writer_alive(3000 + number), "who has a view may still store"
        del view
        assert not arena.writer_alive(3000 + number)
        assert len(maps(arena)) == 1


def test_a_torch_tensor_keeps_the_pages_without_exporting_the_buffer(directory: Path) -> None:
    """torch holds a reference only: forcing the view's release would unmap under the tensor."""
    torch = pytest.importorskip("torch")
    arena = create(directory)
    tensor = torch.frombuffer(arena.memory, dtype=torch.uint8)[4:12]
    arena.close(unlink=True)
    assert arena.lingering
    tensor.fill_(5)
    assert tensor.sum() == 40
    del tensor
    gc.collect()
    assert maps(arena) == []


def test_the_error_in_work_is_not_hidden_by_closing(arena: SharedArena) -> None:
    """Closing in a finally block with a view open raises nothing of its own."""
    mapped = ShmChannel(LAYOUT, COMPAT).map(arena.ref, WRITER)
    view = mapped.memory[:4]

    def work() -> None:
        try:
            raise RuntimeError("marked")
        finally:
            mapped.close()

    with pytest.raises(RuntimeError, match="marked"):
        work()
    view.release()


def test_a_take_over_cut_short_leaves_the_header_before(directory: Path) -> None:
    """(3) Killed while it stores the new header, a successor has changed nothing."""
    create(directory).close(unlink=False)
    path = directory / "baton-test-decode-0.arena"
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"BATONKV\n\2\0\0\0half a header", SLOT)
    os.close(fd)
    arena = open_again(directory, incarnation=1003)
    assert arena.former == OWNER
    header = read_header(arena._fd)
    assert (header.owner.incarnation, header.sequence, header.tries) == (1003, 1, 1)
    arena.complete()
    assert (read_header(arena._fd).tries, read_header(arena._fd).sequence) == (0, 2)
    arena.close(unlink=True)


def test_a_damaged_arena_is_made_anew_and_the_log_says_why(directory: Path) -> None:
    """No header, no owner, no use: what it held is computed again."""
    create(directory).close(unlink=False)
    path = directory / "baton-test-decode-0.arena"
    with open(path, "r+b") as file:
        file.write(bytes(PAGE))
    with capture_logs() as logs:
        arena = open_again(directory, incarnation=1003)
    assert arena.former is None
    (why,) = [entry["reason"] for entry in logs if entry["event"] == "arena_not_taken_over"]
    assert "magic" in why
    arena.close(unlink=True)


def test_no_room_beside_what_was_not_taken_over_is_no_permanent_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers map the old file for a while: the start is tried again."""
    create(directory).close(unlink=False)
    monkeypatch.setattr(sizing, "room_in", lambda _: sizing.Room(space=0, memory=0))
    with pytest.raises(ArenaInUse, match="9 are asked for"):
        open_again(directory, incarnation=1003, blocks=9)


def open_again(directory: Path, *, incarnation: int, blocks: int = 0) -> SharedArena:
    owner = Peer(OWNER.worker_id, incarnation)
    return SharedArena.open(directory, "test", owner, LAYOUT, COMPAT, blocks=blocks)


def test_an_arena_in_use_names_owner_and_pid(arena: SharedArena, directory: Path) -> None:
    """The operator learns which process to look at."""
    with pytest.raises(ArenaInUse, match=f"decode-0/1001, pid {os.getpid()}"):
        create(directory, incarnation=1002)


@pytest.mark.parametrize("start_one", [SharedArena.create, SharedArena.open])
def test_of_starts_that_race_for_a_dead_owners_file_exactly_one_wins(
    directory: Path, start_one: Callable[..., SharedArena]
) -> None:
    """However they interleave, nobody removes or takes the file of one that has just won."""
    starters = 4
    for turn in range(60):
        create(directory, incarnation=10_000 + turn, blocks=1).close(unlink=False)
        together = threading.Barrier(starters)

        def start(
            number: int, turn: int = turn, together: threading.Barrier = together
        ) -> SharedArena | None:
            together.wait()
            try:
                owner = Peer(OWNER.worker_id, 20_000 + turn * starters + number)
                return start_one(directory, "test", owner, LAYOUT, COMPAT, blocks=1)
            except ArenaInUse:
                return None

        with ThreadPoolExecutor(starters) as pool:
            won = [arena for arena in pool.map(start, range(starters)) if arena is not None]
        assert len(won) == 1
        assert os.stat(won[0].ref.path).st_ino == won[0].ref.inode
        won[0].close(unlink=True)
