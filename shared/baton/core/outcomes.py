"""How a request ends: exactly one outcome, always told to the client.

Decides the vocabulary of ends and refusals; the gateway maps them to HTTP statuses.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why generation was complete (OpenAI's words)."""

    STOP = "stop"
    LENGTH = "length"


class Ending(StrEnum):
    """The terminal states of a request."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REFUSED = "refused"


class Reason(StrEnum):
    """Why a request was refused, failed or cancelled: a stable code clients may match."""

    # refusals: nothing was computed, repeating is safe
    OVERLOADED = "overloaded"
    NO_DECODE_WORKER = "no_decode_worker"
    NO_PREFILL_WORKER = "no_prefill_worker"
    NO_ROUTER = "no_router"
    LEDGER_UNAVAILABLE = "ledger_unavailable"
    DRAINING = "draining"
    TOO_LONG = "too_long"
    # a worker's no to one placement: the router tries elsewhere or waits
    NO_BLOCKS = "no_blocks"
    QUEUE_FULL = "queue_full"
    SUSPECT = "suspect"
    NO_LINK = "no_link"
    """A link this placement needs (to the gateway, to prefill) is not open yet."""
    KV_MISSING = "kv_missing"
    """The KV that was said to be there is not: more is left to compute than decode takes on."""
    STALE_EPOCH = "stale_epoch"
    UNKNOWN_ATTEMPT = "unknown_attempt"
    """The worker never heard of it, or it ended there while nobody could be told."""
    # failures
    WORKER_LOST = "worker_lost"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    PREFILL_ERROR = "prefill_error"
    DECODE_ERROR = "decode_error"
    INTEGRITY = "integrity"
    """A block's checksum did not match: the KV was dropped, never used."""
    FENCED = "fenced"
    """The ticket's blocks were no longer the writer's."""
    INTERNAL = "internal"
    # ends that somebody asked for
    CLIENT_CANCELLED = "client_cancelled"
    CLIENT_DISCONNECTED = "client_disconnected"
    SLOW_READER = "slow_reader"
    GATEWAY_LOST = "gateway_lost"
    DEADLINE = "deadline"
    SUPERSEDED = "superseded"
    """A newer epoch owns the request."""
    MOVED = "moved"
    """Another decode worker is about to go on with it, from the blocks that are here."""


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one terminal outcome of a request."""

    ending: Ending
    finish: FinishReason | None = None
    reason: Reason | None = None
    message: str = ""
    """For people: what happened and what to do. Never prompt text."""
    completion_tokens: int = 0
