"""Taking over, in place, the arena file of an owner that died.

Decides whether a file is worth it (nobody owns it, its header is whole, it was this worker's, for
the same model and layout, of the size asked for) and that of two starts at once only one gets it.
Which of its blocks are kept is the new owner's decision: it reads the records and verifies.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.channel import files, locks
from baton.channel.layout import BadHeader, Header, pack_header, slot_of
from baton.core.ids import Compat, Peer
from baton.ports.channel import ArenaInUse
from baton.ports.engine import KVLayout


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a worker that starts needs its arena to be."""

    cluster: str
    owner: Peer
    layout: KVLayout
    compat: Compat
    blocks_total: int | None
    """The size asked for; ``None``: any."""
    tries_max: int
    """An arena that so many owners have begun to take over, and none has, is given up: what is in
    it may be what kills them."""
    lost: Callable[[Header], str] = lambda _: ""
    """Says why the blocks of a file cannot be had, empty if they can: they may be elsewhere."""

    def reason_against(self, old: Header) -> str:
        """Return why an arena with header ``old`` has to be replaced, empty if it need not."""
        if (old.cluster, old.owner.worker_id) != (self.cluster, self.owner.worker_id):
            return f"it is the arena of {old.owner} of cluster {old.cluster!r}"
        if found := files.differences(old.layout, old.compat, self.layout, self.compat):
            return "; ".join(found)
        if self.blocks_total not in (None, old.blocks_total):
            return f"it has {old.blocks_total} blocks, {self.blocks_total} are asked for"
        if old.tries >= self.tries_max:
            return f"{old.tries} take-overs of it were begun and not completed"
        return self.lost(old)


class NotTaken(Exception):
    """The file is there and nobody's, but has to be replaced; the text says why."""


def take_over(path: Path, wanted: Wanted) -> tuple[int, Header, Peer]:
    """Make ``wanted.owner`` the owner of the file at ``path``.

    Returns the open file, in which the new owner's byte is locked, its header, and who had it.

    Raises:
        NotTaken: it has to be replaced.
        ArenaInUse: its owner lives, or another process is about to own it.
        FileNotFoundError: there is none.
    """
    with files.unowned(path):
        # Nobody removes or takes it meanwhile, so the path goes on naming this file.
        fd = files.open_arena(path)
        try:
            old = _usable(fd, wanted)
            # The lock first: with the header in force, it is what keeps all others out.
            if not locks.lock(fd, wanted.owner.incarnation):
                raise ArenaInUse(f"another process holds {path} as {wanted.owner}")
            header = succeed(old, owner=wanted.owner, pid=os.getpid(), tries=old.tries + 1)
            store_header(fd, header)
        except BaseException:
            os.close(fd)
            raise
        return fd, header, old.owner


def succeed(header: Header, **changes: object) -> Header:
    """Return the header that follows ``header``."""
    return msgspec.structs.replace(header, sequence=header.sequence + 1, **changes)


def store_header(fd: int, header: Header) -> None:
    """Store ``header`` into its slot; until all of it is there the one before counts."""
    os.pwrite(fd, pack_header(header), slot_of(header))


def _usable(fd: int, wanted: Wanted) -> Header:
    try:
        old = files.read_header(fd)
    except BadHeader as error:
        raise NotTaken(str(error)) from error
    if why := wanted.reason_against(old):
        raise NotTaken(why)
    return old
