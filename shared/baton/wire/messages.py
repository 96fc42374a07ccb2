"""Every message between two Baton processes.

Decides names and fields; who sends what when is told in ``docs/protocol.md``. Messages are noun
phrases, encoded as msgpack maps with a ``type`` tag: unknown fields are ignored, missing fields
without a default refuse the message. The sender's and the addressed incarnation travel in the
frame's header (``baton.wire.frames``), the request's epoch in the message.

``upto`` counts and positions are absolute token positions in prompt + output.

The bounds of numbers are in ``fields.py``, the messages of the hand-over in ``handover.py``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.core.ids import Peer, WorkerRole
from baton.core.outcomes import FinishReason, Outcome, Reason
from baton.core.sampling import SamplingParams
from baton.core.step_times import MICROS_MAX, StepCurve
from baton.wire.fields import (
    ID_BYTES,
    STEP_ROWS_MAX,
    WRITERS_MAX,
    BlockCount,
    BlockNumber,
    Count,
    Epoch,
    MeasuredMs,
    Message,
    Milliseconds,
    RequestId,
    ShortNames,
    TokenId,
    TokenLogprob,
    Turn,
    WorkerId,
    check_ids,
    check_names,
)
from baton.wire.handover import (
    ArenaMapped,
    ArenaOffered,
    ChunkAnnounced,
    PrefillCommitted,
    PrefillFailed,
    Ticket,
    TicketRevoked,
    WriterStopped,
)


class RequestSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A normalised request, stored in the ledger as it is until it is terminal.

    ``prompt`` is little-endian uint32 token ids, which keeps 20,000 tokens at 80 KB and needs no
    list of Python integers on the way.
    """

    request_id: RequestId
    gateway: Peer
    prompt: bytes
    sampling: SamplingParams
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """Most output tokens, >= 1; prompt + max_tokens fits the context (the gateway checked)."""
    deadline_ms: Milliseconds
    """Milliseconds from admission."""
    open_ended: bool = False
    """The client set no limit: the router may lower ``max_tokens`` to what an arena holds."""
    parent_id: str = ""
    """The client-visible id when ``n > 1``."""
    resume_ms: Milliseconds = 0
    """How long it goes on without its gateway; 0: it ends with it."""
    traceparent: str = ""

    def __post_init__(self) -> None:
        check_ids(self.prompt)
        if not self.prompt:
            raise ValueError("the prompt is empty")

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // ID_BYTES


# --- gateway <-> router -------------------------------------------------------------------------


class SubmitRequest(Message, frozen=True):
    """gateway -> router: take this request in, or over from the router that had it. Repeating it
    is harmless (create-or-return)."""

    spec: RequestSpec
    turn: Turn = 1
    begun: bool = False
    """Whether the gateway has heard of an attempt; the fields below say what it knows of it."""
    epoch: Epoch = 1
    """The gateway refuses what is lower."""
    decode: Peer | None = None
    """Who works on it in that epoch."""
    prefill: Peer | None = None
    base: Count = 0
    """Output ids that the attempt of that epoch began with."""
    decode_lost: bool = False
    """The gateway has no link to ``decode``."""
    age_ms: Milliseconds = 0
    """Since its client asked: deadlines count from there."""
    held: Count = 0
    """Output ids that the gateway has."""


class RequestPlaced(Message, frozen=True):
    """router -> gateway: who works on it now. Sent again with each epoch."""

    request_id: RequestId
    epoch: Epoch
    decode: Peer
    prefill: Peer | None = None
    """``None``: decode computes the prompt itself."""
    queued_ms: Milliseconds = 0


class RequestRefused(Message, frozen=True):
    """router -> gateway: nothing was and nothing will be computed for it; from one that leaves
    (``Reason.DRAINING``): not by me."""

    request_id: RequestId
    reason: Reason
    message: str
    retry_after_ms: Milliseconds = 0
    epoch: Epoch = 0
    """It was placed, and no worker took it in: what the gateway has heard of attempts up to this
    one is over. 0: nobody was placed."""


class RequestFailed(Message, frozen=True):
    """router -> gateway: given up; the gateway makes it terminal and tells the client."""

    request_id: RequestId
    epoch: Epoch
    outcome: Outcome


class PoolStatus(Message, frozen=True):
    """router -> gateway, when the link opens and with each change: could a request be served?"""

    serving: bool
    reason: Reason | None = None
    """What is missing, if not."""
    message: str = ""


class RequestMoved(Message, frozen=True):
    """gateway -> router: another router has it since ``turn``; whatever you say of it does not
    count any more. Forget it, and leave its workers alone."""

    request_id: RequestId
    turn: Turn


class RequestLeft(Message, frozen=True):
    """gateway -> router: it has no reader here any more, and this gateway goes away. What runs goes
    on; as with a gateway that is gone somebody else may claim it within its window."""

    request_id: RequestId


class FenceRequest(Message, frozen=True):
    """router -> gateway: from now on refuse every epoch below ``epoch``; say which ids you hold."""

    request_id: RequestId
    epoch: Epoch


class RequestFenced(Message, frozen=True):
    """gateway -> router: done; these output ids are what the client may have seen."""

    request_id: RequestId
    epoch: Epoch
    output: bytes
    """Little-endian uint32 ids, index 0 first."""

    def __post_init__(self) -> None:
        check_ids(self.output)


class RequestEnded(Message, frozen=True):
    """gateway -> router and every worker that has it: the terminal outcome; drop it."""

    request_id: RequestId
    epoch: Epoch
    outcome: Outcome
    early: bool = False
    """The gateway had heard of no attempt: the ledger may have got the request's record after its
    end, and then it is the router's to end that too."""
    ttft_ms: MeasuredMs | None = None
    """From its submission to the first token, if there was one: what a router's forecast is held
    against."""


# --- router <-> workers -------------------------------------------------------------------------


class ReserveDecode(Message, frozen=True):
    """router -> decode: take this request in; issue a ticket to ``prefill``, or prefill locally."""

    spec: RequestSpec
    epoch: Epoch
    prefill: Peer | None = None
    output: bytes = b""
    """Ids already emitted by earlier epochs (uint32 LE): forced, never sampled again."""
    source: WorkerId = ""
    """Worker whose arena has this request's KV, found there by the blocks' names; empty: none is
    known. The receiver's own ``worker_id`` says: your KV is there."""
    turn: Turn = 1
    """Of the sending router; the worker obeys no lower one from then on."""
    alone: bool = False
    """It is suspected of ending workers: its steps are its own."""

    def __post_init__(self) -> None:
        check_ids(self.output)


class DecodeReserved(Message, frozen=True):
    """decode -> router: blocks are reserved (and the ticket, if any, is on its way); what could be
    imported from ``ReserveDecode.source`` is here, so nobody else need keep it."""

    request_id: RequestId
    epoch: Epoch
    cached_tokens: Count


class AssignPrefill(Message, frozen=True):
    """router -> prefill: compute this prompt once ``decode`` sends its ticket."""

    spec: RequestSpec
    epoch: Epoch
    decode: Peer
    output: bytes = b""
    turn: Turn = 1
    alone: bool = False

    def __post_init__(self) -> None:
        check_ids(self.output)


class WorkRefused(Message, frozen=True):
    """worker -> router: this placement is not possible; nothing is held for it here."""

    request_id: RequestId
    epoch: Epoch
    reason: Reason
    message: str = ""


class WorkFailed(Message, frozen=True):
    """worker -> router: the attempt is over without a result; nothing is held for it here."""

    request_id: RequestId
    epoch: Epoch
    reason: Reason
    message: str = ""
    retryable: bool = True


class MoveOffered(Message, frozen=True):
    """decode -> router: this worker drains and another one may go on with this request. It goes on
    here until ``CancelWork`` with ``Reason.MOVED``, which stops it and keeps its blocks, so that
    they can be imported; the next ``CancelWork`` releases them."""

    request_id: RequestId
    epoch: Epoch
    tokens: Count
    """Prompt and output so far: what its next place must hold."""


class CancelWork(Message, frozen=True):
    """router -> worker: drop this attempt (any epoch <= ``epoch``) and release what it holds. Not
    obeyed from a router with a lower turn than the worker has heard of.

    With ``Reason.MOVED`` decode only stops it: its blocks are kept until the next one."""

    request_id: RequestId
    epoch: Epoch
    reason: Reason
    turn: Turn = 1


class AttemptId(msgspec.Struct, frozen=True, array_like=True):
    """One attempt at one request."""

    request_id: RequestId
    epoch: Epoch


class LastStep(Message, frozen=True):
    """worker -> router, when their link opens: ``peer``, who had this worker's name before, is
    over, and these attempts had rows in the step that it left. Nobody else is to blame."""

    peer: Peer
    attempts: Annotated[tuple[AttemptId, ...], Meta(max_length=STEP_ROWS_MAX)]


class WorkAdopted(Message, frozen=True):
    """router -> decode and prefill: this attempt is mine since ``turn``; report to me. Its tokens
    go to ``gateway``, from index ``held`` on.

    Decode answers with :class:`DecodeReserved`, or with :class:`WorkFailed` if it has no such
    attempt. Prefill, which forgets what it has handed over, answers nothing."""

    request_id: RequestId
    epoch: Epoch
    turn: Turn
    gateway: Peer
    held: Count = 0


class WorkAsked(Message, frozen=True):
    """router -> decode: do you still have this attempt? Asked while the request's gateway is out of
    the router's sight: who ended it may be dead, and nobody left to say so.

    Decode answers with :class:`WorkFailed` if it has no such attempt, or another router answers for
    it; otherwise nothing, and nothing changes."""

    request_id: RequestId
    epoch: Epoch
    turn: Turn = 1


class WorkerStatus(Message, frozen=True):
    """worker -> router, with every heartbeat and after each change that matters to placement.

    Routers compute with these figures, so what no worker can mean is no message: it changes
    nothing, as if it had not come."""

    accepting: bool
    """False while draining, suspect or hung."""
    running: Count = 0
    waiting: Count = 0
    joining: Count = 0
    """Of decode: those of them whose prompt a prefill worker computes."""
    queued_tokens: Count = 0
    blocks_total: BlockCount = 0
    blocks_free: BlockCount = 0
    """FREE plus CACHED without a hold: what a reservation could get at once."""
    block_size: Annotated[int, Meta(ge=0, le=2**16)] = 0
    writers: Annotated[tuple[Peer, ...], Meta(max_length=WRITERS_MAX)] = ()
    """Of decode: prefill incarnations whose lock on its arena was seen; others get no ticket."""
    step: Count = 0
    step_age_ms: Milliseconds = 0
    """Age of the step in flight, 0 if none."""
    curve: StepCurve = StepCurve()
    """What it has learned of how long its steps take."""
    curve_borrowed: StepCurve = StepCurve()
    """And with the cores of other workers, which it borrows while those compute nothing; empty: it
    has not borrowed any."""
    chunk_tokens: Count = 0
    """Most prompt tokens that it computes in one step."""
    context_tokens: Count = 0
    """Of decode: tokens that the running sequences attend to, all together."""
    growth_blocks: Count = 0
    """Of decode: blocks that what it has will probably want beside those it has."""
    handover_us: Annotated[int, Meta(ge=0, le=MICROS_MAX)] = 0
    """Of decode: from the end of prefill's last step to the sequence that runs; 0 if unknown."""
    mixed: bool = False
    """Of decode: it may compute a prompt itself, also where a prefill worker could."""
    blocks_told: Count = 0
    """Of decode: number of the last :class:`BlocksChanged`."""

    def __post_init__(self) -> None:
        if self.blocks_free > self.blocks_total:
            raise ValueError(f"{self.blocks_free} of {self.blocks_total} blocks are free")
        if self.joining > self.waiting:
            raise ValueError(f"{self.joining} of {self.waiting} that wait are handed over")
        self.curve.verify()
        self.curve_borrowed.verify()


class BlocksChanged(Message, frozen=True):
    """decode -> every router: which blocks its prefix cache has that it had not, and has no more.

    Numbered from 1 in each incarnation. A router that misses a number knows nothing any more and
    asks for all (:class:`BlocksWanted`)."""

    number: Annotated[int, Meta(ge=1, le=2**53)]
    stored: ShortNames = b""
    removed: ShortNames = b""
    too_many: bool = False
    """More than a message holds: they are not told, all has to be asked for."""

    def __post_init__(self) -> None:
        check_names(self.stored)
        check_names(self.removed)


class BlocksWanted(Message, frozen=True):
    """router -> decode: which blocks are in your prefix cache, from ``start`` on?"""

    start: BlockNumber = 0


class BlocksListed(Message, frozen=True):
    """decode -> router: what is in the cache of one page of blocks, as of ``number``. Later changes
    are told on the same link behind it, so pages of different times make one whole."""

    number: Count
    """Of the last :class:`BlocksChanged` before it."""
    start: BlockNumber
    stored: ShortNames = b""
    next: BlockNumber | None = None
    """Where the next page starts; ``None``: this is the last."""

    def __post_init__(self) -> None:
        check_names(self.stored)


# --- decode -> gateway: tokens ------------------------------------------------------------------


class TokenRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """Consecutive output tokens of one request."""

    request_id: RequestId
    epoch: Epoch
    index: Count
    """Output index of ``ids[0]``."""
    ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """Empty, or one per id."""
    finish: FinishReason | None = None
    """Set with the last token."""
    cached_tokens: Count = 0
    """Prompt tokens nobody computed in this attempt; sent with index 0."""


class TokenChunk(Message, frozen=True):
    """decode -> gateway: what one step produced for that gateway's requests."""

    runs: tuple[TokenRun, ...]


class TokensBounded(Message, frozen=True):
    """gateway -> decode: nobody reads this; stop when there are ``upto`` output ids, and go on when
    a higher bound comes."""

    request_id: RequestId
    epoch: Epoch
    upto: Count


class RequestResumed(Message, frozen=True):
    """router or decode -> gateway: another gateway serves its client since ``turn``."""

    request_id: RequestId
    turn: Turn


class TokensWanted(Message, frozen=True):
    """gateway -> decode: send again from ``index`` (there is a gap below what arrived)."""

    request_id: RequestId
    epoch: Epoch
    index: Count


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


# --- anybody -> prefill, decode: asked by the CLI, and by a router where it may -------------------


class ChangeRole(Message, frozen=True):
    """Take that role from now on. Repeating it is harmless."""

    role: WorkerRole
    settle_ms: Milliseconds = 0
    """Only if no worker of the pool has changed its own for so long."""


class RoleAnswered(Message, frozen=True):
    """The answer to :class:`ChangeRole`: it is done, or begins now; or why not."""

    role: WorkerRole
    refused: str = ""


AnyMessage = (
    SubmitRequest
    | RequestPlaced
    | RequestRefused
    | RequestFailed
    | PoolStatus
    | RequestMoved
    | RequestLeft
    | FenceRequest
    | RequestFenced
    | RequestEnded
    | ReserveDecode
    | DecodeReserved
    | AssignPrefill
    | WorkRefused
    | WorkFailed
    | MoveOffered
    | CancelWork
    | LastStep
    | WorkAdopted
    | WorkAsked
    | WorkerStatus
    | BlocksChanged
    | BlocksWanted
    | BlocksListed
    | ArenaOffered
    | ArenaMapped
    | Ticket
    | ChunkAnnounced
    | PrefillCommitted
    | PrefillFailed
    | TicketRevoked
    | WriterStopped
    | TokenChunk
    | TokensBounded
    | TokensWanted
    | RequestResumed
    | ReadReport
    | Report
    | ChangeRole
    | RoleAnswered
)
