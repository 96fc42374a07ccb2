"""The writer's side: opening other processes' arenas on this host.

Decides when a file is trusted (device, inode, file id, header, layout, a live owner, in this order,
before anything is mapped) and that this incarnation's byte is locked before it is. The records are
mapped read-only: only the owner writes them, and the memory unit holds everybody to it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import structlog

from baton.channel import files, locks
from baton.channel.checksum import checksum_in
from baton.channel.layout import PAGE, BadHeader, Header, Records
from baton.channel.mapping import Mapping
from baton.channel.on_device import OnDevice
from baton.core.ids import Compat, Peer
from baton.ports.channel import ArenaGone, BlockCheck, BlockMark
from baton.ports.device import DeviceBlocks
from baton.ports.engine import KVLayout
from baton.wire.handover import ArenaRef, TicketBlock

log = structlog.get_logger(__name__)


class ShmChannel:
    """Maps arenas (``baton.ports.channel.Channel``) that agree with ``layout`` and ``compat``.

    A mapping is kept until it is closed. Close it only when its owner's incarnation is gone or this
    process ends: the owner takes a lock seen gone for death, so the same incarnation never maps the
    same arena again, unless it has a new owner, which concludes nothing from before.
    """

    def __init__(self, layout: KVLayout, compat: Compat, place: OnDevice | None = None) -> None:
        """``place``: where blocks are, if the layout says that they are on a device."""
        assert (place is None) == (layout.place == "host")
        self._place = place
        self._layout = layout
        self._compat = compat
        self._mapped: dict[tuple[str, int], ShmArena] = {}

    def map(self, ref: ArenaRef, me: Peer) -> ShmArena:
        """Map ``ref`` with this incarnation's byte locked; the same object if it is mapped already.

        Takes about 0.3 s per GiB (every page enters the page table): call it when the peer is met,
        not when its first ticket comes.

        Raises:
            ArenaGone: not the file ``ref`` names, another layout, a dead owner, or an arena that
                this incarnation has closed before.
        """
        assert me.incarnation > 0, "incarnation 0 means nobody"
        key = (ref.file_id, me.incarnation)
        mapped = self._mapped.get(key)
        if mapped is None or (mapped.closed and mapped.ref.owner != ref.owner):
            mapped = self._mapped[key] = self._open(ref, me)
        elif mapped.closed:
            raise ArenaGone(f"{me} closed {ref.path} before, which its owner took for death")
        elif mapped.ref != ref:
            self._trust(mapped.fd, ref)
            mapped.ref = ref
        return mapped

    def _open(self, ref: ArenaRef, me: Peer) -> ShmArena:
        try:
            fd = files.open_arena(ref.path)
        except OSError as error:
            raise ArenaGone(f"arena of {ref.owner} cannot be opened: {error}") from error
        try:
            header = self._trust(fd, ref)
            if not locks.lock(fd, me.incarnation):
                raise ArenaGone(f"another process maps {ref.path} as {me}")
            blocks = self._device_blocks(ref, me, header)
            return ShmArena(fd, ref, me, header, device_blocks=blocks, place=self._place)
        except BaseException:
            os.close(fd)
            raise

    def _device_blocks(self, ref: ArenaRef, me: Peer, header: Header) -> DeviceBlocks | None:
        """Map the blocks, after this incarnation's byte was locked."""
        if self._place is None:
            return None
        try:
            return self._place.fetched(
                ref.file_id, me.incarnation, header.layout, header.blocks_total
            )
        except OSError as error:
            raise ArenaGone(f"the blocks of {ref.path} cannot be had: {error}") from error

    def _trust(self, fd: int, ref: ArenaRef) -> Header:
        info = os.fstat(fd)
        if (info.st_dev, info.st_ino) != (ref.device, ref.inode):
            raise ArenaGone(f"{ref.path} was replaced: it is not the file that {ref.owner} named")
        try:
            header = files.read_header(fd)
        except BadHeader as error:
            raise ArenaGone(f"{ref.path}: {error}") from error
        if (header.file_id, header.owner) != (ref.file_id, ref.owner):
            raise ArenaGone(f"{ref.path} is the arena of {header.owner}, not of {ref.owner}")
        files.check_fit(ref.path, header.layout, header.compat, self._layout, self._compat)
        if not locks.is_locked(fd, ref.owner.incarnation):
            raise ArenaGone(f"{ref.owner}, the owner of {ref.path}, is dead")
        return header


class ShmArena:
    """Somebody else's arena, mapped here (``baton.ports.channel.MappedArena``)."""

    def __init__(
        self,
        fd: int,
        ref: ArenaRef,
        me: Peer,
        header: Header,
        *,
        device_blocks: DeviceBlocks | None = None,
        place: OnDevice | None = None,
    ) -> None:
        """Map an open file in which ``me`` is locked. Takes ``fd`` over when it returns.
        ``device_blocks`` and ``place``: where blocks are not in the file."""
        self._place = place
        locks.hold_across_fork(ref.device, ref.inode)
        self.ref = ref
        self.blocks_total = header.blocks_total
        self.closed = False
        self.lingering = False
        """After ``close``: views were still open, the pages go with the last of them."""
        self._me = me
        self._layout = header.layout
        length = header.blocks_total * header.block_bytes
        records_bytes = header.journal_offset - header.records_offset
        assert header.records_offset == PAGE
        self._record_map = Mapping(fd, PAGE, records_bytes, writable=False)
        self._records = Records(self._record_map.view, header.blocks_total)
        self._blocks: Mapping | DeviceBlocks
        if device_blocks is None:
            in_file = header.file_bytes - header.blocks_offset
            mapping = self._blocks = Mapping(fd, header.blocks_offset, in_file, writable=True)
            self._memory: Any = mapping.view[:length]
        else:
            self._blocks = device_blocks
            self._memory = device_blocks.memory
        self.fd = fd

    @property
    def memory(self) -> Any:
        return self._memory

    def may_write(self, epoch: int, blocks: Sequence[TicketBlock]) -> bool:
        writable, me = self._records.writable_by, self._me.incarnation
        return all(writable(me, epoch, each.block, each.generation) for each in blocks)

    def marked(self, block: int) -> BlockMark:
        """Return what the owner's metadata says of one block."""
        return self._records.load(block)

    def checksums(self, checks: Sequence[BlockCheck]) -> list[int]:
        if not isinstance(self._blocks, Mapping):
            return self._blocks.checksums(checks)
        return [checksum_in(self._memory, self._layout, check) for check in checks]

    def close(self) -> None:
        """Give the mapping up, and with it the lock: no thread here may store into it any more.

        Views that are still open keep the pages and the lock until they go: ``lingering`` is then
        set and a warning logged, nothing is raised. Repeating it does nothing.
        """
        if self.closed:
            return
        self.closed = True
        del self._records, self._memory
        unmapped = [self._record_map.close(), self._blocks.close()]
        if self._place is not None and all(unmapped):
            # Before the lock goes: whoever sees it gone asks whether this process has left.
            self._place.left(self.ref.file_id, self._me.incarnation)
        os.close(self.fd)
        self.lingering = not all(unmapped)
        if self.lingering:
            log.warning("arena_views_open", path=self.ref.path, owner=str(self.ref.owner))
