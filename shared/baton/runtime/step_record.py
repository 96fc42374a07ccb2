"""Whose rows the step in flight has: a small file that outlives the process.

Decides its format. A worker that dies in the middle of a step cannot say anymore who was in it; its
successor reads this file and tells the routers, which blame nobody else. It is written before every
step, through a mapping of two slots that take turns: a slot torn by a kill fails its checksum and
the other one still holds the step before.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import msgspec
import xxhash

from baton.channel import locks
from baton.core.ids import Peer
from baton.ports.driving import RecordStep
from baton.wire.messages import AttemptId, LastStep

SLOT_BYTES = 32 * 1024
_HEADER = struct.Struct("<QQII")
"""Checksum of what follows, number, length, zero."""


class _Content(msgspec.Struct, array_like=True):
    peer: Peer
    attempts: tuple[AttemptId, ...]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Content)


def record_path(run_dir: Path, worker_id: str) -> Path:
    """Return the file of ``worker_id``."""
    return run_dir / f"{worker_id}.step"


class StepRecordInUse(Exception):
    """Another process writes this record."""


class StepRecord:
    """The file of one worker, as its present incarnation writes it. Used by one thread."""

    def __init__(self, path: Path, me: Peer) -> None:
        """Open or make the file. :attr:`left` is what the incarnation before left in it.

        Raises:
            StepRecordInUse: a former incarnation is still there.
            OSError: it cannot be made or mapped.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(path, flags, 0o600)
        try:
            # Held as long as the mapping is there: two who write would leave nonsense.
            if not locks.lock(file, locks.REPLACE_BYTE):
                raise StepRecordInUse(f"{path}: another process runs under this name")
            os.posix_fallocate(file, 0, 2 * SLOT_BYTES)
            self._memory = mmap.mmap(file, 2 * SLOT_BYTES)
        finally:
            os.close(file)
        self._me = me
        found = [each for each in (self._read(0), self._read(1)) if each is not None]
        self._number, newest = max(found, key=lambda each: each[0], default=(0, None))
        self.left = None if newest is None else LastStep(newest.peer, newest.attempts)
        """``None``: nobody was here before."""
        self.write(RecordStep(()))

    def write(self, command: RecordStep) -> None:
        """Store whose rows the next step has; none: no step runs."""
        body = _encode(_Content(self._me, command.attempts))
        if _HEADER.size + len(body) > SLOT_BYTES:
            # Ids of the greatest length: better nobody is named than some.
            body = _encode(_Content(self._me, ()))
        self._number += 1
        rest = struct.pack("<QII", self._number, len(body), 0) + body
        begin = self._number % 2 * SLOT_BYTES
        self._memory[begin + 8 : begin + 8 + len(rest)] = rest
        self._memory[begin : begin + 8] = struct.pack("<Q", xxhash.xxh3_64_intdigest(rest))

    def close(self) -> None:
        """Unmap the file; it stays."""
        self._memory.close()

    def _read(self, slot: int) -> tuple[int, _Content] | None:
        begin = slot * SLOT_BYTES
        checksum, number, length, _ = _HEADER.unpack_from(self._memory, begin)
        end = begin + _HEADER.size + length
        if not number or end > begin + SLOT_BYTES:
            return None
        if xxhash.xxh3_64_intdigest(self._memory[begin + 8 : end]) != checksum:
            return None
        try:
            return number, _decoder.decode(self._memory[begin + _HEADER.size : end])
        except msgspec.MsgspecError:
            return None
