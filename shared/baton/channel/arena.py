"""The owner's side of an arena: a named file in shared memory that outlives its process.

Decides how an arena comes to be (taken over from a dead owner, or sized, allocated, locked,
populated, named, in this order) and how it ends. It does not decide block states: the owner's block
pool does, and marks them here.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from baton.channel import files, huge_pages, locks, sizing
from baton.channel.checksum import checksum_in, mismatches, unmatched
from baton.channel.files import reclaim_unlocked
from baton.channel.layout import Header, Records, make_header
from baton.channel.mapping import Mapping
from baton.channel.on_device import OnDevice, OwnBlocks, Whose
from baton.channel.takeover import NotTaken, Wanted, store_header, succeed, take_over
from baton.core.ids import Compat, Peer
from baton.core.pages import Pages
from baton.ports.channel import ArenaInUse, ArenaTooSmall, BlockCheck, BlockMark
from baton.ports.device import DeviceFull
from baton.ports.engine import KVLayout
from baton.wire.handover import ArenaRef

__all__ = ["DEFAULT_DIRECTORY", "SharedArena", "reclaim_unlocked"]

DEFAULT_DIRECTORY = Path("/dev/shm")
#: Two processes that start under one name at once may each find the other's file this often.
_LINK_TRIES = 3

log = structlog.get_logger(__name__)


class SharedArena:
    """An arena this process owns (``baton.ports.channel.OwnArena``). Made by :meth:`open`.

    ``verify`` and ``checksums`` may run in any thread; everything else belongs to one. The memory
    is zero when new, and so is every record (FREE, generation 0); one that was taken over has both
    as its former owner left them.
    """

    def __init__(
        self,
        fd: int,
        path: Path,
        header: Header,
        note: str,
        *,
        former: Peer | None = None,
        own: OwnBlocks | None = None,
    ) -> None:
        """Map an allocated file in which this incarnation's byte is locked; ``own``: its blocks,
        if they are on a device."""
        info = os.fstat(fd)
        locks.hold_across_fork(info.st_dev, info.st_ino)
        self._fd = fd
        self._path = path
        self._layout = header.layout
        self._owner = header.owner
        self._header = header
        self.former = former
        self._map = Mapping(fd, 0, header.file_bytes, writable=True)
        records = slice(header.records_offset, header.journal_offset)
        self._records = Records(self._map.view[records], header.blocks_total)
        self._own = own
        self._memory: Any = (
            self._map.view[header.blocks_offset :][: header.blocks_total * header.block_bytes]
            if own is None
            else own.blocks.memory
        )
        #: Incarnations whose lock was seen, and those among them whose lock was then seen gone.
        self._seen: set[int] = set()
        self._dead: set[int] = set()
        self._closed = False
        self.lingering = False
        """After ``close``: views were still open, the pages go with the last of them."""
        self.blocks_total = header.blocks_total
        self.size_note = note
        """How the size came about, in words, for the log."""
        self.ref = ArenaRef(
            path=str(path),
            device=info.st_dev,
            inode=info.st_ino,
            file_id=header.file_id,
            owner=header.owner,
        )

    @classmethod
    def open(
        cls,
        directory: Path | str,
        cluster: str,
        owner: Peer,
        layout: KVLayout,
        compat: Compat,
        *,
        blocks: int = 0,
        size_mb: int = 0,
        tries_max: int = 2,
        place: OnDevice | None = None,
    ) -> SharedArena:
        """Take over the arena that a dead incarnation of ``owner`` left, or :meth:`create` one.

        The size is ``blocks``, or ``size_mb``, or (both 0) that of what is there. Takes some tenths
        of a second per GiB. One that does not fit, or that ``tries_max`` owners have begun to take
        over and not completed, is replaced, and the log says why. ``place``: where its blocks are,
        if the layout says that they are on a device.

        Raises:
            ArenaTooSmall, NotKept: as :meth:`create`.
            ArenaInUse: as :meth:`create`; or there is no room beside what was not taken over, which
                writers still map.
        """
        path = files.arena_path(Path(directory), cluster, owner.worker_id)
        asked = sizing.blocks_asked(layout, blocks=blocks, size_mb=size_mb)
        refused = ""
        former = _Former(place, path, owner)
        try:
            taken = take_over(
                path, Wanted(cluster, owner, layout, compat, asked, tries_max, former.lost)
            )
        except FileNotFoundError:
            pass
        except NotTaken as reason:
            refused = str(reason)
            log.warning("arena_not_taken_over", path=str(path), reason=refused)
        else:
            return cls._of(*taken, path, former.own)
        try:
            return cls.create(
                directory,
                cluster,
                owner,
                layout,
                compat,
                blocks=blocks,
                size_mb=size_mb,
                place=place,
            )
        except ArenaTooSmall as error:
            if refused:
                raise ArenaInUse(f"{path} was not taken over ({refused}), and {error}") from error
            raise

    @classmethod
    def _of(
        cls, fd: int, header: Header, former: Peer, path: Path, own: OwnBlocks | None
    ) -> SharedArena:
        note = f"{header.blocks_total} blocks taken over"
        try:
            return cls(fd, path, header, note, former=former, own=own)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def create(
        cls,
        directory: Path | str,
        cluster: str,
        owner: Peer,
        layout: KVLayout,
        compat: Compat,
        *,
        blocks: int = 0,
        size_mb: int = 0,
        place: OnDevice | None = None,
    ) -> SharedArena:
        """Create, allocate and name the arena of ``owner``; replace one whose owner is dead.

        The size is ``blocks``, or ``size_mb``, or (both 0) what fits (``baton.channel.sizing``).
        Takes some seconds per GiB: every page is allocated and touched now.

        Raises:
            ArenaTooSmall: the size does not fit; the text holds both sizes.
            ArenaInUse: another live incarnation owns this worker's arena.
            NotKept: there is no keeper for blocks on a device.
        """
        assert (place is None) == (layout.place == "host")
        assert owner.incarnation > 0, "incarnation 0 means nobody"
        directory = Path(directory)
        path = files.arena_path(directory, cluster, owner.worker_id)
        if files.remove_unowned(path):
            log.info("arena_reclaimed", path=str(path))
        room = sizing.room_in(directory)
        if place is None:
            size = sizing.choose_size(layout, room, blocks=blocks, size_mb=size_mb)
        else:
            place.forget(path.name)  # what was there before makes room first
            free = place.device.free_bytes()
            size = sizing.choose_device_size(layout, free, blocks=blocks, size_mb=size_mb)
        header = make_header(
            cluster=cluster,
            owner=owner,
            pid=os.getpid(),
            file_id=secrets.token_hex(16),
            layout=layout,
            compat=compat,
            blocks_total=size.blocks_total,
        )
        fd = _open_unnamed(directory)
        try:
            _allocate(fd, header, room, size.note)
            arena = cls(fd, path, header, size.note, own=_made(place, path, header))
        except BaseException:
            os.close(fd)
            raise
        try:
            _name(fd, path)
        except BaseException:
            arena.close(unlink=False)
            raise
        return arena

    def complete(self) -> None:
        """The take-over is done, and its owner serves: the next one has all its tries again."""
        if self._header.tries:
            self._header = succeed(self._header, tries=0)
            store_header(self._fd, self._header)

    @property
    def memory(self) -> Any:
        return self._memory

    def offer(self) -> None:
        """Give a keeper that may have lost it the blocks' memory again; nothing on the host."""
        if self._own is not None:
            self._own.offer()

    def pages(self) -> Pages | None:
        """Return how the file lies in this process's memory; ``None``: the blocks are elsewhere."""
        return None if self._own is not None else self._map.pages()

    def mark(self, marks: Sequence[BlockMark]) -> None:
        for mark in marks:
            self._records.store(mark)

    def marked(self, block: int) -> BlockMark:
        """Return what the metadata says of one block."""
        return self._records.load(block)

    def verify(self, checks: Sequence[BlockCheck]) -> list[int]:
        if self._own is None:
            return mismatches(self._memory, self._layout, checks)
        return unmatched(checks, self._layout, self.blocks_total, self._own.blocks.checksums)

    def checksums(self, checks: Sequence[BlockCheck]) -> list[int]:
        if self._own is not None:
            return self._own.blocks.checksums(checks)
        return [checksum_in(self._memory, self._layout, check) for check in checks]

    def writer_alive(self, incarnation: int) -> bool:
        """Whether that incarnation's lock is held: seen through this very descriptor.

        ``False`` before it mapped the arena; once seen held and then gone, ``False`` for ever. On a
        device it lives, for all that is known, until what it launched is proved to be over.
        """
        if incarnation == self._owner.incarnation:
            return True
        if incarnation in self._dead:
            return False
        alive = locks.is_locked(self._fd, incarnation)
        if alive:
            self._seen.add(incarnation)
            if self._own is not None:
                self._own.seen(incarnation)
            return True
        if self._own is not None and not self._own.over(incarnation):
            return True
        if incarnation in self._seen:
            self._dead.add(incarnation)
        return False

    def close(self, *, unlink: bool) -> None:
        """Give the arena up; with ``unlink`` remove its name first. Repeating it does nothing.

        Views that are still open keep the pages and this incarnation's lock until they go:
        ``lingering`` is then set and a warning logged, nothing is raised.
        """
        if self._closed:
            return
        self._closed = True
        # While the lock is held nobody else can have replaced the file, unless by force.
        if unlink and files.names(self._path, self._fd):
            os.unlink(self._path)
        del self._records, self._memory
        self.lingering = not self._map.close()
        if self._own is not None:
            self.lingering = not self._own.close(forget=unlink) or self.lingering
        os.close(self._fd)
        if self.lingering:
            log.warning("arena_views_open", path=str(self._path))


class _Former:
    """The blocks of a file that may be taken over, where they are on a device."""

    def __init__(self, place: OnDevice | None, path: Path, owner: Peer) -> None:
        self._place = place
        self._path = path
        self._owner = owner
        self.own: OwnBlocks | None = None

    def lost(self, header: Header) -> str:
        """Have the blocks; return why they cannot be had, empty if they are there."""
        if self._place is None:
            return ""
        layout, total = header.layout, header.blocks_total
        try:
            whose = Whose(self._path.name, header.file_id, self._owner.incarnation)
            own = OwnBlocks.kept(self._place, whose, layout, total)
        except OSError as error:
            return f"its blocks are gone: {error}"
        if not own.waited_over(header.owner.incarnation):
            own.close(forget=False)
            return f"it is not proved that what {header.owner} launched on the device is over"
        self.own = own
        return ""


def _made(place: OnDevice | None, path: Path, header: Header) -> OwnBlocks | None:
    if place is None:
        return None
    try:
        whose = Whose(path.name, header.file_id, header.owner.incarnation)
        return OwnBlocks.made(place, whose, header.layout, header.blocks_total)
    except DeviceFull as error:
        raise ArenaTooSmall(f"the arena does not fit the device: {error}") from error


def _open_unnamed(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):
            message = f"{directory} has no unnamed files: [arena] dir must be on a tmpfs"
            raise OSError(error.errno, message) from error
        raise


def _allocate(fd: int, header: Header, room: sizing.Room, note: str) -> None:
    """Lock, allocate every page and write the header. The mapping comes after the lock."""
    os.fchmod(fd, 0o600)  # whatever the umask
    assert locks.lock(fd, header.owner.incarnation), "nobody else knows this file"
    try:
        huge_pages.allocate(fd, header.file_bytes)
        os.posix_fallocate(fd, 0, header.file_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise sizing.too_small(header.file_bytes, room, note) from error
        raise
    store_header(fd, header)


def _name(fd: int, path: Path) -> None:
    """Give the finished file its name, which takes no other file's place."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(_LINK_TRIES):
            try:
                # A directory descriptor makes this linkat(AT_SYMLINK_FOLLOW), see open(2).
                os.link(
                    f"/proc/self/fd/{fd}",
                    path.name,
                    src_dir_fd=folder,
                    dst_dir_fd=folder,
                    follow_symlinks=True,
                )
                return
            except FileExistsError:
                files.remove_unowned(path)  # raises ArenaInUse if that one's owner lives
    finally:
        os.close(folder)
    raise ArenaInUse(f"{path} is taken again and again by other processes")
