"""The life cycles: states and legal moves, in one table each.

Decides which moves exist. ``docs/states.md`` is rendered from these tables and a test compares
them; whoever holds a state changes it only through :func:`become`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import TypeVar


class RequestState(StrEnum):
    """A request's state, as the ledger keeps it."""

    RECEIVED = "received"
    ADMITTED = "admitted"
    PLACED = "placed"
    PREFILLING = "prefilling"
    COMMITTED = "committed"
    DECODING = "decoding"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"
    REFUSED = "refused"


class BlockState(IntEnum):
    """A block's state. The numbers are stored in the arena's metadata: never renumber."""

    FREE = 0
    RESERVED = 1
    FILLING = 2
    ANNOUNCED = 3
    RESIDENT = 4
    CACHED = 5
    QUARANTINED = 6


class LeaseState(StrEnum):
    """What a process knows of its own lease."""

    VACANT = "vacant"
    HELD = "held"
    SUSPECT = "suspect"
    LOST = "lost"


class WorkerState(StrEnum):
    """What a guard knows of the worker it has forked."""

    ABSENT = "absent"
    STARTING = "starting"
    SERVING = "serving"
    ENDING = "ending"
    KILLED = "killed"


R, B, L, W = RequestState, BlockState, LeaseState, WorkerState

_ENDS = frozenset({R.CANCELLED, R.EXPIRED, R.FAILED, R.REFUSED})
TERMINAL = _ENDS | {R.COMPLETED}

REQUEST_MOVES: Mapping[RequestState, frozenset[RequestState]] = {
    R.RECEIVED: frozenset({R.ADMITTED}) | _ENDS,
    R.ADMITTED: frozenset({R.PLACED, R.ADMITTED}) | _ENDS,
    R.PLACED: frozenset({R.PREFILLING, R.COMMITTED, R.DECODING, R.ADMITTED, R.COMPLETED}) | _ENDS,
    R.PREFILLING: frozenset({R.COMMITTED, R.DECODING, R.ADMITTED, R.COMPLETED}) | _ENDS,
    R.COMMITTED: frozenset({R.DECODING, R.ADMITTED, R.COMPLETED}) | _ENDS,
    R.DECODING: frozenset({R.DECODING, R.PLACED, R.ADMITTED, R.COMPLETED}) | _ENDS,
    R.COMPLETED: frozenset(),
    R.CANCELLED: frozenset(),
    R.EXPIRED: frozenset(),
    R.FAILED: frozenset(),
    R.REFUSED: frozenset(),
}

BLOCK_MOVES: Mapping[BlockState, frozenset[BlockState]] = {
    B.FREE: frozenset({B.RESERVED, B.RESIDENT}),
    B.RESERVED: frozenset({B.FILLING, B.FREE, B.QUARANTINED}),
    B.FILLING: frozenset({B.ANNOUNCED, B.QUARANTINED}),
    B.ANNOUNCED: frozenset({B.RESIDENT, B.QUARANTINED}),
    B.RESIDENT: frozenset({B.CACHED, B.FREE, B.QUARANTINED}),
    B.CACHED: frozenset({B.RESIDENT, B.FREE}),
    B.QUARANTINED: frozenset({B.FREE}),
}

LEASE_MOVES: Mapping[LeaseState, frozenset[LeaseState]] = {
    L.VACANT: frozenset({L.HELD}),
    L.HELD: frozenset({L.SUSPECT, L.LOST, L.VACANT}),
    L.SUSPECT: frozenset({L.HELD, L.LOST, L.VACANT}),
    L.LOST: frozenset({L.HELD, L.VACANT}),
}

WORKER_MOVES: Mapping[WorkerState, frozenset[WorkerState]] = {
    W.ABSENT: frozenset({W.STARTING}),
    W.STARTING: frozenset({W.SERVING, W.ENDING, W.KILLED, W.ABSENT}),
    W.SERVING: frozenset({W.ENDING, W.KILLED, W.ABSENT}),
    W.ENDING: frozenset({W.KILLED, W.ABSENT}),
    W.KILLED: frozenset({W.ABSENT}),
}

S = TypeVar("S", RequestState, BlockState, LeaseState, WorkerState)


def become(moves: Mapping[S, frozenset[S]], source: S, target: S) -> S:
    """Return ``target`` if the move is legal; an illegal move is a bug, not an input error."""
    assert target in moves[source], f"illegal move {source.name} -> {target.name}"
    return target
