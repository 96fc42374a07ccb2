"""Every message between two Baton processes.

Decides names and fields; who sends what when is told in ``docs/protocol.md``. Messages are noun
phrases, encoded as msgpack maps with a ``type`` tag: unknown fields are ignored, missing fields
without a default refuse the message. The sender's and the addressed incarnation travel in the
frame's header (``baton.wire.frames``), the request's epoch in the message.

``upto`` counts and positions are absolute token positions in prompt + output.
"""

from __future__ import annotations

import msgspec

from baton.core.ids import Peer
from baton.core.outcomes import FinishReason, Outcome, Reason
from baton.core.sampling import SamplingParams


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True):
    """Base of all messages; the tag is the class name."""


class RequestSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A normalised request, stored in the ledger as it is until it is terminal.

    ``prompt`` is little-endian uint32 token ids, which keeps 20,000 tokens at 80 KB and needs no
    list of Python integers on the way.
    """

    request_id: str
    gateway: Peer
    prompt: bytes
    sampling: SamplingParams
    max_tokens: int
    """Most output tokens, >= 1; prompt + max_tokens fits the context (the gateway checked)."""
    deadline_ms: int
    """Milliseconds from admission."""
    open_ended: bool = False
    """The client set no limit: the router may lower ``max_tokens`` to what an arena holds."""
    parent_id: str = ""
    """The client-visible id when ``n > 1``."""
    traceparent: str = ""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one emitted token and of the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# --- gateway <-> router -------------------------------------------------------------------------


class SubmitRequest(Message, frozen=True):
    """gateway -> router: take this request in. Repeating it is harmless (create-or-return)."""

    spec: RequestSpec


class RequestPlaced(Message, frozen=True):
    """router -> gateway: who works on it now. Sent again with each epoch."""

    request_id: str
    epoch: int
    decode: Peer
    prefill: Peer | None = None
    """``None``: decode computes the prompt itself."""
    queued_ms: int = 0


class RequestRefused(Message, frozen=True):
    """router -> gateway: nothing was and nothing will be computed for it."""

    request_id: str
    reason: Reason
    message: str
    retry_after_ms: int = 0


class RequestFailed(Message, frozen=True):
    """router -> gateway: given up; the gateway makes it terminal and tells the client."""

    request_id: str
    epoch: int
    outcome: Outcome


class FenceRequest(Message, frozen=True):
    """router -> gateway: from now on refuse every epoch below ``epoch``; say which ids you hold."""

    request_id: str
    epoch: int


class RequestFenced(Message, frozen=True):
    """gateway -> router: done; these output ids are what the client may have seen."""

    request_id: str
    epoch: int
    output: bytes
    """Little-endian uint32 ids, index 0 first."""


class RequestEnded(Message, frozen=True):
    """gateway -> router and every worker that has it: the terminal outcome; drop it."""

    request_id: str
    epoch: int
    outcome: Outcome


# --- router <-> workers -------------------------------------------------------------------------


class ReserveDecode(Message, frozen=True):
    """router -> decode: take this request in; issue a ticket to ``prefill``, or prefill locally."""

    spec: RequestSpec
    epoch: int
    prefill: Peer | None = None
    output: bytes = b""
    """Ids already emitted by earlier epochs (uint32 LE): forced, never sampled again."""


class DecodeReserved(Message, frozen=True):
    """decode -> router: blocks are reserved (and the ticket, if any, is on its way)."""

    request_id: str
    epoch: int
    cached_tokens: int


class AssignPrefill(Message, frozen=True):
    """router -> prefill: compute this prompt once ``decode`` sends its ticket."""

    spec: RequestSpec
    epoch: int
    decode: Peer
    output: bytes = b""


class WorkRefused(Message, frozen=True):
    """worker -> router: this placement is not possible; nothing is held for it here."""

    request_id: str
    epoch: int
    reason: Reason
    message: str = ""


class WorkFailed(Message, frozen=True):
    """worker -> router: the attempt is over without a result; nothing is held for it here."""

    request_id: str
    epoch: int
    reason: Reason
    message: str = ""
    retryable: bool = True


class CancelWork(Message, frozen=True):
    """router -> worker: drop this attempt (any epoch <= ``epoch``) and release what it holds."""

    request_id: str
    epoch: int
    reason: Reason


class WorkerStatus(Message, frozen=True):
    """worker -> router, with every heartbeat and after each change that matters to placement."""

    accepting: bool
    """False while draining, suspect or hung."""
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    """FREE plus CACHED without a hold: what a reservation could get at once."""
    block_size: int = 0
    step: int = 0
    step_age_ms: int = 0
    """Age of the step in flight, 0 if none."""


# --- decode <-> prefill: the hand-over ----------------------------------------------------------


class ArenaRef(msgspec.Struct, frozen=True):
    """Names one arena beyond doubt: a path may be reused, an inode with a file id may not."""

    path: str
    device: int
    inode: int
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

    logical: int
    block: int
    generation: int


class Ticket(Message, frozen=True):
    """decode -> prefill: permission to fill ``blocks`` of ``arena`` for (request, epoch)."""

    request_id: str
    epoch: int
    arena: ArenaRef
    blocks: tuple[TicketBlock, ...]
    """To be written: every logical block from ``cached_tokens`` on."""
    prefix: tuple[TicketBlock, ...] = ()
    """Already filled, to be read in place; pinned until the writer stopped."""
    cached_tokens: int = 0


class BlockSum(msgspec.Struct, frozen=True, array_like=True):
    """Checksum of one block's filled tokens (``baton.channel.checksum``)."""

    logical: int
    generation: int
    tokens: int
    """Filled tokens of the block, 1..block_size."""
    checksum: int


class ChunkAnnounced(Message, frozen=True):
    """prefill -> decode: these blocks are filled and will never be written again."""

    request_id: str
    epoch: int
    sums: tuple[BlockSum, ...]


class PrefillCommitted(Message, frozen=True):
    """prefill -> decode: the ticket's blocks are complete. Says too: I store there no more."""

    request_id: str
    epoch: int
    sums: tuple[BlockSum, ...]
    """Blocks not announced before, the partly filled last one included."""
    first_id: int
    first_logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    prefill_ms: float = 0.0
    last_write_ns: int = 0
    """CLOCK_BOOTTIME of the last store into the arena: only to measure the hand-over."""


class PrefillFailed(Message, frozen=True):
    """prefill -> decode: the attempt is over. Says too: I store there no more."""

    request_id: str
    epoch: int
    reason: Reason
    message: str = ""
    retryable: bool = True


class TicketRevoked(Message, frozen=True):
    """decode -> prefill: stop at the next chunk boundary and say so with ``WriterStopped``."""

    request_id: str
    epoch: int


class WriterStopped(Message, frozen=True):
    """prefill -> decode: no thread, pool or queue of mine will touch that ticket's blocks again."""

    request_id: str
    epoch: int


# --- workers -> gateway: tokens -----------------------------------------------------------------


class TokenRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """Consecutive output tokens of one request."""

    request_id: str
    epoch: int
    index: int
    """Output index of ``ids[0]``."""
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """Empty, or one per id."""
    finish: FinishReason | None = None
    """Set with the last token."""
    cached_tokens: int = 0
    """Prompt tokens nobody computed in this attempt; sent with index 0."""


class TokenChunk(Message, frozen=True):
    """worker -> gateway: what one step produced for that gateway's requests."""

    runs: tuple[TokenRun, ...]


class TokensWanted(Message, frozen=True):
    """gateway -> worker: send again from ``index`` (there is a gap below what arrived)."""

    request_id: str
    epoch: int
    index: int


# --- anybody: asked by the CLI and by the gateway's /metrics ------------------------------------


class ReadReport(Message, frozen=True):
    """Ask a process for its ``status`` (JSON) or ``metrics`` (Prometheus text)."""

    kind: str
    token: int


class Report(Message, frozen=True):
    """The answer to :class:`ReadReport`, matched by ``token``."""

    kind: str
    token: int
    body: bytes


AnyMessage = (
    SubmitRequest
    | RequestPlaced
    | RequestRefused
    | RequestFailed
    | FenceRequest
    | RequestFenced
    | RequestEnded
    | ReserveDecode
    | DecodeReserved
    | AssignPrefill
    | WorkRefused
    | WorkFailed
    | CancelWork
    | WorkerStatus
    | ArenaOffered
    | ArenaMapped
    | Ticket
    | ChunkAnnounced
    | PrefillCommitted
    | PrefillFailed
    | TicketRevoked
    | WriterStopped
    | TokenChunk
    | TokensWanted
    | ReadReport
    | Report
)
