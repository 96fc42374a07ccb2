"""The ledger for the simulator: the scripts' rules in memory, under a virtual clock, with faults.

Decides what the Redis adapter decides, and is held to it by the same tests
(``tests/conformance/test_ledger.py``). :class:`LedgerModel` has the rules, :class:`SimLedger` is
the server with its faults, :class:`SimLedgerClient` the port of one process.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import assert_never

from baton.core.ids import Member, Peer
from baton.core.lifecycles import TERMINAL, RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Outcome
from baton.ports.ledger import (
    AcquireLease,
    AdmitRequest,
    Adopted,
    AdoptRequest,
    AdvanceRequest,
    AnyOp,
    ClaimResumable,
    CloseResumable,
    Conflict,
    Done,
    EndRequest,
    FindOrphans,
    FindOwned,
    LeaseHeld,
    LeaseLost,
    LeaveRole,
    Leaving,
    OpenResumable,
    Orphans,
    Owned,
    PlaceRequest,
    ReleaseLease,
    RenewLease,
    Reply,
    RestoreResumable,
    RetryRequest,
    Unavailable,
    op_id,
    sources_of,
    target_of,
)
from baton.sim.resumables import ResumableModel
from baton.wire.messages import RequestSpec

OnAnswer = Callable[[Reply | Unavailable], None]
Schedule = Callable[[float, Callable[[], None]], None]
"""Run a function after that many seconds of virtual time."""


@dataclass(slots=True)
class Record:
    """One request, as the ledger keeps it."""

    spec: RequestSpec
    router: Peer
    expires_at: int
    state: RequestState = RequestState.ADMITTED
    epoch: int = 1
    turn: int = 1
    """Of its router."""
    attempts: int = 0
    failures: int = 0
    decode: Peer | None = None
    prefill: Peer | None = None
    outcome: Outcome | None = None
    ended_by: Peer | None = None
    answers: dict[str, Done] = field(default_factory=dict)
    """Op id -> its answer, of the current epoch."""

    @property
    def owners(self) -> set[Peer]:
        """Who works on it; nobody once it is terminal."""
        if self.state in TERMINAL:
            return set()
        peers = (self.router, self.spec.gateway, self.decode, self.prefill)
        return {peer for peer in peers if peer is not None}

    def done(self) -> Done:
        return Done(self.epoch, self.state, self.attempts)

    def adopted(self) -> Adopted:
        return Adopted(
            self.epoch, self.state, self.attempts, self.failures, self.decode, self.prefill
        )

    def conflict(self) -> Conflict:
        return Conflict(self.epoch, self.state, self.outcome, self.turn)


class LedgerModel:
    """The rules. ``now_ms`` is the server's clock; it may jump."""

    def __init__(self, limits: Limits, random: Random) -> None:
        self._limits = limits
        self._random = random
        self.wipe()

    def wipe(self) -> None:
        """Lose everything."""
        self.ledger_id = ""
        self.rebuild_until = 0
        self.swept_at = 0
        self.leases: dict[Peer, int] = {}
        self.members: dict[Peer, Member] = {}
        self.gone: dict[Peer, int] = {}
        """When a lease ended."""
        self.seats: dict[str, list[int]] = {}
        """Incarnations of a worker_id, newest first."""
        self.records: dict[str, Record] = {}
        self.resumables = ResumableModel()
        self.left_last: tuple[Peer, int] | None = None
        """Who gave its role up last, and when."""

    def owned(self, peer: Peer) -> set[str]:
        """Return the live requests that ``peer`` works on."""
        return {each for each, record in self.records.items() if peer in record.owners}

    def execute(self, op: AnyOp, now_ms: int) -> Reply:
        """Make one transition."""
        for request_id in [k for k, record in self.records.items() if record.expires_at <= now_ms]:
            del self.records[request_id]
        match op:
            case AcquireLease() | RenewLease() | ReleaseLease():
                return self._lease(op, now_ms)
            case FindOrphans():
                return self._orphans(op, now_ms)
            case FindOwned():
                return self._owned(op)
            case LeaveRole():
                return self._leave_role(op, now_ms)
            case AdmitRequest():
                return self._admit(op, now_ms)
            case AdoptRequest():
                return self._adopt(op, now_ms)
            case PlaceRequest() | AdvanceRequest() | RetryRequest() | EndRequest():
                record = self.records.get(op.request_id)
                return Conflict(0, None) if record is None else self._move(op, record, now_ms)
            case OpenResumable() | ClaimResumable() | RestoreResumable() | CloseResumable():
                return self.resumables.execute(op, now_ms)
            case _:
                assert_never(op)

    # --- leases -------------------------------------------------------------------------------

    def _open(self, now: int, ttl: int) -> bool:
        """Return whether this call has found the ledger empty, and made it."""
        if self.ledger_id:
            return False
        self.ledger_id = f"{self._random.getrandbits(64):016x}"
        self.rebuild_until = now + ttl
        return True

    def _orphans(self, op: FindOrphans, now: int) -> Reply:
        self._sweep(now, op.ttl_ms, self._open(now, op.ttl_ms))
        if now < self.rebuild_until:
            return Orphans({})
        entries = sorted(
            (record.expires_at, f"{peer} {request_id}", request_id)
            for request_id, record in self.records.items()
            for peer in record.owners
            if peer not in self.leases
        )
        found = dict.fromkeys(request_id for _, _, request_id in entries)
        seeing = self.leases.keys() - {op.peer, *op.workers}
        nobodys = [each for each in found if not self.records[each].owners & seeing]
        named = nobodys[: op.count_max]
        return Orphans({each: self._window_ms(self.records[each].spec, now) for each in named})

    def _window_ms(self, spec: RequestSpec, now: int) -> int:
        away_ms = max(0, now - self.gone.get(spec.gateway, now))
        return max(0, spec.resume_ms - away_ms)

    def _owned(self, op: FindOwned) -> Reply:
        found = sorted(
            (self.records[request_id].expires_at, request_id) for request_id in self.owned(op.peer)
        )
        return Owned(tuple(request_id for _, request_id in found)[: op.count_max])

    def _leave_role(self, op: LeaveRole, now: int) -> Leaving:
        def lives(peer: Peer) -> bool:
            return self.leases.get(peer, now) > now

        if self.left_last is not None and self.left_last[0] != op.peer:
            by, at = self.left_last
            since = now - at if at <= now else float("inf")
            if since < op.settle_ms or (since < op.hold_ms and lives(by)):
                return Leaving(granted=False, by=by)
        if (op.others and not any(map(lives, op.others))) or not lives(op.peer):
            return Leaving(granted=False)
        self.left_last = op.peer, now
        return Leaving(granted=True)

    def _lease(self, op: AcquireLease | RenewLease | ReleaseLease, now: int) -> Reply:
        ttl = self._limits.lease_ttl_ms if isinstance(op, ReleaseLease) else op.ttl_ms
        opened = self._open(now, ttl)
        match op:
            case AcquireLease(member=member):
                if not self._take_seat(member.peer, now):
                    self._sweep(now, ttl, opened)
                    return LeaseLost(self.ledger_id)
                self.leases[member.peer] = now + ttl
                self.members[member.peer] = member
                self.gone.pop(member.peer, None)
                return self._held(self._sweep(now, ttl, opened), now)
            case RenewLease(peer=peer):
                if peer not in self.leases:
                    self._sweep(now, ttl, opened)
                    return LeaseLost(self.ledger_id)
                self.leases[peer] = now + ttl
                return self._held(self._sweep(now, ttl, opened), now)
            case ReleaseLease(peer=peer):
                self._drop(peer, now)
                if self.seats.get(peer.worker_id) == [peer.incarnation]:
                    del self.seats[peer.worker_id]
                return LeaseLost(self.ledger_id)
            case _:
                assert_never(op)

    def _take_seat(self, peer: Peer, now: int) -> bool:
        seated = self.seats.setdefault(peer.worker_id, [])
        if peer.incarnation in seated[1:]:
            return False
        if seated[:1] != [peer.incarnation]:
            if seated:
                self._drop(Peer(peer.worker_id, seated[0]), now)
            seated.insert(0, peer.incarnation)
            del seated[8:]
        return True

    def _drop(self, peer: Peer, now: int) -> None:
        had = any(record.owners for record in self.records.values())
        if self.leases.pop(peer, None) is not None and had:
            self.gone[peer] = now
        self.members.pop(peer, None)

    def _sweep(self, now: int, ttl: int, opened: bool) -> tuple[Peer, ...]:
        went_back = now < self.swept_at
        if went_back or now - self.swept_at > ttl / 2 or opened:
            for peer, deadline in self.leases.items():
                self.leases[peer] = now + ttl if went_back else max(deadline, now + ttl)
            if went_back:
                self.rebuild_until = min(self.rebuild_until, now + ttl)
        self.swept_at = now
        if now < self.rebuild_until:
            return ()
        lost = tuple(sorted(p for p, deadline in self.leases.items() if deadline <= now))
        for peer in lost:
            self._drop(peer, now)
        return lost

    def _held(self, lost: tuple[Peer, ...], now: int) -> LeaseHeld:
        members = tuple(sorted(self.members.values(), key=lambda member: member.peer))
        return LeaseHeld(self.ledger_id, now < self.rebuild_until, members, lost)

    # --- requests -----------------------------------------------------------------------------

    def _admit(self, op: AdmitRequest, now: int) -> Reply:
        record = self.records.get(op.spec.request_id)
        if record is None:
            return self._create(op.spec, op.router, now).done()
        if record.outcome is not None or record.router != op.router:
            return record.conflict()
        return record.done()

    def _create(self, spec: RequestSpec, router: Peer, now: int) -> Record:
        expires_at = now + spec.deadline_ms + self._limits.terminal_ttl_ms
        record = self.records[spec.request_id] = Record(spec, router, expires_at)
        return record

    def _adopt(self, op: AdoptRequest, now: int) -> Reply:
        record = self.records.get(op.spec.request_id)
        if record is None:
            record = self._create(op.spec, op.router, now)
            record.epoch, record.turn = -1, 0
        another = op.turn == record.turn and op.router != record.router
        if record.outcome is not None or op.turn < record.turn or another:
            return record.conflict()
        record.router, record.turn, record.spec = op.router, op.turn, op.spec
        if record.epoch < op.epoch:
            record.answers.clear()
            record.epoch, record.state = op.epoch, target_of(op)
            placed = op.decode is not None
            record.decode, record.prefill = op.decode, op.prefill if placed else None
            record.attempts += placed
        return record.adopted()

    def _move(
        self,
        op: PlaceRequest | AdvanceRequest | RetryRequest | EndRequest,
        record: Record,
        now: int,
    ) -> Reply:
        if isinstance(op, EndRequest):
            return self._end(op, record, now)
        if record.outcome is not None:
            return record.conflict()
        answered = record.answers.get(op_id(op))
        legal = record.state in sources_of(op)
        match op:
            case RetryRequest():
                if answered is not None and record.epoch == op.epoch + 1:
                    return answered
                if record.epoch != op.epoch or record.router != op.router or not legal:
                    return record.conflict()
                record.answers.clear()
                record.state, record.epoch = RequestState.ADMITTED, op.epoch + 1
                record.failures, record.decode, record.prefill = op.failures, None, None
            case PlaceRequest():
                if record.epoch != op.epoch:
                    return record.conflict()
                if answered is not None:
                    return answered
                if record.router != op.router or not legal:
                    return record.conflict()
                record.state, record.attempts = RequestState.PLACED, record.attempts + 1
                record.decode, record.prefill = op.decode, op.prefill
            case AdvanceRequest():
                if record.epoch != op.epoch:
                    return record.conflict()
                if answered is not None:
                    return answered
                if op.by not in (record.decode, record.prefill) or record.state not in sources_of(
                    op
                ):
                    return record.conflict()
                record.state = op.state
            case _:
                assert_never(op)
        record.answers[op_id(op)] = record.done()
        return record.done()

    def _end(self, op: EndRequest, record: Record, now: int) -> Reply:
        if (record.epoch, record.outcome, record.ended_by) == (op.epoch, op.outcome, op.by):
            return record.done()
        known = {record.router, record.spec.gateway} & self.leases.keys()
        behind = op.turn > record.turn
        legal = (op.by in record.owners or behind or not known) and record.state in sources_of(op)
        if record.epoch != op.epoch or not legal:
            return record.conflict()
        record.state, record.outcome, record.ended_by = target_of(op), op.outcome, op.by
        record.expires_at = now + self._limits.terminal_ttl_ms
        return record.done()


class SimLedger:
    """The server. Faults are switched by its methods; delays go through ``schedule``."""

    def __init__(
        self, now: Callable[[], float], schedule: Schedule, limits: Limits, random: Random
    ) -> None:
        self.model = LedgerModel(limits, random)
        self.delay_s = 0.0002
        """Each way; raise it for a slow ledger."""
        self.clock_offset_ms = 0
        """Of the server's clock; change it for a jump."""
        self.up = True
        self.calls: Counter[str] = Counter()
        """Ops executed, by name."""
        self._random = random
        self._now = now
        self._schedule = schedule
        self._limits = limits
        self._replies_to_lose = 0
        self._frozen = False
        self._arrived: deque[tuple[AnyOp, Callable[[Reply], None]]] = deque()

    def connect(self) -> SimLedgerClient:
        """Return the port of one process."""
        return SimLedgerClient(self, self._now, self._schedule, self._limits)

    def go_down(self) -> None:
        """Refuse connections; what had arrived and was not executed is gone."""
        self.up = False
        self._arrived.clear()

    def come_up(self) -> None:
        self.up = True

    def freeze(self) -> None:
        """Take everything, execute and answer nothing."""
        self._frozen = True

    def thaw(self) -> None:
        """Execute what arrived meanwhile, also what its callers gave up."""
        self._frozen = False
        while self._arrived:
            self._execute(*self._arrived.popleft())

    def wipe(self) -> None:
        """Lose all data; the next lease call makes a new ledger."""
        self.model.wipe()

    def replica(self) -> LedgerModel:
        """Return what a replica has that hears nothing from now on."""
        return copy.deepcopy(self.model, {id(self._random): self._random})

    def fail_over(self, replica: LedgerModel) -> None:
        """Go on with what ``replica`` has: everything since is lost."""
        self.model = replica

    def lose_replies(self, count: int) -> None:
        """Execute the next ``count`` ops, but cut the connection before the answer."""
        self._replies_to_lose = count

    def arrive(self, op: AnyOp, answer: Callable[[Reply], None]) -> None:
        """An op has come in (called by the clients)."""
        if self._frozen:
            self._arrived.append((op, answer))
        elif self.up:
            self._execute(op, answer)

    def loses_this_reply(self) -> bool:
        if self._replies_to_lose == 0:
            return False
        self._replies_to_lose -= 1
        return True

    def _execute(self, op: AnyOp, answer: Callable[[Reply], None]) -> None:
        self.calls[type(op).__name__] += 1
        now_ms = int(self._now() * 1000) + self.clock_offset_ms
        answer(self.model.execute(op, now_ms))


@dataclass(slots=True, eq=False)
class _Call:
    done: OnAnswer
    answered: bool = False


class SimLedgerClient:
    """One process's :class:`baton.ports.ledger.Ledger`."""

    def __init__(
        self, server: SimLedger, now: Callable[[], float], schedule: Schedule, limits: Limits
    ) -> None:
        self._server = server
        self._now = now
        self._schedule = schedule
        self._limits = limits
        self._waiting: set[_Call] = set()
        self._arrives_at = 0.0
        self._answers_at = 0.0
        self._closed = False

    def call(self, op: AnyOp, done: OnAnswer) -> None:
        call = _Call(done)
        if self._closed or len(self._waiting) >= self._limits.ledger_inflight_max:
            self._waiting.add(call)
            self._schedule(0.0, lambda: self._answer(call, Unavailable("not taken")))
            return
        self._waiting.add(call)
        # Never before what was called earlier, even when the delay has shrunk since.
        self._arrives_at = max(self._arrives_at, self._now() + self._server.delay_s)
        self._schedule(self._arrives_at - self._now(), lambda: self._deliver(op, call))
        timeout_s = self._limits.ledger_timeout_ms / 1000
        self._schedule(timeout_s, lambda: self._answer(call, Unavailable("timeout")))

    def crash(self) -> None:
        """The process died: nothing is called back any more; what arrived is executed."""
        self._closed = True
        for call in self._waiting:
            call.answered = True
        self._waiting.clear()

    async def close(self) -> None:
        self._closed = True
        for call in list(self._waiting):
            self._answer(call, Unavailable("closed"))

    def _deliver(self, op: AnyOp, call: _Call) -> None:
        if not self._server.up:
            self._answer(call, Unavailable("connection refused"))
        else:
            self._server.arrive(op, lambda reply: self._return(call, reply))

    def _return(self, call: _Call, reply: Reply) -> None:
        answer: Reply | Unavailable = reply
        if self._server.loses_this_reply():
            answer = Unavailable("connection lost")
        self._answers_at = max(self._answers_at, self._now() + self._server.delay_s)
        self._schedule(self._answers_at - self._now(), lambda: self._answer(call, answer))

    def _answer(self, call: _Call, answer: Reply | Unavailable) -> None:
        if not call.answered:
            call.answered = True
            self._waiting.discard(call)
            call.done(answer)
