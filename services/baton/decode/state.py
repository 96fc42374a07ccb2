"""What the parts of the decode machine share: pool, sequences, peers, the commands of one event.

Decides one thing: metadata is stored before any message that relies on it (:meth:`State.send`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.blocks import BlockPool
from baton.core.ids import Member, Peer
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.decode.figures import Figures
from baton.decode.io import MarkBlocks
from baton.decode.sequence import Sequence, Stage
from baton.ports.channel import BlockCheck, BlockMark
from baton.ports.driving import CallLedger, Measure, Note, Send
from baton.ports.ledger import AdvanceRequest
from baton.wire.handover import ArenaRef
from baton.wire.messages import AnyMessage, WorkFailed


@dataclass(slots=True)
class State:
    """Shared by the machine, its hand-over and its scheduler; one owner: the machine."""

    me: Peer
    limits: Limits
    pool: BlockPool
    arena: ArenaRef
    block_size: int
    block_bytes: int
    root: bytes
    mixed: bool = False
    """It computes prompts itself also where a prefill worker could."""
    sequences: dict[str, Sequence] = field(default_factory=dict)
    peers: dict[Peer, Member] = field(default_factory=dict)
    commands: list[object] = field(default_factory=list)
    lease: LeaseState = LeaseState.VACANT
    draining: bool = False
    figures: Figures = field(default_factory=Figures)
    in_flight: dict[str, Sequence] = field(default_factory=dict)
    """Sequences in the step that runs now: their blocks are pinned by it."""
    pinned: list[Sequence] = field(default_factory=list)
    """Dropped while their step ran; their blocks are released when it has returned."""

    def emit(self, command: object) -> None:
        self.flush_marks()
        self.commands.append(command)

    def send(self, peer: Peer, message: AnyMessage) -> None:
        """Queue a message; a peer without a link is gone or not there yet, both say so."""
        if peer in self.peers:
            self.emit(Send(peer, message))

    def note(
        self, event: str, seq: Sequence | None = None, level: str = "info", **fields: object
    ) -> None:
        ids = {} if seq is None else {"request_id": seq.spec.request_id, "epoch": seq.epoch}
        self.commands.append(Note(event, {**ids, **fields}, level))

    def measure(self, name: str, value: float = 1.0, **labels: str) -> None:
        self.commands.append(Measure(name, value, labels))

    def recovered(self, seq: Sequence, way: str) -> None:
        """Count what an attempt starts from that is not its request's first."""
        found = seq.cached_tokens
        self.measure("recoveries_total", way=way)
        self.measure("recovered_tokens_total", found, way=way)
        self.measure("recomputed_tokens_total", seq.length - found, way=way)
        self.note("recovered", seq, way=way, found=found, computed_again=seq.length - found)

    def flush_marks(self) -> None:
        """Turn the pool's changes into one command."""
        dirty = self.pool.take_dirty()
        if not dirty:
            return
        marks = []
        for number in dirty:
            block = self.pool.blocks[number]
            marks.append(
                BlockMark(
                    block=number,
                    state=block.state,
                    generation=block.generation,
                    epoch=block.epoch,
                    writer=block.writer,
                    chain=block.chain,
                    checksum=block.checksum,
                )
            )
        self.commands.append(MarkBlocks(tuple(marks)))

    def work_failed(
        self, seq: Sequence, reason: Reason, message: str, *, retryable: bool = True
    ) -> None:
        """Tell the router that this attempt is over here. If it is lost just now, the one that
        adopts the request asks for the attempt and hears that there is none."""
        self.note("attempt_failed", seq, reason=reason, message=message)
        failed = WorkFailed(*seq.key, reason, message, retryable=retryable)
        self.send(seq.router, failed)

    def advance(self, seq: Sequence, target: RequestState) -> None:
        """Have the ledger count that it is as far as that, if this worker may say so."""
        if self.lease is LeaseState.HELD:
            op = AdvanceRequest(seq.spec.request_id, seq.epoch, target, self.me)
            self.emit(CallLedger(op))

    def seal(self, checks: tuple[BlockCheck, ...], checksums: tuple[int, ...]) -> None:
        """Name the blocks that are full by now, so that others find them."""
        for check, checksum in zip(checks, checksums, strict=True):
            self.pool.seal(check.block, check.chain, checksum)

    def live(self, stage: Stage) -> list[Sequence]:
        """Sequences of one stage, oldest first."""
        return sorted(
            (seq for seq in self.sequences.values() if seq.stage is stage),
            key=lambda seq: seq.order,
        )
