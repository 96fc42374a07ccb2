"""The ledger: leases and request records, one transition a call.

Ops are values, so that machines can ask for them (a command) and get the answer (an event). The
adapters (Redis with one Lua script per op; the simulator's) are held to the same conformance tests.

Rules every adapter keeps (ADR 0004):

- Every op is idempotent by (request, epoch, operation id): repeating one whose answer was lost
  returns the same answer and changes nothing. The operation id is the op's content (:func:`op_id`).
- Epochs compare and set: an op with an epoch below the record's changes nothing and answers
  :class:`Conflict` with the record's epoch and state.
- A terminal record never changes; it is kept for ``terminal_ttl_ms``.
- Lease deadlines are scores read with the ledger's own clock, never key TTLs.
- A new or empty ledger is *in rebuild* for one lease TTL; nobody is declared lost meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, assert_never

import msgspec

from baton.core.ids import Member, Peer
from baton.core.lifecycles import REQUEST_MOVES, RequestState
from baton.core.outcomes import Outcome
from baton.wire.messages import RequestSpec

R = RequestState


class Op(msgspec.Struct, frozen=True, tag=True):
    """Base of all transitions."""


class AcquireLease(Op, frozen=True):
    """Register this incarnation and hold its lease. A newer incarnation of the same worker_id
    replaces the older one, whose renewals answer :class:`LeaseLost` from then on.

    Newer is who acquired later, whatever the numbers. :class:`LeaseLost` in answer to an acquire
    means: a newer incarnation has replaced this one for good."""

    member: Member
    ttl_ms: int


class RenewLease(Op, frozen=True):
    """Prolong the lease, and sweep: expired leases become lost."""

    peer: Peer
    ttl_ms: int


class ReleaseLease(Op, frozen=True):
    """Leave the registry in good order; answered with :class:`LeaseLost`, as is its repetition."""

    peer: Peer


class FindOrphans(Op, frozen=True):
    """Sweep, and name live requests that somebody without a lease works on and nobody with one but
    ``peer`` and ``workers``, those that expire first first; nobody's while the ledger is in
    rebuild. Answered with :class:`Orphans`."""

    peer: Peer
    ttl_ms: int
    count_max: int
    workers: tuple[Peer, ...] = ()
    """Prefill and decode processes: they see to no request's end."""


class FindOwned(Op, frozen=True):
    """Name live requests that ``peer`` works on, those that expire first first: it says itself
    which of them it does not know. Answered with :class:`Owned`."""

    peer: Peer
    count_max: int


class LeaveRole(Op, frozen=True):
    """``peer`` gives its role up for another one: one worker of a pool at a time (who was granted
    that has ``hold_ms`` to be gone), and only if one of ``others``, which do the same, holds a
    lease (nobody named: none is needed). Where another has done so less than ``settle_ms`` ago it
    is refused as well. Answered with :class:`Leaving`."""

    peer: Peer
    hold_ms: int
    others: tuple[Peer, ...] = ()
    settle_ms: int = 0


class AdmitRequest(Op, frozen=True):
    """RECEIVED -> ADMITTED at epoch 1, or the record that is there (create-or-return).

    :class:`Done` with the record's epoch and state if it is live and this router's (so it may go
    on), :class:`Conflict` if it is another router's, or terminal (with the outcome)."""

    spec: RequestSpec
    router: Peer


class AdoptRequest(Op, frozen=True):
    """A live record changes its router (and, if the spec names another, its gateway), and nothing
    else: answered with :class:`Adopted`, what the record says.

    ``turn`` orders routers: the gateway raises it each time it gives the request to another one. A
    record that has seen a higher turn, or this turn by another router, answers :class:`Conflict`.

    Where there is no record, or one with a lower epoch (the ledger was emptied, or lost writes),
    it becomes what the caller knows: ``epoch``, placed at ``decode`` and ``prefill`` if there is a
    decode, admitted if not. So an epoch never goes back."""

    spec: RequestSpec
    router: Peer
    turn: int
    epoch: int
    decode: Peer | None = None
    prefill: Peer | None = None


class PlaceRequest(Op, frozen=True):
    """ADMITTED -> PLACED; counts the attempt before work starts. Only by the record's router; to
    place again (refused by decode, pre-empted) :class:`RetryRequest` comes first."""

    request_id: str
    epoch: int
    router: Peer
    decode: Peer
    prefill: Peer | None


class AdvanceRequest(Op, frozen=True):
    """To PREFILLING, COMMITTED or DECODING, by the worker that does it: the record's decode or
    prefill incarnation, anybody else gets :class:`Conflict`. So does an illegal move."""

    request_id: str
    epoch: int
    state: RequestState
    by: Peer


class RetryRequest(Op, frozen=True):
    """Any live state at ``epoch`` -> ADMITTED at ``epoch + 1``: its owner is lost. Only by the
    record's router. ``failures`` is kept for whoever adopts the request later."""

    request_id: str
    epoch: int
    router: Peer
    failures: int = 0


class EndRequest(Op, frozen=True):
    """To the terminal state of ``outcome``: the one compare-and-set that ends a request. Only by
    one of the record's owners (gateway, router, decode, prefill), or by a gateway or router with a
    higher ``turn`` than the record's (which is behind, then); by anybody if neither its gateway nor
    its router holds a lease."""

    request_id: str
    epoch: int
    outcome: Outcome
    by: Peer
    turn: int = 0


class ResumableRecord(Op, frozen=True):
    """A client's request that asked to outlive its connection, as the ledger keeps it: one record
    for all its choices."""

    resumable_id: str
    gateway: Peer
    token: str
    """Digest of the token's secret; the secret itself is the client's alone."""
    owner: str
    """Digest of the API key that may resume it, "" where there are no keys."""
    requests: tuple[str, ...]
    """Request ids of the choices."""
    recipe: bytes
    """What its gateway needs beside the token ids; opaque here."""
    window_ms: int
    life_ms: int
    """The record goes after this, closed or not."""
    repeat: str = ""
    """Digest of the client's idempotency key and its owner."""
    body: str = ""
    """Digest of what was asked for with that key."""


class OpenResumable(ResumableRecord, frozen=True):
    """Make the record. :class:`Resumable` if it is new (or this very opening, repeated),
    :class:`Repeated` if ``repeat`` names one that is there, unless ``anew``: then this one takes
    its place."""

    anew: bool = False


class ClaimResumable(Op, frozen=True):
    """``gateway`` serves its client from now on: the turn grows, with the time since the opening,
    so that a ledger which lost claims gives none of their turns again. By whoever shows the token,
    or the idempotency key (then ``new_token`` replaces the token), and is its owner.

    :class:`Resumable`, or :class:`Denied`. ``again``: its requests are over and their ids are lost;
    they are made again under ids of their own. ``claim`` tells a repetition from another claim."""

    resumable_id: str
    gateway: Peer
    claim: str
    owner: str
    token: str = ""
    repeat: str = ""
    new_token: str = ""
    again: bool = False


class RestoreResumable(ResumableRecord, frozen=True, kw_only=True):
    """Where the ledger has no record of what ``gateway`` serves (it was emptied), or one from
    before its turn (it lost writes), make it what that gateway knows. A record that is closed, or
    has seen this turn or a higher one, stays as it is; so does an idempotency key that names
    another one. Turns go on from ``turn``. :class:`Resumable`, as it stands."""

    turn: int
    again: int


class Closing(StrEnum):
    """How a resumable was closed."""

    KEPT = "kept"
    """It is complete: its answer is there, or can be made again."""
    FAILED = "failed"
    """Its answer is that it failed."""
    REFUSED = "refused"
    """Nothing was computed: it is tried again for who claims it; its idempotency key is free."""
    OVER = "over"
    """Nobody wants it any more, and its idempotency key is free."""

    @property
    def keeps(self) -> bool:
        """Whether there is an answer to come back to."""
        return self in (Closing.KEPT, Closing.FAILED)


class CloseResumable(Op, frozen=True):
    """Every choice has its outcome: ``answer`` is kept for ``keep_ms``. :class:`Resumable`, or
    :class:`Denied` if it is unknown, or was claimed since (a complete answer is taken all the same:
    it is the same whoever says so; what else became of it is known to its last gateway only: who
    has lost it may have failed it for having lost everybody).
    """

    resumable_id: str
    turn: int
    keep_ms: int
    answer: bytes = b""
    closed: Closing = Closing.KEPT
    repeat: str = ""


def op_id(op: PlaceRequest | AdvanceRequest | RetryRequest) -> str:
    """Return what tells a repetition from another op on the same request and epoch."""
    match op:
        case PlaceRequest():
            return f"place:{op.router}:{op.decode}:{op.prefill or ''}"
        case AdvanceRequest():
            return f"advance:{op.state}:{op.by}"
        case RetryRequest():
            return f"retry:{op.router}"
        case _:
            assert_never(op)


#: What a worker may say of its own work. Going back within an epoch is not among it: the way back
#: would look like a repetition of the way there.
ADVANCES = frozenset({R.PREFILLING, R.COMMITTED, R.DECODING})


RequestOp = AdmitRequest | AdoptRequest | PlaceRequest | AdvanceRequest | RetryRequest | EndRequest


def target_of(op: RequestOp) -> R:
    """Return the state that ``op`` moves a request to (an adoption: if it makes the record)."""
    match op:
        case AdmitRequest() | RetryRequest():
            return R.ADMITTED
        case AdoptRequest(decode=decode):
            return R.ADMITTED if decode is None else R.PLACED
        case PlaceRequest():
            return R.PLACED
        case AdvanceRequest(state=state):
            return state
        case EndRequest(outcome=outcome):
            return R(outcome.ending.value)
        case _:
            assert_never(op)


def sources_of(op: RequestOp) -> frozenset[RequestState]:
    """Return the states from which ``op`` may move a request: REQUEST_MOVES, and for this op."""
    target = target_of(op)
    legal = frozenset(source for source, moves in REQUEST_MOVES.items() if target in moves)
    match op:
        case PlaceRequest():
            # An epoch binds one decode incarnation: from a later state, a retry comes first.
            return legal & {R.ADMITTED}
        case AdvanceRequest():
            return legal if target in ADVANCES else frozenset()
        case _:
            return legal


AnyOp = (
    AcquireLease
    | RenewLease
    | ReleaseLease
    | FindOrphans
    | FindOwned
    | LeaveRole
    | RequestOp
    | OpenResumable
    | ClaimResumable
    | RestoreResumable
    | CloseResumable
)


@dataclass(frozen=True, slots=True)
class LeaseHeld:
    """Answer to acquire and renew."""

    ledger_id: str
    """Random; another one means another (or an emptied) ledger."""
    rebuilding: bool
    members: tuple[Member, ...]
    """Every process whose lease is held now, the caller included."""
    lost: tuple[Peer, ...] = ()
    """Incarnations this very call found expired."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The lease is not this incarnation's any more (expired and swept, or replaced)."""

    ledger_id: str


@dataclass(frozen=True, slots=True)
class Orphans:
    """Live requests that nobody sees to but whoever asked, if he does."""

    windows_ms: Mapping[str, int]
    """By request id: for how long from now on its client may come back."""


@dataclass(frozen=True, slots=True)
class Owned:
    """Live requests whose record names the process that asks."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leaving:
    """Whether the caller may leave its role."""

    granted: bool
    by: Peer | None = None
    """Refused: who leaves its own, or has a short time ago; ``None``: no other is there."""


@dataclass(frozen=True, slots=True)
class Done:
    """The transition is in effect (now, or since an earlier identical call)."""

    epoch: int
    state: RequestState
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Adopted:
    """The record is this router's; this is what it says."""

    epoch: int
    state: RequestState
    attempts: int
    failures: int
    """Attempts in a row that failed without progress, when it was last retried."""
    decode: Peer | None
    prefill: Peer | None


@dataclass(frozen=True, slots=True)
class Resumable:
    """The record as it stands after the op."""

    turn: int
    """0 when it was opened; grows with each claim."""
    former: int
    """The turn before that."""
    again: int
    """The turn in which its requests were made again, 0: never."""
    window_ms: int
    repeat: str
    requests: tuple[str, ...]
    recipe: bytes
    closed: bool = False
    answer: bytes = b""
    """What was kept when it was closed."""
    body: str = ""
    """What was asked for with ``repeat``, as a digest."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """The idempotency key is in use."""

    resumable_id: str
    same: bool
    """Whether the same was asked for with it."""


class Denial(StrEnum):
    """Why a resumable is not given."""

    UNKNOWN = "unknown"
    """There is none (any more), or the secret is wrong."""
    FOREIGN = "foreign"
    """It is another API key's."""
    OVER = "over"
    """It was cancelled, or nobody came back within its window."""
    CLAIMED = "claimed"
    """Another gateway serves it now."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Nothing changed."""

    denial: Denial


@dataclass(frozen=True, slots=True)
class Conflict:
    """Nothing changed; this is what the record says. ``state`` is ``None``: no such record."""

    epoch: int
    state: RequestState | None
    outcome: Outcome | None = None
    turn: int = field(default=0, compare=False)
    """Of its router: who has a lower one has lost the request to another router or gateway."""


LeaseReply = LeaseHeld | LeaseLost | Orphans | Owned | Leaving
Reply = LeaseReply | Done | Adopted | Conflict | Resumable | Repeated | Denied


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The ledger did not answer. The transition may or may not be in effect: repeat it."""

    reason: str


class Ledger(Protocol):
    """One per process; one pipelining writer behind it."""

    def call(self, op: AnyOp, done: Callable[[Reply | Unavailable], None]) -> None:
        """Queue ``op``. ``done`` is called once, on the loop's thread, never from within
        ``call``; calls are executed in the order they were made."""
        ...

    async def close(self) -> None:
        """Wait for what is in flight (at most ``ledger_timeout_ms``) and close the connection."""
        ...
