"""What lies where in an arena file: header, block records, journal, blocks. Pure functions only.

::

    0            header, one page: two slots of 2,048 bytes, each with magic, version, sequence
                 number, checksum, then the Header as JSON
    4096         block records, 64 bytes a block, padded to a page
    journal      room for a journal of running sequences (size 0: ADR 11 does without one)
    blocks       block_bytes a block, page aligned, to the end of the file; nothing where the blocks
                 are on a device

A block's record, in the host's byte order (an arena never leaves its host)::

    0   u64  word: generation (bits 0-31), state (32-39), filled tokens (40-55), 0 (56-63)
    8   u64  epoch
    16  u64  writer: incarnation that may store into the block, 0 for the owner alone
    24  u64  request key: whose block it is; for people and audits, no rule rests on it
    32  16s  chain: prefix-chain hash up to and including this block, zeros unless it is known full
    48  u64  checksum of the block's bytes (``baton.channel.checksum``), beside its chain
    56  8x   spare

The word is stored last and at once (one aligned 8-byte store), so whoever sees a state and a
generation sees the fields that belong to them. A process killed while it stores a record leaves
new fields under the old word: a chain whose bytes do not match the checksum names nothing.

The header changes when the arena gets a new owner. It is then stored into the slot that does not
hold it, with the next sequence number: a store cut short leaves the other one, which is whole.
"""

from __future__ import annotations

import struct

import msgspec
import xxhash

from baton.core.ids import Compat, Peer
from baton.core.lifecycles import BlockState
from baton.ports.channel import BlockMark
from baton.ports.engine import KVLayout

MAGIC = b"BATONKV\n"
LAYOUT_VERSION = 2
PAGE = 4096
SLOT = PAGE // 2
RECORD_BYTES = 64
RECORD_WORDS = RECORD_BYTES // 8
CHAIN_BYTES = 16

#: magic, layout version, length of the body, sequence number, xxh3 of body seeded with the sequence
_PREAMBLE = struct.Struct("=8sIIQQ")
#: a record without its word: epoch, writer, request key, chain, checksum
_FIELDS = struct.Struct("=QQQ16sQ")

_GENERATION_MASK = 2**32 - 1
_FILLED_MAX = 2**16 - 1
#: Generation and state: what a ticket is compared with.
IDENTITY_MASK = 2**40 - 1


class BadHeader(ValueError):
    """The first page is not an arena header this version understands; the text says why."""


class Header(msgspec.Struct, frozen=True):
    """Everything the first page says: stored before the file has a name, and by each new owner."""

    cluster: str
    owner: Peer
    pid: int
    """Of the owner, in its own pid namespace: only for messages to people."""
    file_id: str
    layout: KVLayout
    compat: Compat
    blocks_total: int
    block_bytes: int
    records_offset: int
    journal_offset: int
    journal_bytes: int
    blocks_offset: int
    file_bytes: int
    sequence: int = 0
    """Grows with each store of the header; the greatest whole one counts."""
    tries: int = 0
    """Take-overs that were begun since one was completed, or the file was made."""


def offsets(blocks_total: int, block_bytes: int, journal_bytes: int = 0) -> tuple[int, int, int]:
    """Return the offsets of journal and blocks, and the file's length, all page aligned."""
    journal = PAGE + pages(blocks_total * RECORD_BYTES)
    blocks = journal + pages(journal_bytes)
    return journal, blocks, blocks + pages(blocks_total * block_bytes)


def pages(length: int) -> int:
    """Round up to whole pages."""
    return -(-length // PAGE) * PAGE


def make_header(
    *,
    cluster: str,
    owner: Peer,
    pid: int,
    file_id: str,
    layout: KVLayout,
    compat: Compat,
    blocks_total: int,
) -> Header:
    """Return the header of an arena of ``blocks_total`` blocks."""
    journal, blocks, file_bytes = offsets(blocks_total, layout.file_block_bytes)
    return Header(
        cluster=cluster,
        owner=owner,
        pid=pid,
        file_id=file_id,
        layout=layout,
        compat=compat,
        blocks_total=blocks_total,
        block_bytes=layout.block_bytes,
        records_offset=PAGE,
        journal_offset=journal,
        journal_bytes=0,
        blocks_offset=blocks,
        file_bytes=file_bytes,
    )


def pack_header(header: Header) -> bytes:
    """Return the slot that holds ``header``: it belongs at :func:`slot_of`."""
    body = msgspec.json.encode(header)
    if _PREAMBLE.size + len(body) > SLOT:
        raise BadHeader(f"header of {len(body)} bytes does not fit its slot: names too long")
    checksum = xxhash.xxh3_64_intdigest(body, seed=header.sequence)
    preamble = _PREAMBLE.pack(MAGIC, LAYOUT_VERSION, len(body), header.sequence, checksum)
    return (preamble + body).ljust(SLOT, b"\0")


def slot_of(header: Header) -> int:
    """Return the offset of the slot for ``header``: never that of the one it follows."""
    return header.sequence % 2 * SLOT


def unpack_header(page: bytes) -> Header:
    """Return the newest whole header in ``page``.

    Raises:
        BadHeader: neither slot is as this version writes it; the text is about the first one.
    """
    if len(page) < PAGE:
        raise BadHeader(f"file ends after {len(page)} bytes")
    found, trouble = [], []
    for offset in (0, SLOT):
        try:
            header = _unpack_slot(page[offset : offset + SLOT])
        except BadHeader as error:
            trouble.append(error)
        else:
            found.append(header)
    if not found:
        raise trouble[0]
    return max(found, key=lambda header: header.sequence)


def _unpack_slot(slot: bytes) -> Header:
    magic, version, length, sequence, checksum = _PREAMBLE.unpack_from(slot)
    if magic != MAGIC:
        raise BadHeader("not an arena (magic)")
    if version != LAYOUT_VERSION:
        raise BadHeader(f"layout version {version}, this program knows {LAYOUT_VERSION}")
    body = slot[_PREAMBLE.size : _PREAMBLE.size + length]
    if len(body) != length or xxhash.xxh3_64_intdigest(body, seed=sequence) != checksum:
        raise BadHeader("header is damaged (checksum)")
    try:
        header = msgspec.json.decode(body, type=Header)
    except msgspec.DecodeError as error:
        raise BadHeader(f"header is not understood: {error}") from error
    _check_geometry(header)
    return header


def _check_geometry(header: Header) -> None:
    journal, blocks, file_bytes = offsets(
        header.blocks_total, header.layout.file_block_bytes, header.journal_bytes
    )
    if (
        header.blocks_total < 1
        or header.block_bytes != header.layout.block_bytes
        or header.journal_bytes < 0
        or (header.records_offset, header.journal_offset) != (PAGE, journal)
        or (header.blocks_offset, header.file_bytes) != (blocks, file_bytes)
    ):
        raise BadHeader("header contradicts itself (offsets)")


def pack_word(generation: int, state: BlockState, filled: int) -> int:
    """Return the record's first 8 bytes as a number."""
    assert 0 <= generation <= _GENERATION_MASK
    assert 0 <= filled <= _FILLED_MAX
    return generation | state << 32 | filled << 40


def unpack_word(word: int) -> tuple[int, BlockState, int]:
    """Return generation, state and filled tokens.

    Raises:
        ValueError: no such state: the record is not one of ours.
    """
    return word & _GENERATION_MASK, BlockState(word >> 32 & 0xFF), word >> 40 & _FILLED_MAX


def filling(generation: int) -> int:
    """Return what ``word & IDENTITY_MASK`` is while a block of that generation may be written."""
    return generation | BlockState.FILLING << 32


class Records:
    """The block records of one arena, over its memory (``blocks_total * 64`` bytes).

    ``region`` may be read-only; then only the reading half works. A cast to 64-bit words is used
    because CPython stores an item of such a view with one 8-byte store, and the region is aligned.
    """

    def __init__(self, region: memoryview, blocks_total: int) -> None:
        assert len(region) >= blocks_total * RECORD_BYTES
        self._bytes = region[: blocks_total * RECORD_BYTES]
        self._words = self._bytes.cast("Q")
        self._blocks_total = blocks_total

    def store(self, mark: BlockMark) -> None:
        """Store one record: its fields, then its word."""
        assert 0 <= mark.block < self._blocks_total, f"no block {mark.block}"
        assert len(mark.chain) in (0, CHAIN_BYTES)
        _FIELDS.pack_into(
            self._bytes,
            mark.block * RECORD_BYTES + 8,
            mark.epoch,
            mark.writer,
            mark.request_key,
            mark.chain,
            mark.checksum,
        )
        word = pack_word(mark.generation, mark.state, mark.filled)
        self._words[mark.block * RECORD_WORDS] = word

    def load(self, block: int) -> BlockMark:
        """Return one record. A chain of zeros reads as none.

        Raises:
            ValueError: no such state: the record is not one of ours.
        """
        assert 0 <= block < self._blocks_total, f"no block {block}"
        generation, state, filled = unpack_word(self._words[block * RECORD_WORDS])
        epoch, writer, request_key, chain, checksum = _FIELDS.unpack_from(
            self._bytes, block * RECORD_BYTES + 8
        )
        return BlockMark(
            block=block,
            state=state,
            generation=generation,
            epoch=epoch,
            writer=writer,
            chain=chain if any(chain) else b"",
            checksum=checksum,
            filled=filled,
            request_key=request_key,
        )

    def writable_by(self, writer: int, epoch: int, block: int, generation: int) -> bool:
        """Whether ``block`` is FILLING, of that generation, for that writer and epoch."""
        if not 0 <= block < self._blocks_total or not 0 <= generation <= _GENERATION_MASK:
            return False
        words, at = self._words, block * RECORD_WORDS
        return (
            words[at] & IDENTITY_MASK == filling(generation)
            and words[at + 1] == epoch
            and words[at + 2] == writer
        )
