"""What a process holds for requests: the body of a ``holdings`` report.

Decides the shape only. Every process tells it of itself, in one instant of its machine, and `baton
audit` compares it with what the others, the ledger and the arenas say. Names and numbers, never a
prompt or a token. Bounded by what bounds the machines: sequences, tickets, blocks, sessions.
"""

from __future__ import annotations

import msgspec

from baton.core.ids import Peer
from baton.wire.handover import ArenaRef


class HeldRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request as its holder knows it: a session, an entry, a job or a sequence."""

    request_id: str
    epoch: int
    stage: str
    """The holder's own word for where it stands."""
    gateway: Peer | None = None
    router: Peer | None = None
    decode: Peer | None = None
    prefill: Peer | None = None
    blocks: tuple[int, ...] = ()
    """Of decode: the blocks it uses, in order."""
    window_ms: int = 0
    """Its gateway is out of sight, and so long in all it waits for its client to come back."""


class HeldTicket(msgspec.Struct, frozen=True, omit_defaults=True):
    """A ticket that is out: what its writer may still touch."""

    request_id: str
    epoch: int
    writer: Peer
    blocks: tuple[int, ...]
    revoked: bool = False
    """Its sequence is over: the blocks wait for the writer, or for the proof of its death."""


class HeldBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block that no reservation could get now."""

    number: int
    state: int
    """A :class:`baton.core.lifecycles.BlockState`."""
    generation: int
    references: int
    holds: int


class Holdings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything one process holds."""

    requests: tuple[HeldRequest, ...] = ()
    tickets: tuple[HeldTicket, ...] = ()
    blocks: tuple[HeldBlock, ...] = ()
    """All but those that are FREE, or CACHED without a hold."""
    pinned: tuple[int, ...] = ()
    """Blocks of sequences dropped while a step or an import used them; one entry a reference."""
    early: tuple[HeldTicket, ...] = ()
    """Of prefill: tickets whose assignment has not come."""
    arenas: tuple[ArenaRef, ...] = ()
    """Mapped here: one's own, or those of decode workers."""
    ends: tuple[str, ...] = ()
    """Of a gateway: requests whose outcome the ledger has not confirmed."""
