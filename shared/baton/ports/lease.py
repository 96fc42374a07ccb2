"""The lease of this process: when to acquire and renew, when it may have run out.

A pure machine that every process's shell runs beside its own. It stands in ``ports`` and not in
``core`` because it speaks in ledger ops. It decides nothing about what a SUSPECT process may do.

The margin counts from when a renewal was *sent*: the ledger's own deadline is later than that, so
this process stops trusting its lease before anybody can declare it lost, whatever the delays were.
That is courtesy, not safety: a process can be frozen between looking and acting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from baton.core.events import LeaseChanged, TimePassed
from baton.core.ids import Member, Peer
from baton.core.lifecycles import LEASE_MOVES, LeaseState, become
from baton.core.limits import Limits
from baton.ports.driving import CallLedger, LedgerAnswered
from baton.ports.ledger import (
    AcquireLease,
    AnyOp,
    LeaseHeld,
    LeaseLost,
    ReleaseLease,
    RenewLease,
    Reply,
    Unavailable,
)


@dataclass(frozen=True, slots=True)
class LeaseGivenUp:
    """Event: the process ends in good order. Nothing is renewed from here on."""


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """Command: tell the machine and the transport who is there now, this process included."""

    members: tuple[Member, ...]
    ledger_id: str
    """Another one than before: the ledger was emptied or is another; announce everything anew."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """Command: a newer incarnation has this worker_id; this process must exit."""

    peer: Peer


LeaseEvent = TimePassed | LedgerAnswered | LeaseGivenUp
LeaseCommand = CallLedger | LeaseChanged | MembersChanged | Replaced


class LeaseKeeper:
    """Keeps one incarnation's lease. Takes the answers to its own ops only (:meth:`owns`)."""

    def __init__(self, me: Member, limits: Limits, now: float) -> None:
        self.me = me
        self.state = LeaseState.VACANT
        self.members: tuple[Member, ...] = ()
        self.ledger_id = ""
        self.rebuilding = False
        """The ledger said so in its last answer."""
        self._ttl_ms = limits.lease_ttl_ms
        self._renew_s = limits.lease_renew_ms / 1000
        self._retry_s = self._renew_s / 5
        self._trusted_s = (limits.lease_ttl_ms - limits.lease_renew_ms) / 1000
        assert self._trusted_s > self._renew_s, "the lease would be suspect between two renewals"
        self._registered = False
        """The ledger has us: renew, do not acquire."""
        self._asked: AnyOp | None = None
        """The op in flight, at most one: the adapter answers each within its timeout."""
        self._asked_at = 0.0
        self._ask_at: float | None = now
        self._trusted_until = now
        self._over = False

    # --- the machine --------------------------------------------------------------------------

    def owns(self, event: LedgerAnswered) -> bool:
        """Whether ``event`` answers a lease op."""
        return isinstance(event.op, AcquireLease | RenewLease | ReleaseLease)

    def handle(self, event: LeaseEvent, now: float) -> list[LeaseCommand]:
        commands: list[LeaseCommand] = []
        match event:
            case LedgerAnswered(op=op, reply=reply):
                # After the end, or for a release, an answer changes nothing.
                if op == self._asked and not self._over:
                    self._asked = None
                    self._answered(op, reply, now, commands.append)
            case LeaseGivenUp():
                self._give_up(commands.append)
            case TimePassed():
                pass
            case _:
                assert_never(event)
        if not self._over:
            self._suspect_if_late(now, commands.append)
            self._ask_if_due(now, commands.append)
        return commands

    def deadline(self) -> float | None:
        """Return when :class:`TimePassed` is needed next."""
        if self._over:
            return None
        times = []
        if self._asked is None and self._ask_at is not None:
            times.append(self._ask_at)
        if self.state is LeaseState.HELD:
            times.append(self._trusted_until)
        return min(times, default=None)

    def check(self) -> None:
        """Assert what always holds."""
        assert self._over or self._asked is not None or self._ask_at is not None, "would never ask"
        if self.state is LeaseState.HELD:
            assert self._registered, "held without being in the ledger"
        if self.state is LeaseState.SUSPECT:
            assert self._registered, "suspect without ever having been in the ledger"

    # --- decisions ----------------------------------------------------------------------------

    def _answered(
        self, op: AnyOp, reply: Reply | Unavailable, now: float, do: Callable[[LeaseCommand], None]
    ) -> None:
        match reply:
            case LeaseHeld():
                self._registered = True
                self.rebuilding = reply.rebuilding
                self._trusted_until = self._asked_at + self._trusted_s
                self._ask_at = self._asked_at + self._renew_s
                if now < self._trusted_until:
                    self._become(LeaseState.HELD, do)
                # Otherwise the answer is so old that it says nothing about now: ask again, and
                # stay SUSPECT (or LOST) until then.
                self._learn(reply, do)
            case LeaseLost() if isinstance(op, AcquireLease):
                # Nobody gives this name back to us.
                self._lose(do)
                self._over = True
                do(Replaced(self.me.peer))
            case LeaseLost():
                self._lose(do)
                self._ask_at = now
            case Unavailable():
                # It may be in effect; asking again is harmless, and soon enough to keep the lease.
                self._ask_at = now + self._retry_s
            case _:
                raise AssertionError(f"{type(op).__name__} was answered with {reply}")

    def _learn(self, reply: LeaseHeld, do: Callable[[LeaseCommand], None]) -> None:
        if (reply.members, reply.ledger_id) != (self.members, self.ledger_id):
            self.members, self.ledger_id = reply.members, reply.ledger_id
            do(MembersChanged(reply.members, reply.ledger_id))

    def _lose(self, do: Callable[[LeaseCommand], None]) -> None:
        self._registered = False
        if self.state in (LeaseState.HELD, LeaseState.SUSPECT):
            self._become(LeaseState.LOST, do)

    def _give_up(self, do: Callable[[LeaseCommand], None]) -> None:
        if self._over:
            return
        self._over = True
        if self.state is not LeaseState.VACANT:
            self._become(LeaseState.VACANT, do)
        # Also when never held: an acquire may be on its way, and the calls keep their order.
        do(CallLedger(ReleaseLease(self.me.peer)))

    def _suspect_if_late(self, now: float, do: Callable[[LeaseCommand], None]) -> None:
        if self.state is LeaseState.HELD and now >= self._trusted_until:
            self._become(LeaseState.SUSPECT, do)

    def _ask_if_due(self, now: float, do: Callable[[LeaseCommand], None]) -> None:
        if self._asked is not None or self._ask_at is None or now < self._ask_at:
            return
        op: AnyOp
        if self._registered:
            op = RenewLease(self.me.peer, self._ttl_ms)
        else:
            op = AcquireLease(self.me, self._ttl_ms)
        self._asked, self._asked_at, self._ask_at = op, now, None
        do(CallLedger(op))

    def _become(self, state: LeaseState, do: Callable[[LeaseCommand], None]) -> None:
        if state is not self.state:
            self.state = become(LEASE_MOVES, self.state, state)
            do(LeaseChanged(state))
