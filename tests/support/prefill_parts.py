"""A prefill worker to talk to, and what is said to it, for conversations with its machine."""

from __future__ import annotations

from typing import Any

from baton.core.events import LeaseChanged
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.ports.driving import CallLedger
from baton.ports.engine import Sampled
from baton.ports.ledger import AdvanceRequest
from baton.prefill.io import (
    ArenaOpened,
    ChunkFinished,
    ChunkResult,
    ChunkStored,
    MapArena,
    RunChunk,
)
from baton.prefill.machine import PrefillMachine
from baton.wire.handover import (
    ArenaMapped,
    ArenaOffered,
    ArenaRef,
    ChunkAnnounced,
    Ticket,
    TicketBlock,
)
from baton.wire.messages import AssignPrefill, RequestSpec
from support.machine_playbook import Like, Playbook, request, sent

ME, R = Peer("prefill-0", 1), Peer("router-0", 2)
G, D, E = Peer("gateway-0", 3), Peer("decode-0", 4), Peer("decode-1", 5)
HEIR = Peer("decode-0", 9)
SIZE = 4
EOS = 9
CHUNK = Like(RunChunk)
STARTED = Like(CallLedger, op=Like(AdvanceRequest, state=RequestState.PREFILLING))


def arena(owner: Peer) -> ArenaRef:
    name = f"arena-{owner.incarnation}"
    return ArenaRef(path=f"/{name}", device=1, inode=1, file_id=name, owner=owner)


class Prefill(Playbook):
    """A prefill worker that has mapped decode's arena, everybody linked."""

    stored_step = 0

    def __init__(self, **limits: Any) -> None:
        limits = {"prefill_chunk_tokens": 8, **limits}
        super().__init__(
            PrefillMachine(ME, Limits(**limits), block_size=SIZE, root=b"root"),
        )
        self.feed(LeaseChanged(LeaseState.HELD))
        self.up(R, Role.ROUTER)
        self.up(G, Role.GATEWAY)
        self.link(D)

    def link(self, owner: Peer) -> None:
        """Link a decode worker and map its arena."""
        self.up(owner, Role.DECODE)
        self.hear(owner, ArenaOffered(arena(owner)), MapArena(arena(owner)))
        mapped = sent(owner, ArenaMapped, error="")
        self.feed(ArenaOpened(arena(owner)), mapped)

    def assign(
        self,
        spec: RequestSpec,
        *expected: object,
        epoch: int = 1,
        decode: Peer = D,
        output: bytes = b"",
        alone: bool = False,
    ) -> None:
        self.hear(R, AssignPrefill(spec, epoch, decode, output, alone=alone), *expected)

    def ticket(
        self, request_id: str, tokens: int, *expected: object, epoch: int = 1, cached: int = 0
    ) -> None:
        self.hear(D, ticket(request_id, tokens, epoch=epoch, cached=cached), *expected)

    def start(self, spec: RequestSpec, **fields: Any) -> None:
        """Give work and its ticket; its first chunk runs."""
        tokens = spec.prompt_tokens + len(fields.get("output", b"")) // 4
        self.assign(spec, **fields)
        epoch = fields.get("epoch", 1)
        self.ticket(spec.request_id, tokens, STARTED, CHUNK, epoch=epoch)

    def returned(
        self, *expected: object, seconds: float = 0.01, borrowed: float = 0.0, **result: Any
    ) -> None:
        """The running chunk is stored, if it is not yet, and returns; its last rows sample 50
        unless ``result`` says otherwise."""
        chunk = self.last(RunChunk)
        if chunk.step != self.stored_step and not result:
            self.stored()
        results = []
        for row in chunk.rows:
            values = {"sampled": Sampled(50) if row.row.sample is not None else None}
            results.append(ChunkResult(**({**values, **result})))
        self.feed(ChunkFinished(chunk.step, tuple(results), seconds, 2, borrowed), *expected)

    def stored(self, but: str = "") -> None:
        """The running chunk has stored all rows ``but`` one and announces them at once."""
        chunk, self.stored_step = self.last(RunChunk), self.last(RunChunk).step
        kept = [row.row.request_id != but for row in chunk.rows]
        sums = tuple(
            (7,) * len(row.checks) if keep else None
            for row, keep in zip(chunk.rows, kept, strict=True)
        )
        announced = [
            sent(job.decode, ChunkAnnounced, request_id=row.row.request_id)
            for (row, job), keep in zip(self.machine.state.flying, kept, strict=True)
            if keep and not job.stopping
        ]
        self.feed(ChunkStored(chunk.step, sums, 1, 0.001), *announced)


def spec(request_id: str = "r", tokens: int = 6, **fields: Any) -> RequestSpec:
    fields.setdefault("stop_token_ids", (EOS,))
    return request(request_id, tuple(range(1, tokens + 1)), gateway=G, **fields)


def ticket(request_id: str, tokens: int, *, epoch: int = 1, cached: int = 0) -> Ticket:
    """Return a ticket for ``tokens`` tokens whose first ``cached`` blocks are there already.

    Physical blocks run backwards, so that whoever pairs by position is found out."""
    count = -(-tokens // SIZE)
    pairs = [TicketBlock(logical, 40 - logical, 3) for logical in range(count)]
    return Ticket(
        request_id=request_id,
        epoch=epoch,
        arena=arena(D),
        blocks=tuple(pairs[cached:]),
        prefix=tuple(pairs[:cached]),
        cached_tokens=cached * SIZE,
    )
