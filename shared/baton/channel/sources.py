"""Other decode workers' arenas on this host, to copy blocks from (``baton.ports.channel.Sources``).

Decides when a foreign file fits (its header, whoever owns it now) and where a name is in it. The
file is read, not mapped: a read needs no lock, brings no foreign page into this process, leaves the
interpreter to others while it copies, and one past the end of a damaged file is short, not fatal.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.channel import files
from baton.channel.layout import CHAIN_BYTES, RECORD_BYTES, BadHeader, Header
from baton.channel.on_device import OnDevice
from baton.core.ids import Compat
from baton.ports.channel import ArenaGone, NamedBlock
from baton.ports.device import DeviceBlocks
from baton.ports.engine import KVLayout

#: Of a record, what is looked for and what is found (``baton.channel.layout``).
_RECORD = np.dtype(
    {
        "names": ["head", "chain", "checksum"],
        "formats": ["=u8", f"V{CHAIN_BYTES}", "=u8"],
        "offsets": [32, 32, 48],
        "itemsize": RECORD_BYTES,
    }
)


class ShmSources:
    """The arenas of one cluster in one directory, as far as they fit this process's own."""

    def __init__(
        self,
        directory: Path | str,
        cluster: str,
        layout: KVLayout,
        compat: Compat,
        *,
        place: OnDevice | None = None,
    ) -> None:
        """``place``: where blocks are, if the layout says that they are on a device."""
        assert (place is None) == (layout.place == "host")
        self._place = place
        self._directory = Path(directory)
        self._cluster = cluster
        self._layout = layout
        self._compat = compat

    def open(self, worker_id: str) -> ShmSource:
        """Open the arena of ``worker_id`` to read from it.

        Raises:
            ArenaGone: there is none, it is another user's, or its KV is not what this process's is.
        """
        try:
            path = files.arena_path(self._directory, self._cluster, worker_id)
            fd = files.open_arena(path, writable=False)
        except (OSError, ValueError) as error:
            raise ArenaGone(f"the arena of {worker_id} cannot be opened: {error}") from error
        try:
            header = files.read_header(fd)
            files.check_fit(str(path), header.layout, header.compat, self._layout, self._compat)
            blocks = self._device_blocks(header)
        except BadHeader as error:
            os.close(fd)
            raise ArenaGone(f"{path}: {error}") from error
        except BaseException:
            os.close(fd)
            raise
        return ShmSource(fd, header, blocks)

    def _device_blocks(self, header: Header) -> DeviceBlocks | None:
        if self._place is None:
            return None
        layout, total = header.layout, header.blocks_total
        try:
            # Nobody's lock rests on this: what is copied from it is verified on the copy.
            return self._place.fetched(header.file_id, 0, layout, total)
        except OSError as error:
            raise ArenaGone(f"the blocks of {header.owner} cannot be had: {error}") from error


class ShmSource:
    """One foreign arena (``baton.ports.channel.SourceArena``)."""

    def __init__(self, fd: int, header: Header, blocks: DeviceBlocks | None) -> None:
        """Take ``fd`` over. ``blocks``: where they are not in the file."""
        self._fd = fd
        self._blocks = blocks
        self._header = header

    def find(self, names: Sequence[bytes]) -> list[NamedBlock | None]:
        header = self._header
        records = os.pread(self._fd, header.blocks_total * RECORD_BYTES, header.records_offset)
        return find_names(records, names)

    def copy(self, block: int, target: Any) -> bool:
        header = self._header
        if self._blocks is not None:
            if not 0 <= block < header.blocks_total:
                return False
            self._blocks.copy_out(block, target)
            return True
        assert len(target) == header.block_bytes
        at = header.blocks_offset + block * header.block_bytes
        return os.preadv(self._fd, [target], at) == len(target)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if self._blocks is not None:
                self._blocks.close()


def find_names(records: bytes | memoryview, names: Sequence[bytes]) -> list[NamedBlock | None]:
    """Return block and checksum of each of ``names``, as ``records`` say.

    Takes milliseconds for 100,000 records: they are compared by the first half of the name at once.
    """
    table = np.frombuffer(records[: len(records) // RECORD_BYTES * RECORD_BYTES], dtype=_RECORD)
    heads = np.frombuffer(b"".join(names), dtype="=u8")[:: CHAIN_BYTES // 8]
    hits = np.flatnonzero(np.isin(table["head"], heads))
    found = {
        table["chain"][row].tobytes(): NamedBlock(int(row), int(table["checksum"][row]))
        for row in hits
    }
    return [found.get(name) for name in names]
