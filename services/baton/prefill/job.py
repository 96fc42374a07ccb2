"""One prompt on prefill: its ticket, how far it is, what was announced.

Decides nothing about others; ``chunks.py`` orders jobs and builds chunks of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from baton.core.ids import Peer
from baton.core.prefix import block_names
from baton.ports.channel import BlockCheck
from baton.ports.engine import Row, SampleSpec, TokenIds
from baton.prefill.io import ChunkRow
from baton.wire.handover import BlockSum, Ticket
from baton.wire.messages import AssignPrefill, RequestSpec


@dataclass(slots=True)
class Job:
    """One attempt at one prompt. It computes nothing before it has its ticket."""

    spec: RequestSpec
    epoch: int
    router: Peer
    turn: int
    """Of that router; it grows when another one adopts the request."""
    alone: bool
    """Suspected of ending workers: its chunks are its own."""
    gateway: Peer
    decode: Peer
    assigned_at: float
    ids: bytes
    """Prompt and forced output, uint32 LE: what is computed."""
    tokens: TokenIds
    forced: tuple[int, ...]
    ticket: Ticket | None = None
    started_at: float | None = None
    table: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    names: list[bytes] = field(default_factory=list)
    """Of its blocks, a last one that is not full included."""
    computed: int = 0
    last_write_ns: int = 0
    """CLOCK_BOOTTIME of the last store for it."""
    announced: int = 0
    """Leading blocks that are cached or announced: never written again."""
    stopping: bool = False
    """Cancelled or revoked while its chunk runs: it ends when the chunk has returned."""

    @classmethod
    def create(cls, message: AssignPrefill, router: Peer, now: float) -> Job:
        """Return a job that waits for its ticket."""
        ids = message.spec.prompt + message.output
        forced = np.frombuffer(message.output, dtype="<u4")
        return cls(
            spec=message.spec,
            epoch=message.epoch,
            router=router,
            turn=message.turn,
            alone=message.alone,
            gateway=message.spec.gateway,
            decode=message.decode,
            assigned_at=now,
            ids=ids,
            tokens=np.frombuffer(ids, dtype="<u4").astype(np.int32),
            forced=tuple(int(token) for token in forced),
        )

    @property
    def key(self) -> tuple[str, int]:
        return self.spec.request_id, self.epoch

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    def accept(self, ticket: Ticket, root: bytes, block_size: int) -> str | None:
        """Take the ticket; return what is wrong with it, if anything."""
        pairs = sorted([*ticket.prefix, *ticket.blocks], key=lambda pair: pair.logical)
        count = -(-len(self.tokens) // block_size)
        if [pair.logical for pair in pairs] != list(range(count)):
            return f"the ticket names {len(pairs)} blocks for {count}"
        cached = len(ticket.prefix)
        if ticket.cached_tokens != cached * block_size or ticket.cached_tokens >= len(self.tokens):
            return f"{ticket.cached_tokens} cached tokens do not fit {cached} prefix blocks"
        self.ticket = ticket
        self.table = np.array([pair.block for pair in pairs], dtype=np.int32)
        self.names = block_names(root, self.ids, block_size)
        self.computed = ticket.cached_tokens
        self.announced = cached
        return None

    def chunk(self, budget: int, block_size: int) -> ChunkRow | None:
        """Return the next at most ``budget`` tokens, ending at a block's border or at the end."""
        assert self.ticket is not None
        end = self.computed + min(budget, self.remaining)
        last = end == len(self.tokens)
        if not last:
            end -= end % block_size
        if end <= self.computed:
            return None
        cached = len(self.ticket.prefix)
        writes = {pair.logical: pair for pair in self.ticket.blocks}
        touched = range(max(cached, self.computed // block_size), -(-end // block_size))
        complete = range(self.announced, -(-end // block_size))
        sample = SampleSpec(
            self.spec.sampling,
            len(self.forced),
            self.tokens[: self.spec.prompt_tokens],
            self.forced,
        )
        return ChunkRow(
            row=Row(
                request_id=self.spec.request_id,
                token_ids=self.tokens[self.computed : end],
                start=self.computed,
                blocks=self.table,
                arena=self.ticket.arena.file_id,
                sample=sample if last else None,
            ),
            epoch=self.epoch,
            targets=tuple(writes[logical] for logical in touched),
            checks=tuple(
                BlockCheck(
                    logical=logical,
                    block=writes[logical].block,
                    tokens=min(len(self.tokens) - logical * block_size, block_size),
                    chain=self.names[logical],
                )
                for logical in complete
            ),
        )

    def advance(self, row: ChunkRow, checksums: tuple[int, ...]) -> tuple[BlockSum, ...]:
        """The chunk is stored: return the sums to announce, of the last one all that is left."""
        assert self.ticket is not None
        generations = {pair.logical: pair.generation for pair in self.ticket.blocks}
        self.computed += len(row.row.token_ids)
        self.announced += len(row.checks)
        return tuple(
            BlockSum(check.logical, generations[check.logical], check.tokens, checksum)
            for check, checksum in zip(row.checks, checksums, strict=True)
        )
