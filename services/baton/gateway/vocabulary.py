"""Events and commands only the gateway knows, between its machine and its HTTP layer.

The HTTP layer turns client requests into :class:`Submitted` and executes :class:`Deliver`,
:class:`End`, :class:`ReportsReady` and :class:`LeaveClients`; everything else is shared with the
other services.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from baton.core.events import DrainRequested, LeaseChanged, RestartRequested, TimePassed
from baton.core.outcomes import FinishReason, Outcome, Reason
from baton.ports.driving import CallLedger, Exit, LedgerAnswered, Measure, Note, Send
from baton.ports.transport import TransportEvent
from baton.wire.fields import TokenLogprob
from baton.wire.messages import RequestSpec

# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """A client asked for this generation; one choice of an ``n > 1`` request each."""

    spec: RequestSpec
    resumable_id: str = ""
    """Of the resumable request that it is a choice of."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody wants the rest: cancelled, disconnected, or cut off as a slow reader."""

    request_id: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class StopMatched:
    """A stop string is complete in the text; the answer ends there."""

    request_id: str
    tokens_used: int
    """Output tokens up to and including the one that completed the stop string."""


@dataclass(frozen=True, slots=True)
class ResumableWanted:
    """A new request is to outlive its connection; answered by :class:`Ready` under its own id, or
    under that of the one that its idempotency key names, or by :class:`NotResumed`."""

    resumable_id: str
    token: str
    """Digest of the resume token's secret."""
    owner: str
    """Digest of the API key, "" without keys."""
    choices: tuple[str, ...]
    """Request ids of its choices."""
    recipe: bytes
    window_ms: int
    repeat: str = ""
    """Digest of the idempotency key, "" without one."""
    body: str = ""
    """Digest of what was asked for with it."""


@dataclass(frozen=True, slots=True)
class ResumeWanted:
    """A client comes back; answered by :class:`Ready` or :class:`NotResumed`."""

    claim: str
    resumable_id: str
    token: str
    owner: str


@dataclass(frozen=True, slots=True)
class ReaderGone:
    """Nobody reads a resumable request any more: its window begins."""

    resumable_id: str


@dataclass(frozen=True, slots=True)
class ReaderBack:
    """Somebody reads it, and has to be told everything from the first id on."""

    resumable_id: str
    choices: tuple[str, ...]
    """Told that they are over here, if the request has left meanwhile."""


@dataclass(frozen=True, slots=True)
class CancelWanted:
    """Its client does not want it any more."""

    resumable_id: str


@dataclass(frozen=True, slots=True)
class ReportsWanted:
    """Collect a report from every linked process; answered by :class:`ReportsReady`."""

    kind: str
    token: int


@dataclass(frozen=True, slots=True)
class ClientsLeft:
    """The last client connection has closed, after :class:`LeaveClients`."""


# --- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give these output ids to the client's stream. Never repeated, never out of order."""

    request_id: str
    index: int
    """Output index of ``ids[0]``."""
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    """Set with the last ids when the worker ended the answer; :class:`End` follows."""
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """The one terminal outcome; nothing is delivered for this request afterwards."""

    request_id: str
    outcome: Outcome
    retry_after_ms: int = 0
    """With a refusal: when to try again, 0 if nobody said."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A resumable request is this gateway's. It must be submitted or read, or left unread, before
    anything else happens."""

    claim: str
    resumable_id: str
    recipe: bytes
    window_ms: int
    submit: bool
    """Its choices are to be submitted; else it is here already, and wants a reader."""


class Unresumable(StrEnum):
    """Why a request is not given to a client."""

    UNKNOWN = "unknown"
    FOREIGN = "foreign"
    OVER = "over"
    DIFFERS = "differs"
    """The idempotency key was used for another request."""
    REFUSED = "refused"
    """Not now: the reason says why."""


@dataclass(frozen=True, slots=True)
class NotResumed:
    """A resumable request is not given; nothing was done."""

    claim: str
    why: Unresumable
    reason: Reason | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class ReportsReady:
    """What came in until all had answered or the wait was over: worker id to body."""

    token: int
    bodies: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class LeaveClients:
    """Take no new connections (others take them), answer what came on those there are, and close
    each when its answer is complete; answered by :class:`ClientsLeft`."""


Event = (
    Submitted
    | ClientGone
    | ClientsLeft
    | StopMatched
    | ResumableWanted
    | ResumeWanted
    | ReaderGone
    | ReaderBack
    | CancelWanted
    | ReportsWanted
    | TransportEvent
    | LedgerAnswered
    | TimePassed
    | LeaseChanged
    | DrainRequested
    | RestartRequested
)
Told = Deliver | End | Ready | NotResumed | ReportsReady
"""What the HTTP layer executes."""
Command = Send | CallLedger | Note | Measure | Exit | Told | LeaveClients
