"""The keeper: what it has, to whom it gives it, and what is proved by what it knows."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.channel.keeping import SOCKET_NAME, KeeperLink
from baton.channel.on_device import OnDevice, OwnBlocks, Whose, proves_over
from baton.keeper.kept import KEPT_MAX, TAKERS_MAX, Kept, Store
from baton.keeper.server import KeeperInUse, KeeperServer
from baton.ports.device import NotKept, Takers
from support.channel_parts import until
from support.device_parts import DEVICE_LAYOUT, Listed, running_keeper
from support.engine_steps import child_env

BLOCKS = 4


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def keeper(run_dir: Path) -> Iterator[KeeperLink]:
    with running_keeper(run_dir) as link:
        yield link


def memory(text: bytes = b"here") -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, text)
    return fd


def text_of(fd: int) -> bytes:
    found = os.pread(fd, 100, 0)
    os.close(fd)
    return found


def test_what_is_kept_outlives_its_maker(keeper: KeeperLink) -> None:
    """The maker's own descriptor is closed; whoever fetches has the same memory."""
    fd = memory()
    keeper.keep("decode-0", "id", fd, 5, fresh=True)
    os.close(fd)
    assert text_of(keeper.fetch("id", 7)) == b"here"
    assert text_of(keeper.fetch("id", 0)) == b"here"
    assert keeper.takers("id") == Takers({5: os.getpid(), 7: os.getpid()}, complete=True)
    keeper.leave("id", 7)
    assert keeper.takers("id").pids == {5: os.getpid()}


def test_a_descriptor_that_is_fetched_is_closed_by_exec(keeper: KeeperLink) -> None:
    """No program that is started later holds a device's memory."""
    fd = memory()
    keeper.keep("decode-0", "id", fd, 5, fresh=True)
    found = keeper.fetch("id", 7)
    assert not os.get_inheritable(found)
    os.close(found)
    os.close(fd)


def test_another_arena_of_the_same_name_takes_its_place(keeper: KeeperLink) -> None:
    """A worker has one arena: the memory of the one before is let go."""
    first, second = memory(b"first"), memory(b"second")
    keeper.keep("decode-0", "one", first, 5, fresh=True)
    keeper.keep("decode-0", "two", second, 6, fresh=True)
    with pytest.raises(NotKept, match="one"):
        keeper.fetch("one", 7)
    assert text_of(keeper.fetch("two", 7)) == b"second"
    keeper.drop("decode-0")
    keeper.drop("decode-0")
    with pytest.raises(NotKept):
        keeper.takers("two")


def test_what_is_offered_again_is_not_complete(keeper: KeeperLink) -> None:
    """A keeper that was started anew does not know who had the memory before; one that was there
    all along takes nothing from a second offer."""
    fd = memory()
    keeper.keep("decode-0", "old", fd, 5, fresh=False)
    assert not keeper.takers("old").complete
    keeper.keep("decode-1", "new", fd, 6, fresh=True)
    keeper.keep("decode-1", "new", fd, 6, fresh=False)
    assert keeper.takers("new").complete
    os.close(fd)


def test_without_a_keeper_the_error_names_its_socket(run_dir: Path) -> None:
    """Whoever reads it knows what to look for."""
    with pytest.raises(NotKept, match=SOCKET_NAME):
        KeeperLink(run_dir).fetch("id", 1)


def test_garbage_costs_nobody_else_anything(keeper: KeeperLink, run_dir: Path) -> None:
    """Nonsense, silence and a missing descriptor are answered by an end or an error."""
    for data in (b"{", b"", b'{"what":"explode"}', b"x" * 70_000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.connect(str(run_dir / SOCKET_NAME))
            if data:
                link.send(data)
                assert link.recv(10) == b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(str(run_dir / SOCKET_NAME))
        link.send(b'{"what":"keep","name":"n","file_id":"i"}')
        assert b"descriptor" in link.recv(1000)
    fd = memory()
    keeper.keep("decode-0", "id", fd, 5, fresh=True)
    os.close(fd)
    assert text_of(keeper.fetch("id", 1)) == b"here"


def test_there_is_one_keeper_in_a_run_directory(keeper: KeeperLink, run_dir: Path) -> None:
    """A second one is refused and takes nothing from the first."""
    import structlog

    with pytest.raises(KeeperInUse):
        KeeperServer(run_dir, structlog.get_logger())
    fd = memory()
    keeper.keep("decode-0", "id", fd, 5, fresh=True)
    os.close(fd)


def test_the_process_serves_and_ends_in_order(run_dir: Path) -> None:
    """`python -m baton.keeper`: a killed one's socket is replaced, SIGTERM ends it."""
    environ = {**child_env(), "BATON_CLUSTER_RUN_DIR": str(run_dir)}
    run_dir.chmod(0o700)
    link, fd = KeeperLink(run_dir), memory()
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        with subprocess.Popen(
            [sys.executable, "-m", "baton.keeper"], env=environ, stdout=subprocess.DEVNULL
        ) as process:
            until(lambda: answers(link), "the keeper serves")
            link.keep("decode-0", "id", fd, 1, fresh=True)
            process.send_signal(number)
            assert process.wait() == code
    assert not (run_dir / SOCKET_NAME).exists()
    os.close(fd)


def answers(link: KeeperLink) -> bool:
    try:
        link.drop("nothing")
    except NotKept:
        return False
    return True


def test_what_is_kept_is_bounded() -> None:
    """One too many is refused; takers beyond the bound are forgotten, and it is said."""
    store = Store()
    for number in range(KEPT_MAX):
        assert store.keep(f"{number}", f"{number}", number, fresh=True) == []
    assert store.keep("more", "more", 999, fresh=True) is None
    assert store.keep("7", "other", 999, fresh=True) == [7]
    kept = Kept("name", 1, complete=True)
    for number in range(1, TAKERS_MAX + 2):
        kept.taken(number, number)
    assert len(kept.takers) == TAKERS_MAX and 1 not in kept.takers and not kept.complete


# --- when a dead process's stores are over --------------------------------------------------------


def test_the_drivers_list_proves_only_if_it_shows_who_looks() -> None:
    """In a container it may show other pids, or none."""
    assert proves_over(7, 5, frozenset({5, 6}))
    assert not proves_over(7, 5, frozenset({5, 7}))
    assert not proves_over(7, 5, frozenset({6}))
    assert not proves_over(7, 5, frozenset())
    assert not proves_over(7, 5, None)


def own(device: Listed, keeper: KeeperLink) -> OwnBlocks:
    whose = Whose("decode-0", "id", 5)
    return OwnBlocks.made(OnDevice(device, keeper), whose, DEVICE_LAYOUT, BLOCKS)


class Others(KeeperLink):
    """The keeper, which saw incarnations from 100 on as processes with that number."""

    def takers(self, file_id: str) -> Takers:
        found = super().takers(file_id)
        pids = {each: each if each >= 100 else pid for each, pid in found.pids.items()}
        return Takers(pids, complete=found.complete)


def test_a_writer_is_over_when_the_driver_does_not_show_it(
    keeper: KeeperLink, run_dir: Path
) -> None:
    """The lock's end alone proves nothing: its kernels may run on."""
    device, link = Listed(os.getpid(), 100), Others(run_dir)
    blocks = own(device, link)
    os.close(link.fetch("id", 100))
    assert not blocks.over(100)
    device.pids = frozenset({os.getpid()})
    assert blocks.over(100)
    device.pids = None
    assert not blocks.over(100)
    assert blocks.close(forget=True)


def test_who_never_had_the_memory_has_nothing_to_end(keeper: KeeperLink, run_dir: Path) -> None:
    """If the keeper was there all along; a new one cannot know."""
    device = Listed(os.getpid())
    blocks = own(device, keeper)
    assert blocks.over(100)
    keeper.drop("decode-0")
    assert not blocks.over(100), "there is no keeper that knows"
    blocks.offer()
    assert not blocks.over(100), "nor does this one"
    assert blocks.close(forget=True)


def test_a_pid_that_was_learned_is_not_forgotten_with_the_keeper(
    keeper: KeeperLink, run_dir: Path
) -> None:
    """Seen while it lived: proved without the keeper."""
    device, link = Listed(os.getpid(), 100), Others(run_dir)
    blocks = own(device, link)
    os.close(link.fetch("id", 100))
    blocks.seen(100)
    keeper.drop("decode-0")
    assert not blocks.over(100)
    device.pids = frozenset({os.getpid()})
    assert blocks.over(100)
    assert blocks.close(forget=True)
