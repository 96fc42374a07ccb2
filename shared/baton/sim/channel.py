"""Shared memory of one simulated host: arenas, locks and the faults that happen to them.

Held to the real channel by ``tests/conformance/test_channel.py``. Layout of records and checksums
are the real ones; a file is a dictionary entry, a lock a row in a table, and death takes the time
that the kernel takes to unmap. No chance in here: who is killed when is the scenario's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from baton.channel.checksum import checksum_in, mismatches
from baton.channel.files import check_fit
from baton.channel.layout import RECORD_BYTES, Header, Records, make_header
from baton.channel.sources import find_names
from baton.channel.takeover import Wanted, succeed
from baton.core.ids import Compat, Peer
from baton.ports.channel import (
    ArenaGone,
    ArenaInUse,
    ArenaTooSmall,
    BlockCheck,
    BlockMark,
    NamedBlock,
)
from baton.ports.engine import KVLayout
from baton.wire.handover import ArenaRef, TicketBlock

#: From the kill to the lock's end: 0.1 s per GiB was measured for 4-KiB pages.
UNMAP_S = 0.1
#: Size of an arena that nobody asked a size for.
SIM_BLOCKS = 8


def _path(cluster: str, worker_id: str) -> str:
    return f"/sim/baton-{cluster}-{worker_id}.arena"


class SimFile:
    """One arena file: its header, its bytes, and who holds which byte of it locked."""

    def __init__(self, path: str, header: Header, inode: int) -> None:
        self.header = header
        self.ref = ArenaRef(path, 1, inode, header.file_id, header.owner)
        self.records = memoryview(bytearray(header.blocks_total * RECORD_BYTES))
        self.blocks = memoryview(bytearray(header.blocks_total * header.block_bytes))
        self.locked: set[int] = {header.owner.incarnation}

    def succeed(self, **changes: object) -> None:
        """Store the next header."""
        self.header = succeed(self.header, **changes)
        self.ref = msgspec.structs.replace(self.ref, owner=self.header.owner)


class SimHost:
    """The memory of one host. ``now`` is the virtual time in seconds."""

    def __init__(self, now: Callable[[], float], *, space: int = 2**40) -> None:
        self._now = now
        self._space = space
        self._files: dict[str, SimFile] = {}
        #: Incarnation -> when its locks vanish.
        self._killed: dict[int, float] = {}
        self._created = 0

    def open(
        self,
        cluster: str,
        owner: Peer,
        layout: KVLayout,
        compat: Compat,
        *,
        blocks: int = 0,
        tries_max: int = 2,
    ) -> SimArena:
        """Take over what a dead incarnation of ``owner`` left, or :meth:`create` a new arena.

        Raises:
            ArenaInUse, ArenaTooSmall: as :meth:`create`.
        """
        file = self._files.get(_path(cluster, owner.worker_id))
        wanted = Wanted(cluster, owner, layout, compat, blocks or None, tries_max)
        if file is None or wanted.reason_against(file.header):
            return self.create(cluster, owner, layout, compat, blocks=blocks or SIM_BLOCKS)
        self._refuse_if_owned(file)
        former = file.header.owner
        file.locked.add(owner.incarnation)
        file.succeed(owner=owner, tries=file.header.tries + 1)
        return SimArena(self, file, former)

    def create(
        self, cluster: str, owner: Peer, layout: KVLayout, compat: Compat, *, blocks: int
    ) -> SimArena:
        """Create ``owner``'s arena; replace one whose owner is dead.

        Raises:
            ArenaInUse: another live incarnation owns it.
            ArenaTooSmall: more than the space that is left.
        """
        assert owner.incarnation > 0, "incarnation 0 means nobody"
        path = _path(cluster, owner.worker_id)
        old = self._files.get(path)
        if old is not None:
            self._refuse_if_owned(old)
            self.unlink(old)
        needed = blocks * layout.block_bytes
        if needed > self._space:
            raise ArenaTooSmall(f"the arena needs {needed} bytes, available are {self._space}")
        self._created += 1
        header = make_header(
            cluster=cluster,
            owner=owner,
            pid=owner.incarnation,
            file_id=f"{self._created:032x}",
            layout=layout,
            compat=compat,
            blocks_total=blocks,
        )
        file = self._files[path] = SimFile(path, header, self._created)
        self._space -= needed
        return SimArena(self, file, None)

    def remove_unowned(self, cluster: str, worker_id: str) -> None:
        """Remove the arena of ``worker_id``, if there is one.

        Raises:
            ArenaInUse: a live incarnation owns it.
        """
        file = self._files.get(_path(cluster, worker_id))
        if file is not None:
            self._refuse_if_owned(file)
            self.unlink(file)

    def _refuse_if_owned(self, file: SimFile) -> None:
        if self.is_locked(file, file.header.owner.incarnation):
            raise ArenaInUse(f"{file.ref.path} belongs to {file.header.owner}, which is running")

    def channel(self, layout: KVLayout, compat: Compat) -> SimChannel:
        """Return one process's channel on this host."""
        return SimChannel(self, layout, compat)

    def sources(self, cluster: str, layout: KVLayout, compat: Compat) -> SimSources:
        """Return one process's way to the arenas it may import from."""
        return SimSources(self, cluster, layout, compat)

    # --- faults -------------------------------------------------------------------------------

    def kill(self, incarnation: int, *, unmap_s: float = UNMAP_S) -> None:
        """SIGKILL: its locks vanish after ``unmap_s``. The scenario stops running it at once."""
        self._killed.setdefault(incarnation, self._now() + unmap_s)

    def was_killed(self, incarnation: int) -> bool:
        """Whether it was killed; a frozen process needs no call here, since its locks stay."""
        return incarnation in self._killed

    def flip(self, ref: ArenaRef, block: int, byte: int, mask: int = 1) -> None:
        """Invert the bits ``mask`` of one byte of one block."""
        file = self.find(ref)
        assert 0 <= byte < file.header.block_bytes
        file.blocks[block * file.header.block_bytes + byte] ^= mask

    def reclaim_unlocked(self, cluster: str) -> list[str]:
        """Remove the cluster's files in which nobody holds any lock; return their paths."""
        removed = []
        for path, file in sorted(self._files.items()):
            locked = any(self.is_locked(file, each) for each in sorted(file.locked))
            if file.header.cluster == cluster and not locked:
                self.unlink(file)
                removed.append(path)
        return removed

    # --- what arenas and channels need ----------------------------------------------------------

    def find(self, ref: ArenaRef) -> SimFile:
        """Return the file ``ref`` names.

        Raises:
            ArenaGone: the path names another file, or none.
        """
        file = self._files.get(ref.path)
        if file is None or file.ref != ref:
            raise ArenaGone(f"{ref.path} is not the file that {ref.owner} named")
        return file

    def named(self, path: str) -> SimFile | None:
        """Return the file that has this name now."""
        return self._files.get(path)

    def is_locked(self, file: SimFile, incarnation: int) -> bool:
        """Whether the kernel would still show that lock."""
        if self._now() >= self._killed.get(incarnation, float("inf")):
            file.locked.discard(incarnation)
        return incarnation in file.locked

    def unlink(self, file: SimFile) -> None:
        """Remove the file's name if it is still this file's."""
        if self._files.get(file.ref.path) is file:
            del self._files[file.ref.path]
            self._space += len(file.blocks)


class SimArena:
    """The owner's side (``baton.ports.channel.OwnArena``)."""

    def __init__(self, host: SimHost, file: SimFile, former: Peer | None) -> None:
        self.ref = file.ref
        self.former = former
        self.blocks_total = file.header.blocks_total
        self._host = host
        self._file = file
        self._records = Records(file.records, self.blocks_total)
        self._seen: set[int] = set()
        self._dead: set[int] = set()

    @property
    def memory(self) -> memoryview:
        return self._file.blocks

    def mark(self, marks: Sequence[BlockMark]) -> None:
        for mark in marks:
            self._records.store(mark)

    def tear(self, mark: BlockMark, byte: int) -> None:
        """Store a record as one that is killed meanwhile does: up to ``byte``, the word not yet."""
        record = self._file.records[mark.block * RECORD_BYTES :][:RECORD_BYTES]
        before = bytes(record)
        self._records.store(mark)
        record[:8] = before[:8]
        record[byte:] = before[byte:]

    def marked(self, block: int) -> BlockMark:
        """Return what the metadata says of one block."""
        return self._records.load(block)

    def complete(self) -> None:
        if self._file.header.tries:
            self._file.succeed(tries=0)

    def verify(self, checks: Sequence[BlockCheck]) -> list[int]:
        return mismatches(self._file.blocks, self._file.header.layout, checks)

    def checksums(self, checks: Sequence[BlockCheck]) -> list[int]:
        return [checksum_in(self._file.blocks, self._file.header.layout, each) for each in checks]

    def writer_alive(self, incarnation: int) -> bool:
        if incarnation == self.ref.owner.incarnation:
            return True
        if incarnation in self._dead:
            return False
        alive = self._host.is_locked(self._file, incarnation)
        if alive:
            self._seen.add(incarnation)
        elif incarnation in self._seen:
            self._dead.add(incarnation)
        return alive

    def close(self, *, unlink: bool) -> None:
        if unlink:
            self._host.unlink(self._file)
        self._file.locked.discard(self.ref.owner.incarnation)


class SimChannel:
    """One process's way to other processes' arenas (``baton.ports.channel.Channel``)."""

    def __init__(self, host: SimHost, layout: KVLayout, compat: Compat) -> None:
        self._host = host
        self._layout = layout
        self._compat = compat
        self._mapped: dict[tuple[str, int], SimMapped] = {}

    def map(self, ref: ArenaRef, me: Peer) -> SimMapped:
        """Map ``ref`` with ``me`` locked in it.

        Raises:
            ArenaGone: as ``baton.channel.shm.ShmChannel.map``.
        """
        assert me.incarnation > 0, "incarnation 0 means nobody"
        assert not self._host.was_killed(me.incarnation), f"{me} ran after its death"
        key = (ref.file_id, me.incarnation)
        mapped = self._mapped.get(key)
        if mapped is None or (mapped.closed and mapped.ref.owner != ref.owner):
            mapped = self._mapped[key] = self._open(ref, me)
        elif mapped.closed:
            raise ArenaGone(f"{me} closed {ref.path} before, which its owner took for death")
        elif mapped.ref != ref:
            self._trust(ref)
            mapped.ref = ref
        return mapped

    def _trust(self, ref: ArenaRef) -> SimFile:
        file = self._host.find(ref)
        header = file.header
        check_fit(ref.path, header.layout, header.compat, self._layout, self._compat)
        if not self._host.is_locked(file, ref.owner.incarnation):
            raise ArenaGone(f"{ref.owner}, the owner of {ref.path}, is dead")
        return file

    def _open(self, ref: ArenaRef, me: Peer) -> SimMapped:
        file = self._trust(ref)
        if self._host.is_locked(file, me.incarnation):
            raise ArenaGone(f"another process maps {ref.path} as {me}")
        file.locked.add(me.incarnation)
        return SimMapped(self._host, file, me)


class SimMapped:
    """Somebody else's arena (``baton.ports.channel.MappedArena``)."""

    def __init__(self, host: SimHost, file: SimFile, me: Peer) -> None:
        self.ref = file.ref
        self.blocks_total = file.header.blocks_total
        self.closed = False
        self._host = host
        self._file = file
        self._me = me
        self._records = Records(file.records.toreadonly(), self.blocks_total)

    @property
    def memory(self) -> memoryview:
        return self._file.blocks

    def may_write(self, epoch: int, blocks: Sequence[TicketBlock]) -> bool:
        self._assert_running()
        writable, me = self._records.writable_by, self._me.incarnation
        return all(writable(me, epoch, each.block, each.generation) for each in blocks)

    def marked(self, block: int) -> BlockMark:
        """Return what the owner's metadata says of one block."""
        return self._records.load(block)

    def checksums(self, checks: Sequence[BlockCheck]) -> list[int]:
        self._assert_running()
        return [checksum_in(self._file.blocks, self._file.header.layout, each) for each in checks]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._file.locked.discard(self._me.incarnation)

    def _assert_running(self) -> None:
        assert not self._host.was_killed(self._me.incarnation), f"{self._me} ran after its death"


class SimSources:
    """One process's way to foreign arenas (``baton.ports.channel.Sources``)."""

    def __init__(self, host: SimHost, cluster: str, layout: KVLayout, compat: Compat) -> None:
        self._host = host
        self._cluster = cluster
        self._layout = layout
        self._compat = compat

    def open(self, worker_id: str) -> SimSource:
        """Open an arena by its worker's name.

        Raises:
            ArenaGone: as ``baton.channel.sources.ShmSources.open``.
        """
        path = _path(self._cluster, worker_id)
        file = self._host.named(path)
        if file is None:
            raise ArenaGone(f"the arena of {worker_id} cannot be opened: no such file")
        header = file.header
        check_fit(path, header.layout, header.compat, self._layout, self._compat)
        return SimSource(file)


class SimSource:
    """One foreign arena (``baton.ports.channel.SourceArena``): an open file outlives its name."""

    def __init__(self, file: SimFile) -> None:
        self._file = file

    def find(self, names: Sequence[bytes]) -> list[NamedBlock | None]:
        return find_names(bytes(self._file.records), names)

    def copy(self, block: int, target: memoryview) -> bool:
        size = self._file.header.block_bytes
        bytes_there = self._file.blocks[block * size : (block + 1) * size]
        target[: len(bytes_there)] = bytes_there
        return len(bytes_there) == len(target)

    def close(self) -> None:
        pass
