"""The router machine: admits, places, and sees to it that every request it admitted ends.

It is not on the token path. What is taken in is decided in ``admission.py``, attempts and retries
in ``attempts.py``, where they go in ``placement.py``, how a request leaves in ``verdicts.py``; here
is who calls whom when, and what time and lost links do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

import msgspec

from baton.core.events import DrainRequested, LeaseChanged, RestartRequested, TimePassed
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, Reason
from baton.core.slo import Slo
from baton.ports.driving import EXIT_RESTART, Exit, LedgerAnswered, Measure, Note
from baton.ports.ledger import EndRequest, FindOrphans
from baton.ports.transport import PeerLost, PeerRefused, PeerUp, Received
from baton.router.admission import Admission
from baton.router.adoption import Adoption
from baton.router.attempts import Attempts
from baton.router.balance import Balance, Policy
from baton.router.entry import Entry, Phase
from baton.router.moves import Moves
from baton.router.orphans import OrphanSweep
from baton.router.placement import BlockNaming, Placement
from baton.router.spread import PlacementRule
from baton.router.state import State
from baton.router.verdicts import Verdicts
from baton.wire.holdings import HeldRequest, Holdings
from baton.wire.messages import (
    AnyMessage,
    BlocksChanged,
    BlocksListed,
    DecodeReserved,
    LastStep,
    MoveOffered,
    PoolStatus,
    RequestEnded,
    RequestFenced,
    RequestLeft,
    RequestMoved,
    RequestResumed,
    RoleAnswered,
    SubmitRequest,
    WorkerStatus,
    WorkFailed,
    WorkRefused,
)

Event = (
    TimePassed
    | LeaseChanged
    | DrainRequested
    | RestartRequested
    | PeerUp
    | PeerLost
    | PeerRefused
    | Received
    | LedgerAnswered
)

TICK_S = 0.05
#: Somebody is about to say whether a worker has taken it in, or its client has a part of it.
_ASKING = frozenset({Phase.ADOPTING, Phase.PLACED, Phase.FENCING})


class RouterMachine:
    """One router. ``Machine[Event, Command]``."""

    def __init__(
        self,
        me: Peer,
        limits: Limits,
        *,
        split: bool = True,
        local_prefill_max_tokens: int = 0,
        slo: Slo | None = None,
        roles: Policy | None = None,
        naming: BlockNaming | None = None,
        rule: PlacementRule = "prefix",
    ) -> None:
        """``split``: nothing is served without prefill workers; ``slo``: each request's way is
        chosen so that it is kept; ``roles``: when workers are asked to change theirs, if at all;
        ``rule``: which of several decode workers a request goes to."""
        placement = Placement(
            limits,
            local_prefill_max_tokens=local_prefill_max_tokens,
            naming=naming or BlockNaming(),
            rule=rule,
            slo=slo,
        )
        self.state = State(me, limits, placement)
        self.moves = Moves(self.state)
        self.verdicts = Verdicts(self.state, self.moves)
        self.attempts = Attempts(self.state, self.moves, self.verdicts)
        self.adoption = Adoption(self.state, self.attempts)
        self.admission = Admission(self.state, self.attempts, self.adoption)
        self.orphans = OrphanSweep(self.state, self.attempts)
        self.balance = None if roles is None else Balance(self.state, roles)
        self.drain_due: float | None = None
        self.exited = False
        self.split = split
        self.pool: PoolStatus | None = None
        """What the gateways were told last."""
        self.tick_at: float | None = None

    # --- Machine ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[object]:
        self.state.commands = []
        self._dispatch(event, now)
        self._note_alone(now)
        self.orphans.time_passed(now)
        self.attempts.place_waiting(now)
        self.attempts.move_on(now)
        if self.balance is not None:
            self.balance.time_passed(now)
        self._tell_pool()
        for peer, wanted in self.state.placement.prefixes.to_ask(now):
            self.state.send(peer, wanted)
        if not self.state.entries:
            self.tick_at = None
        elif self.tick_at is None:
            self.tick_at = now + TICK_S
        if self.state.draining and all(map(_may_be_left, self.state.entries.values())):
            self._exit_drained()
        return self.state.commands

    def deadline(self) -> float | None:
        balance_at = None if self.balance is None else self.balance.next_at
        asks_at = self.state.placement.prefixes.deadline()
        dues = (self.tick_at, self.drain_due, self.orphans.next_at, balance_at, asks_at)
        times = [time for time in dues if time is not None]
        return min(times, default=None)

    def check(self) -> None:
        queued = [entry for entry in self.state.entries.values() if entry.phase is Phase.QUEUED]
        assert len(self.state.queue) == len(queued)
        assert self.state.queue.tokens == sum(entry.spec.prompt_tokens for entry in queued)
        assert self.state.queue.tokens >= 0
        for entry in self.state.entries.values():
            assert (entry.phase is not Phase.PLACED) or entry.decode is not None
            assert entry.epoch >= 1
        for view in self.state.placement.workers.values():
            for request_id, entry in view.sent.items():
                assert self.state.entries.get(request_id) is entry, f"{request_id} is not there"
                assert entry.decode == view.peer and entry.phase in (Phase.PLACING, Phase.PLACED)
        self.state.placement.prefixes.check()
        self.moves.check()
        self.verdicts.check()
        self.orphans.check()
        self.state.placement.check()

    # --- events -------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case TimePassed():
                self._tick(now)
            case Received(peer, message):
                self._received(peer, message, now)
            case LedgerAnswered(FindOrphans(), reply):
                self.orphans.found(reply, now)
            case LedgerAnswered(EndRequest() as op, reply):
                self.orphans.ended(op, reply)
            case LedgerAnswered(op, reply):
                self.attempts.answered(op, reply, now)
            case PeerUp(member):
                self._peer_up(member, now)
            case PeerLost():
                self._peer_lost(event, now)
            case LeaseChanged(state):
                self._lease_changed(state, now)
            case DrainRequested():
                self._drain(now)
            case RestartRequested():
                # What runs needs no router; what waits is given to the next one by its gateway.
                self._exit(EXIT_RESTART, "restart")
            case PeerRefused():
                pass  # the shell logs it; the pair is simply not used
            case _:
                assert_never(event)

    def _received(self, peer: Peer, message: AnyMessage, now: float) -> None:
        match message:
            case SubmitRequest():
                self.admission.submit(peer, message, now)
            case RequestMoved(request_id, turn):
                self._moved(peer, request_id, turn)
            case RequestLeft(request_id):
                self._left(peer, request_id, now)
            case RequestEnded():
                self._ended(peer, message)
            case RequestFenced():
                self.attempts.fenced(peer, message, now)
            case WorkerStatus():
                view = self.state.placement.workers.get(peer)
                if view is not None:
                    view.refresh(message)
                    prefixes = self.state.placement.prefixes
                    self._missed(peer, prefixes.told(peer, message.blocks_told, now))
            case BlocksChanged():
                self._missed(peer, self.state.placement.prefixes.changed(peer, message, now))
            case BlocksListed():
                self._missed(peer, self.state.placement.prefixes.listed(peer, message, now))
            case DecodeReserved():
                self.attempts.reserved(peer, message)
            case WorkRefused():
                self.attempts.work_refused(peer, message, now)
            case LastStep():
                self.attempts.blames.heard(message, now)
            case WorkFailed():
                self.attempts.work_failed(peer, message, now)
            case MoveOffered():
                self.attempts.move_offered(peer, message)
            case RoleAnswered():
                view = self.state.placement.workers.get(peer)
                if view is not None and self.balance is not None:
                    self.balance.answered(view, message, now)
            case _:
                self.state.emit(Measure("stale_messages_total", 1, {"kind": "unknown"}))
                self.state.emit(
                    Note("unexpected_message", {"kind": type(message).__name__}, "warning")
                )

    def _ended(self, gateway: Peer, message: RequestEnded) -> None:
        entry = self.state.entries.get(message.request_id)
        if entry is not None and entry.spec.gateway == gateway:
            self.attempts.forecasts.ended(entry, message.ttft_ms)
        self.verdicts.ended(gateway, message)

    def _missed(self, worker: Peer, why: str) -> None:
        """More or less is known of a worker's blocks: who waits may have another way. ``why``
        nothing is known any more, if that is so."""
        view = self.state.placement.workers.get(worker)
        if view is not None:
            view.changes += 1
        if why:
            self.state.measure("prefix_resyncs_total", reason=why)
            self.state.emit(Note("blocks_missed", {"worker": str(worker), "reason": why}))

    def _tell_pool(self) -> None:
        """Tell the gateways whether a request could be served, when that has changed."""
        missing = self.state.placement.missing(split=self.split)
        if self.state.draining:
            missing = Reason.DRAINING, "this router is draining"
        status = PoolStatus(missing is None, *(missing or ()))
        if status != self.pool:
            self.pool = status
            for gateway in sorted(self.state.gateways):
                self.state.send(gateway, status)

    # --- peers and time -----------------------------------------------------------------------

    def _peer_up(self, member: Member, now: float) -> None:
        if member.role is Role.GATEWAY:
            self.state.gateways.add(member.peer)
            self.pool = None  # the new one hears it with the next line, the others once more
            for entry in self.state.of_gateway(member.peer):
                self.attempts.tell_again(entry, now)
        elif member.role in (Role.DECODE, Role.PREFILL):
            self.state.placement.meet(member, now)
            self.adoption.worker_up(member.peer)
            self.state.had_decode |= member.role is Role.DECODE

    def _peer_lost(self, event: PeerLost, now: float) -> None:
        peer = event.peer
        if peer in self.state.gateways:
            self.state.gateways.discard(peer)
            for entry in self.state.of_gateway(peer):
                entry.gateway_lost_at = now
                entry.gateway_gone = event.gone
                if event.gone and not entry.spec.resume_ms:
                    self.verdicts.end_for_lost_gateway(entry)
            return
        view = self.state.placement.workers.get(peer)
        if view is None:
            return
        self.moves.lost(peer)
        placed = [
            entry
            for entry in self.state.entries.values()
            if entry.phase is Phase.PLACED and entry.decode == peer
        ]
        for entry in placed:
            if entry.reserved:
                self.moves.starts_from(entry, peer)
        self.state.placement.forget(peer, now, lives=event.lives)
        if not event.lives:
            self.attempts.blames.ended(peer, now)
        # A lost prefill worker is decode's to report: it alone knows whether the commit came.
        for entry in placed:
            if event.lives:
                self.adoption.decode_out_of_hearing(entry, now)
                continue
            self.state.measure("attempts_failed_total", reason=Reason.WORKER_LOST)
            self.state.note("worker_lost", entry, by=str(peer), message=event.reason)
            self.attempts.attempt_failed(entry, f"{peer} is lost: {event.reason}", now, peer)

    def _lease_changed(self, state: LeaseState, now: float) -> None:
        before, self.state.lease = self.state.lease, state
        if state is LeaseState.HELD:
            self.state.since = min(self.state.since, now)
        if state is LeaseState.HELD and before is LeaseState.LOST:
            self.adoption.announce()

    def _moved(self, gateway: Peer, request_id: str, turn: int) -> None:
        """A gateway has given it to another router: its workers are that one's. The gateway that it
        had here may not know that its client reads elsewhere."""
        entry = self.state.entries.get(request_id)
        if entry is not None and entry.turn < turn:
            self.state.note("superseded", entry, by_turn=turn)
            if entry.spec.gateway != gateway:
                self.state.send(entry.spec.gateway, RequestResumed(request_id, turn))
            self.verdicts.forget(entry)

    def _left(self, gateway: Peer, request_id: str, now: float) -> None:
        """A gateway that goes away has left it: as if that gateway were gone, for this request."""
        entry = self.state.entries.get(request_id)
        if entry is not None and entry.spec.gateway == gateway and not entry.gateway_gone:
            self.state.note("gateway_left", entry)
            entry.gateway_lost_at, entry.gateway_gone = now, True

    def _drain(self, now: float) -> None:
        """Refuse what was not placed yet; see the rest through."""
        if self.state.draining:
            return
        self.state.draining = True
        self.drain_due = now + self.state.limits.drain_ms / 1000
        self._refuse_all(now, Phase.ADMITTING, Phase.QUEUED)

    def _end_drain(self, now: float) -> None:
        """Time is up: running requests go on without their router."""
        self.drain_due = None
        self._refuse_all(now, *(set(Phase) - {Phase.PLACED, Phase.CLOSING}))
        self._exit_drained()

    def _refuse_all(self, now: float, *phases: Phase) -> None:
        for entry in list(self.state.entries.values()):
            if entry.phase in phases:
                self.verdicts.refuse(entry, now, Reason.DRAINING, "this router is draining")

    def _exit_drained(self) -> None:
        self._exit(0, "drained")

    def _exit(self, code: int, reason: str) -> None:
        if not self.exited:
            self.exited = True
            self.state.emit(Exit(code, reason))

    def _tick(self, now: float) -> None:
        self.tick_at = None
        if self.drain_due is not None and now >= self.drain_due:
            self._end_drain(now)
        for entry in list(self.state.entries.values()):
            self._check_time(entry, now)

    def _check_time(self, entry: Entry, now: float) -> None:
        limits = self.state.limits
        lost_at = entry.gateway_lost_at
        away_ms = 0.0 if lost_at is None else (now - lost_at) * 1000
        patience_ms = max(limits.recovery_ms, entry.spec.resume_ms)
        # What is placed runs on while its gateway lives: its tokens do not come this way. Whether
        # the request lives as well, only decode can say.
        runs = entry.phase is Phase.PLACED and not entry.gateway_gone
        if away_ms > patience_ms and not runs:
            self.verdicts.end_for_lost_gateway(entry)
            return
        if away_ms > patience_ms and now >= entry.ask_at:
            self.attempts.ask_decode(entry, now)
        if entry.phase is Phase.CLOSING:
            if (now - entry.closed_at) * 1000 > limits.terminal_ttl_ms:
                self.state.note("end_never_heard", entry, level="warning")
                self.verdicts.forget(entry)
            return
        if entry.ledger_again is not None and now >= entry.ledger_again:
            self.attempts.ask_again(entry, now)
        on_trial = entry.on_trial and now >= entry.not_before
        if on_trial and not self.attempts.blames.judge(entry, now):
            return
        if entry.link_due is not None and now >= entry.link_due:
            entry.link_due = None
            if entry.phase is Phase.PLACED and entry.decode not in self.state.placement.workers:
                self.attempts.recover(entry, now)
        age_ms = (now - entry.arrived) * 1000
        since = entry.recovering_since
        if age_ms > min(entry.spec.deadline_ms, limits.request_deadline_ms):
            self.verdicts.cancel_work(entry, Reason.DEADLINE)
            text = "the request's deadline passed"
            self.verdicts.give_up(entry, now, Reason.DEADLINE, text, Ending.EXPIRED)
        elif since is not None and self._nobody_for(now - since, now):
            self.verdicts.cancel_work(entry, Reason.WORKER_LOST)
            text = "its worker was lost and no other could take over"
            self.verdicts.give_up(entry, now, Reason.WORKER_LOST, text)
        elif entry.taken_in or entry.phase in _ASKING:
            pass
        elif since is None and self._nobody_for(age_ms / 1000, now):
            self.verdicts.refuse(entry, now, Reason.NO_DECODE_WORKER, "no decode worker is up")
        elif age_ms > limits.queue_deadline_ms:
            self.verdicts.refuse(entry, now, Reason.OVERLOADED, "it waited too long for a place")

    def _nobody_for(self, waited_s: float, now: float) -> bool:
        """Whether whoever has waited that long waits for nobody: there has been no decode worker to
        take anything for ``recovery_ms``, and not for want of the ledger."""
        since = self.state.alone_since
        return since is not None and self.state.outwaits(min(waited_s, now - since))

    def _note_alone(self, now: float) -> None:
        decodes = self.state.placement.of(Role.DECODE)
        held = self.state.lease is LeaseState.HELD
        if not held or any(view.status.accepting for view in decodes):
            self.state.alone_since = None
        elif self.state.alone_since is None:
            self.state.alone_since = now

    # --- looking in ---------------------------------------------------------------------------

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of ``/metrics``."""
        phases = [entry.phase for entry in self.state.entries.values()]
        placed = phases.count(Phase.PLACED)
        balance = {} if self.balance is None else self.balance.gauges()
        return {
            **balance,
            "num_requests_running": float(placed),
            "num_requests_waiting": float(len(phases) - placed - phases.count(Phase.CLOSING)),
            "queue_tokens": float(self.state.queue.tokens),
            "prefix_index_blocks": float(self.state.placement.prefixes.total),
        }

    def status(self) -> dict[str, object]:
        """Return what ``baton status`` shows."""
        phases = [entry.phase for entry in self.state.entries.values()]
        return {
            "lease": self.state.lease.value,
            "draining": self.state.draining,
            "requests": {phase.value: phases.count(phase) for phase in Phase},
            "queue_tokens": self.state.queue.tokens,
            "gateways": sorted(str(peer) for peer in self.state.gateways),
            "workers": {
                str(view.peer): msgspec.to_builtins(view.status)
                for view in self.state.placement.workers.values()
            },
        }

    def holdings(self) -> Holdings:
        """Return what ``baton audit`` compares."""
        return Holdings(
            requests=tuple(
                HeldRequest(
                    request_id=request_id,
                    epoch=entry.epoch,
                    stage=entry.phase.value,
                    gateway=entry.spec.gateway,
                    router=self.state.me,
                    decode=entry.decode,
                    prefill=entry.prefill,
                    window_ms=0 if entry.gateway_lost_at is None else entry.spec.resume_ms,
                )
                for request_id, entry in self.state.entries.items()
            )
        )


def _may_be_left(entry: Entry) -> bool:
    """Return whether nobody needs this router for a request: it runs, or waits for its gateway, and
    its client is away and comes back at another one, which gives it to another router. If nobody
    comes, another router's :class:`OrphanSweep` ends it."""
    away = entry.gateway_lost_at is not None and entry.spec.resume_ms > 0
    return away and entry.phase in (Phase.PLACED, Phase.FENCING, Phase.CLOSING)
