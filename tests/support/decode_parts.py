"""A decode worker to talk to, and what is said to it, for conversations with its machine."""

from __future__ import annotations

from typing import Any

from baton.core.events import LeaseChanged
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.core.slo import Slo
from baton.decode.io import (
    BlocksVerified,
    ProbeWriter,
    RunStep,
    StepFinished,
    VerifyBlocks,
    WriterProbed,
)
from baton.decode.machine import DecodeMachine
from baton.decode.takeover import TakenOver
from baton.ports.driving import CallLedger, Send
from baton.ports.engine import Sampled
from baton.ports.ledger import AdvanceRequest
from baton.wire.handover import (
    ArenaMapped,
    ArenaOffered,
    ArenaRef,
    BlockSum,
    ChunkAnnounced,
    PrefillCommitted,
    Ticket,
)
from baton.wire.messages import (
    CancelWork,
    DecodeReserved,
    LastStep,
    RequestSpec,
    ReserveDecode,
    TokenChunk,
    TokenRun,
)
from support.machine_playbook import Like, Playbook, request, sent

ME, R, R1 = Peer("decode-0", 1), Peer("router-0", 2), Peer("router-1", 6)
G, P, Q = Peer("gateway-0", 3), Peer("prefill-0", 4), Peer("prefill-1", 5)
SIZE = 4
ARENA = ArenaRef(path="/a", device=1, inode=1, file_id="f", owner=ME)
EOS = 9
CANCELLED = Outcome(Ending.CANCELLED, reason=Reason.CLIENT_CANCELLED)
ADVANCED = Like(CallLedger, op=Like(AdvanceRequest))
STEP = Like(RunStep)


class Decode(Playbook):
    """A decode worker with an arena of ``blocks`` blocks of four tokens, everybody linked."""

    def __init__(
        self,
        blocks: int = 8,
        writers: tuple[Peer, ...] = (P,),
        found: TakenOver | None = None,
        left: LastStep | None = None,
        slo: Slo | None = None,
        **limits: Any,
    ) -> None:
        machine = DecodeMachine(
            ME,
            Limits(**{"growth_tokens": 4, "hit_rest_tokens": 0, **limits}),
            ARENA,
            blocks_total=blocks,
            block_size=SIZE,
            block_bytes=64,
            root=b"root",
            slo=slo,
            found=found,
            left=left,
        )
        super().__init__(machine)
        self.pool = machine.state.pool
        self.feed(LeaseChanged(LeaseState.HELD))
        self.up(R, Role.ROUTER, *([] if left is None else [Send(R, left)]))
        self.up(G, Role.GATEWAY)
        for writer in writers:
            self.map(writer)

    def map(self, writer: Peer, *expected: object) -> None:
        """Link a prefill worker and let it map the arena, its lock seen."""
        self.up(writer, Role.PREFILL, Send(writer, ArenaOffered(ARENA)), *expected)
        self.hear(writer, ArenaMapped("f"), ProbeWriter(writer.incarnation))
        self.feed(WriterProbed(writer.incarnation, alive=True))

    def reserve(
        self, spec: RequestSpec, prefill: Peer | None, *expected: object, **fields: Any
    ) -> None:
        """Let the router give ``spec`` to this worker."""
        message = ReserveDecode(spec, fields.pop("epoch", 1), prefill, **fields)
        self.hear(R, message, *expected)

    def remote(self, spec: RequestSpec, prefill: Peer = P, epoch: int = 1) -> Ticket:
        """Take ``spec`` in for a remote prefill; return its ticket."""
        reserved = sent(R, DecodeReserved, request_id=spec.request_id)
        self.reserve(spec, prefill, sent(prefill, Ticket), reserved, epoch=epoch)
        return self.messages(Ticket, prefill)[-1]

    def local(self, spec: RequestSpec, *expected: object, **fields: Any) -> None:
        """Take ``spec`` in to be prefilled here."""
        reserved = sent(R, DecodeReserved, request_id=spec.request_id)
        self.reserve(spec, None, reserved, *(expected or (STEP,)), **fields)

    def complete(self, ticket: Ticket, tokens: int, first_id: int = 50) -> None:
        """Let prefill announce all of it at once, and commit."""
        announced = ChunkAnnounced(ticket.request_id, ticket.epoch, sums(ticket, tokens))
        self.hear(P, announced, Like(VerifyBlocks, request_id=ticket.request_id))
        self.hear(P, commit(ticket, first_id))

    def verified(self, *expected: object, bad: tuple[int, ...] = ()) -> None:
        """Answer the last verification."""
        asked = self.last(VerifyBlocks)
        event = BlocksVerified(asked.request_id, asked.epoch, asked.checks, bad, 0.001)
        self.feed(event, *expected)

    def stepped(
        self, tokens: tuple[int | None, ...], *expected: object, borrowed: float = 0.0
    ) -> None:
        """Answer the last step."""
        step = self.last(RunStep)
        assert len(tokens) == len(step.rows)
        results = tuple(None if token is None else Sampled(token) for token in tokens)
        checksums = tuple((7,) * len(checks) for checks in step.seals)
        self.feed(StepFinished(step.step, results, checksums, 0.01, borrowed), *expected)

    def cancel(self, request_id: str, *expected: object, epoch: int = 1) -> None:
        """The router cancels."""
        self.hear(R, CancelWork(request_id, epoch, Reason.CLIENT_CANCELLED), *expected)

    def used(self) -> int:
        """Blocks that a reservation could not get."""
        return self.pool.total - self.pool.available()

    def states(self) -> dict[str, int]:
        """Number of blocks in each state that has any."""
        return {state.name: count for state, count in self.pool.counts().items() if count}


def spec(request_id: str = "r", tokens: int = 6, first: int = 1, **fields: Any) -> RequestSpec:
    """Return a request whose prompt is ``tokens`` consecutive ids."""
    fields.setdefault("stop_token_ids", (EOS,))
    return request(request_id, tuple(range(first, first + tokens)), gateway=G, **fields)


def sums(ticket: Ticket, tokens: int, *, first: int = 0, last: int = 99) -> tuple[BlockSum, ...]:
    """Return checksums for the ticket's blocks ``first..last`` of a sequence of ``tokens``."""
    return tuple(
        BlockSum(pair.logical, pair.generation, min(SIZE, tokens - pair.logical * SIZE), 7)
        for pair in ticket.blocks
        if first <= pair.logical <= last
    )


def commit(ticket: Ticket, first_id: int = 50) -> PrefillCommitted:
    return PrefillCommitted(ticket.request_id, ticket.epoch, first_id)


def run(index: int, *tokens: int, epoch: int = 1, finish: FinishReason | None = None) -> Like:
    """Stands for the chunk with these tokens of request ``r``."""
    wanted = Like(TokenRun, request_id="r", epoch=epoch, index=index, ids=tokens, finish=finish)
    return sent(G, TokenChunk, runs=_Single(wanted))


class _Single(tuple[Any, ...]):
    """A tuple of one pattern."""

    def __new__(cls, pattern: Like) -> _Single:
        return super().__new__(cls, (pattern,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and len(other) == 1 and self[0].matches(other[0])

    def __hash__(self) -> int:
        return 0
