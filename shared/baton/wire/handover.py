"""Messages between decode and prefill: the hand-over of a prompt's KV.

Decides names and fields, as ``messages.py`` does for all others; ``docs/protocol.md`` tells who
sends what when. Whatever ends a writer's attempt says that it stores there no more: only then are
its blocks anybody else's.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.core.ids import Peer
from baton.core.outcomes import Reason
from baton.wire.fields import (
    BlockNumber,
    BootTimeNs,
    Count,
    Epoch,
    Generation,
    MeasuredMs,
    Message,
    RequestId,
    TokenId,
    TokenLogprob,
)


class ArenaRef(msgspec.Struct, frozen=True):
    """Names one arena beyond doubt: a path may be reused, an inode with a file id may not."""

    path: str
    device: Annotated[int, Meta(ge=0)]
    inode: Annotated[int, Meta(ge=0)]
    file_id: str
    """Random at creation, stored in the header: 32 hex digits."""
    owner: Peer


class ArenaOffered(Message, frozen=True):
    """decode -> prefill, once a link is open: map this; tickets will name it."""

    arena: ArenaRef


class ArenaMapped(Message, frozen=True):
    """prefill -> decode: mapped, and my lock is on it. Decode looks at the lock before it believes.

    ``error`` says why it could not be mapped; such a pair gets no tickets.
    """

    file_id: str
    error: str = ""


class TicketBlock(msgspec.Struct, frozen=True, array_like=True):
    """One pair of the ticket: never a bare position."""

    logical: BlockNumber
    block: BlockNumber
    generation: Generation


class Ticket(Message, frozen=True):
    """decode -> prefill: permission to fill ``blocks`` of ``arena`` for (request, epoch).

    Without any block there is nothing to do: decode has nearly all of it and computes the rest.
    """

    request_id: RequestId
    epoch: Epoch
    arena: ArenaRef
    blocks: tuple[TicketBlock, ...]
    """To be written: every logical block from ``cached_tokens`` on."""
    prefix: tuple[TicketBlock, ...] = ()
    """Already filled, to be read in place; pinned until the writer stopped."""
    cached_tokens: Count = 0


class BlockSum(msgspec.Struct, frozen=True, array_like=True):
    """Checksum of one block's filled tokens (``baton.channel.checksum``)."""

    logical: BlockNumber
    generation: Generation
    tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """Filled tokens of the block, 1..block_size."""
    checksum: Annotated[int, Meta(ge=0)]


class ChunkAnnounced(Message, frozen=True):
    """prefill -> decode: these blocks are filled and will never be written again."""

    request_id: RequestId
    epoch: Epoch
    sums: tuple[BlockSum, ...]


class PrefillCommitted(Message, frozen=True):
    """prefill -> decode: all is announced, and this is the first token. Says too: I store there no
    more."""

    request_id: RequestId
    epoch: Epoch
    first_id: TokenId
    first_logprob: TokenLogprob | None = None
    prefill_ms: MeasuredMs = 0.0
    last_write_ns: BootTimeNs = 0
    """CLOCK_BOOTTIME of the last store into the arena: only to measure the hand-over."""
    ended_ns: BootTimeNs = 0
    """CLOCK_BOOTTIME when the first token was chosen: only to measure the hand-over."""


class PrefillFailed(Message, frozen=True):
    """prefill -> decode: the attempt is over. Says too: I store there no more."""

    request_id: RequestId
    epoch: Epoch
    reason: Reason
    message: str = ""
    retryable: bool = True


class TicketRevoked(Message, frozen=True):
    """decode -> prefill: stop at the next chunk boundary and say so with ``WriterStopped``."""

    request_id: RequestId
    epoch: Epoch


class WriterStopped(Message, frozen=True):
    """prefill -> decode: no thread, pool or queue of mine will touch that ticket's blocks again."""

    request_id: RequestId
    epoch: Epoch
