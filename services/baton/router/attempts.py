"""Attempts: placing a request, the ledger's answers, and what follows when an attempt ends.

Decides when a request goes to which epoch. Before an attempt with a higher epoch starts, the
gateway has refused the lower ones and said which ids the client may have seen; the new attempt
continues exactly those. Where it goes is decided in ``placement.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.core.ids import Peer
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.outcomes import Reason
from baton.ports.driving import CallLedger
from baton.ports.ledger import (
    AdmitRequest,
    Adopted,
    AdoptRequest,
    AnyOp,
    Conflict,
    Done,
    PlaceRequest,
    Reply,
    RetryRequest,
    Unavailable,
)
from baton.router.blame import Blames
from baton.router.entry import Entry, Phase
from baton.router.forecasts import Forecasts
from baton.router.moves import Moves
from baton.router.state import State
from baton.router.verdicts import Verdicts
from baton.wire.messages import (
    AssignPrefill,
    DecodeReserved,
    FenceRequest,
    MoveOffered,
    RequestFenced,
    RequestPlaced,
    RequestResumed,
    ReserveDecode,
    WorkAsked,
    WorkFailed,
    WorkRefused,
)

LEDGER_AGAIN_S = 0.2
#: Between a refused placement and the next one; doubles, since each costs an epoch.
REFUSED_PAUSE_S = 0.025
REFUSED_PAUSE_MAX_S = 0.8
QUEUE_WEIGHT = 0.1

#: Pre-empted, or its worker shuts down, cannot reach the gateway or never heard of it.
NOBODYS = (Reason.NO_BLOCKS, Reason.DRAINING, Reason.NO_LINK, Reason.UNKNOWN_ATTEMPT)

#: The transition whose answer each phase waits for; an answer to another one is late.
PENDING: Mapping[Phase, type[object]] = {
    Phase.ADMITTING: AdmitRequest,
    Phase.ADOPTING: AdoptRequest,
    Phase.PLACING: PlaceRequest,
    Phase.RETRYING: RetryRequest,
}


class Attempts:
    """All attempts of one router's requests."""

    def __init__(self, state: State, moves: Moves, verdicts: Verdicts) -> None:
        self.state = state
        self.blames = Blames(state, verdicts)
        self.forecasts = Forecasts(state)
        self.moves = moves
        self.verdicts = verdicts
        self.adopted: Callable[[Entry, Adopted, float], None]
        """What to do with the ledger's answer to an adoption; set by ``adoption.py``."""

    # --- the ledger's answers -----------------------------------------------------------------

    def answered(self, op: AnyOp, reply: Reply | Unavailable, now: float) -> None:
        entry = self._waiting_for(op)
        if entry is None:
            if isinstance(op, AdmitRequest | AdoptRequest) and isinstance(reply, Done | Adopted):
                turn = op.turn if isinstance(op, AdoptRequest) else 0
                self.verdicts.born_late(op.spec.request_id, reply.epoch, turn)
            return
        pending = type(op) is PENDING.get(entry.phase)
        match reply:
            case Unavailable(reason):
                if pending:
                    self._ledger_silent(entry, reason, now)
                elif entry.phase in PENDING:
                    entry.ledger_again = now + LEDGER_AGAIN_S
            case Conflict():
                self._conflict(entry, reply, now)
            case Done():
                assert pending
                entry.ledger_again = None
                self._done(entry, op, reply, now)
            case Adopted():
                if entry.phase is Phase.ADOPTING:
                    entry.ledger_again = None
                    self.adopted(entry, reply, now)
                elif entry.phase in PENDING:
                    self.ask_again(entry, now)  # the record is there again
            case _:
                raise AssertionError(f"{type(reply).__name__} does not answer {type(op).__name__}")

    def _waiting_for(self, op: AnyOp) -> Entry | None:
        """Return the entry that an answer to ``op`` concerns now."""
        match op:
            case AdmitRequest(spec=spec):
                entry = self.state.entries.get(spec.request_id)
                return entry if entry is not None and entry.phase is Phase.ADMITTING else None
            case AdoptRequest(spec=spec, turn=turn):
                entry = self.state.entries.get(spec.request_id)
                stale = entry is None or entry.phase is Phase.CLOSING or entry.turn != turn
                return None if stale else entry
            case PlaceRequest() | RetryRequest():
                entry = self.state.entries.get(op.request_id)
                if entry is None or type(op) is not PENDING.get(entry.phase):
                    return None
                return entry if entry.epoch == op.epoch else None
            case _:
                return None

    def _done(self, entry: Entry, op: AnyOp, reply: Done, now: float) -> None:
        match op:
            case AdmitRequest():
                entry.epoch = reply.epoch
                self.state.measure("requests_admitted_total")
                self.state.measure("prompt_tokens_total", entry.spec.prompt_tokens)
                self.state.note("admitted", entry, prompt_tokens=entry.spec.prompt_tokens)
                if reply.state is RequestState.ADMITTED and reply.epoch == 1:
                    self.enqueue(entry)
                else:
                    self.recover(entry)  # admitted before this router knew of it
            case PlaceRequest():
                self._start_attempt(entry, now)
            case _:
                entry.epoch = reply.epoch
                self.enqueue(entry, front=True)

    def _conflict(self, entry: Entry, reply: Conflict, now: float) -> None:
        """The record says otherwise: it is the truth, unless it is older than what we know."""
        entry.ledger_again = None
        if reply.outcome is not None:
            self.verdicts.ended_already(entry, now, reply.epoch, reply.outcome)
        elif reply.state is None or reply.epoch < entry.epoch or reply.turn < entry.turn:
            self.state.note("record_lost", entry, level="warning", ledger_epoch=reply.epoch)
            self.restore(entry)
        elif entry.restored and reply.turn == entry.turn and entry.phase is Phase.PLACING:
            # It is ours again, placed by a router that did not know it had lost it: not from there.
            self.recover(entry)
        else:
            # Another router answers for it: a verdict from here could end what runs well there. Its
            # gateway may not know, if it is another one's as well.
            self.state.note("superseded", entry, by_epoch=reply.epoch)
            if reply.turn > entry.turn and entry.spec.resume_ms:
                resumed = RequestResumed(entry.spec.request_id, reply.turn)
                self.state.send(entry.spec.gateway, resumed)
            self.verdicts.forget(entry)

    def restore(self, entry: Entry) -> None:
        """Make the record what this router knows, if it is lost or behind: an epoch never goes
        back. A record that is right stays as it is."""
        placed = entry.phase is Phase.PLACED
        workers = (entry.decode, entry.prefill) if placed else ()
        op = AdoptRequest(entry.spec, self.state.me, entry.turn, entry.epoch, *workers)
        entry.restored = True
        self.state.emit(CallLedger(op))

    def restore_what_stands(self, entry: Entry) -> None:
        """The same for an entry that waits for no answer of the ledger: others hear of it."""
        if entry.phase in (Phase.QUEUED, Phase.FENCING, Phase.PLACED):
            self.restore(entry)

    def _ledger_silent(self, entry: Entry, reason: str, now: float) -> None:
        waited_ms = (now - entry.ledger_since) * 1000
        if entry.phase is Phase.ADMITTING and waited_ms > self.state.limits.ledger_wait_ms:
            text = f"the ledger does not answer: {reason}"
            self.verdicts.refuse(entry, now, Reason.LEDGER_UNAVAILABLE, text)
            return
        entry.ledger_again = now + LEDGER_AGAIN_S

    def ask_again(self, entry: Entry, now: float) -> None:
        """Ask for the pending transition, or repeat it: every one is idempotent. Without a lease
        nothing is asked for; it waits."""
        if self.state.lease is not LeaseState.HELD:
            self._ledger_silent(entry, "this router cannot renew its lease", now)
            return
        entry.ledger_again = None
        spec, me, epoch = entry.spec, self.state.me, entry.epoch
        workers = entry.decode, entry.prefill
        op: AnyOp
        match entry.phase:
            case Phase.ADMITTING:
                op = AdmitRequest(spec, me)
            case Phase.ADOPTING:
                op = AdoptRequest(spec, me, entry.turn, epoch, *workers)
            case Phase.RETRYING:
                op = RetryRequest(spec.request_id, epoch, me, len(entry.blames))
            case Phase.PLACING:
                assert entry.decode is not None
                op = PlaceRequest(spec.request_id, epoch, me, entry.decode, entry.prefill)
            case _:
                return
        self.state.emit(CallLedger(op))

    # --- placement ----------------------------------------------------------------------------

    def enqueue(self, entry: Entry, *, front: bool = False) -> None:
        entry.phase = Phase.QUEUED
        entry.decode = entry.prefill = None
        entry.reserved = False
        entry.untold.clear()
        entry.link_due = None
        entry.bypassed = 0
        entry.looked_at = False
        self.state.queue.push(entry, front=front)

    def place_waiting(self, now: float) -> None:
        """Place who comes first; a few may pass one that waits for memory, never for ever."""
        head: Entry | None = None
        waiting = 0
        again = self.state.placement.new_pass(now)
        queue = self.state.queue
        # Between two passes only who is new is looked at: the order of the others is not asked for.
        for entry in self.state.placement.in_order(queue, now) if again else queue:
            if entry.not_before > now:
                continue
            if entry.unmeasured and not self.state.starting(now) and self._measure(entry, now):
                continue
            waits = entry.looked_at and not again
            place = None if waits else self.state.placement.choose(entry, now)
            if place is None:
                entry.looked_at = True
                head = head or entry
                waiting += 1
                bound = self.state.limits.bypass_max
                if head.bypassed >= bound or waiting > bound:
                    return
                continue
            if head is not None:
                head.bypassed += 1
            self.state.queue.remove(entry)
            if not place.reuse:
                self.moves.settled(entry)
            self.state.placement.placed(entry, place)
            self.forecasts.placed(entry, place, now)
            entry.phase = Phase.PLACING
            entry.decode, entry.prefill = place.decode, place.prefill
            entry.expected = place.cached
            entry.ledger_since = now
            self.state.note("chosen", entry, decode=str(place.decode), why=place.why)
            self.ask_again(entry, now)

    def _measure(self, entry: Entry, now: float) -> bool:
        """Cut it to the arenas that are known by now; return whether it is refused because none
        holds it. One that ran somewhere waits for that worker's successor instead."""
        placement = self.state.placement
        entry.unmeasured = not placement.largest_tokens()
        entry.spec = placement.fitted(entry.spec)
        text = None if entry.begun else placement.too_long(entry.spec)
        if text is not None:
            self.verdicts.refuse(entry, now, Reason.TOO_LONG, text)
        return text is not None

    def _start_attempt(self, entry: Entry, now: float) -> None:
        """The attempt is counted: tell everybody."""
        decode, prefill = entry.decode, entry.prefill
        assert decode is not None
        entry.phase = Phase.PLACED
        gone = [
            p for p in (decode, prefill) if p is not None and p not in self.state.placement.workers
        ]
        if gone:
            self.recover(entry, now)
            return
        if not entry.placed_once:
            entry.placed_once = True
            waited = now - entry.arrived
            self.state.queue_s += QUEUE_WEIGHT * (waited - self.state.queue_s)
            self.state.measure("request_queue_seconds", waited)
        entry.recovering_since = None
        self.state.measure("attempts_total")
        source, spec, epoch, turn = entry.source, entry.spec, entry.epoch, entry.turn
        way = {"prefill": str(prefill or "local"), **({"source": source} if source else {})}
        self.state.note("placed", entry, decode=str(decode), **way)
        output, alone = entry.output, entry.suspect
        reserve = ReserveDecode(spec, epoch, prefill, output, source, turn, alone)
        self.state.send(decode, reserve)
        if prefill is not None:
            self.state.send(prefill, AssignPrefill(spec, epoch, decode, output, turn, alone))
        self.tell_placed(entry, now)

    def tell_placed(self, entry: Entry, now: float) -> None:
        assert entry.decode is not None
        self.state.send(
            entry.spec.gateway,
            RequestPlaced(
                request_id=entry.spec.request_id,
                epoch=entry.epoch,
                decode=entry.decode,
                prefill=entry.prefill,
                queued_ms=int((now - entry.arrived) * 1000),
            ),
        )

    def tell_again(self, entry: Entry, now: float) -> None:
        """The gateway is back on another link: what the first one lost is said again."""
        entry.gateway_lost_at, entry.gateway_gone = None, False
        if entry.phase is Phase.PLACED:
            self.tell_placed(entry, now)
        elif entry.phase is Phase.FENCING:
            self._ask_for_fence(entry)
        elif entry.verdict is not None:
            self.state.send(entry.spec.gateway, entry.verdict)

    def ask_decode(self, entry: Entry, now: float) -> None:
        """Nobody has been heard of it for long: without this an entry whose end nobody could tell
        would stay until the deadline."""
        assert entry.decode is not None
        entry.ask_at = now + self.state.limits.lease_ttl_ms / 1000
        asked = WorkAsked(entry.spec.request_id, entry.epoch, entry.turn)
        self.state.send(entry.decode, asked)

    def _placed_entry(self, request_id: str, epoch: int) -> Entry | None:
        entry = self.state.entries.get(request_id)
        if entry is None or entry.epoch != epoch or entry.phase is not Phase.PLACED:
            return None
        return entry

    # --- attempts that end --------------------------------------------------------------------

    def work_refused(self, peer: Peer, message: WorkRefused, now: float) -> None:
        entry = self._placed_entry(message.request_id, message.epoch)
        if entry is None or peer not in (entry.decode, entry.prefill):
            return
        reason, text = message.reason, message.message
        self.state.note("placement_refused", entry, by=str(peer), reason=reason, message=text)
        if reason is Reason.TOO_LONG:
            self.verdicts.cancel_work(entry, reason)
            self.verdicts.refuse(entry, now, reason, text)
            return
        if reason is Reason.KV_MISSING:
            self.moves.settled(entry)  # what could be had from there is in decode's cache now
        elif reason is not Reason.NO_BLOCKS:
            # Another one may have its links and a lease.
            self.state.placement.workers[peer].failed(now)
        entry.refusals += 1
        pause = min(REFUSED_PAUSE_S * 2.0**entry.refusals, REFUSED_PAUSE_MAX_S)
        entry.not_before = now + pause * self.state.jitter(entry)
        self.recover(entry)

    def work_failed(self, peer: Peer, message: WorkFailed, now: float) -> None:
        entry = self._placed_entry(message.request_id, message.epoch)
        if entry is None or peer not in (entry.decode, entry.prefill):
            return
        reason = message.reason
        self.state.measure("attempts_failed_total", reason=reason)
        self.state.note(
            "attempt_failed", entry, by=str(peer), reason=reason, message=message.message
        )
        if not message.retryable:
            self.verdicts.cancel_work(entry, reason)
            self.verdicts.give_up(entry, now, reason, message.message)
            return
        if reason in NOBODYS:
            self.recover(entry)
            return
        if reason is not Reason.WORKER_LOST:
            self.state.placement.workers[peer].failed(now)
        # Of those it works with, decode reports prefill's end alone.
        lost = entry.prefill if reason is Reason.WORKER_LOST else None
        self.attempt_failed(entry, f"{reason}: {message.message}", now, lost)

    def attempt_failed(self, entry: Entry, text: str, now: float, lost: Peer | None = None) -> None:
        """The attempt is over without a result; ``lost`` is the worker whose end that was."""
        self.blames.put(entry, text, now, lost)
        self.recover(entry, now)

    def move_on(self, now: float) -> None:
        """Take a request off a draining worker, if it is its turn."""
        entry = self.moves.next(now)
        if entry is not None:
            self.recover(entry, reason=Reason.MOVED)

    def recover(
        self, entry: Entry, lost_at: float | None = None, reason: Reason = Reason.SUPERSEDED
    ) -> None:
        """Towards the next epoch: first the gateway refuses the old one and says what it holds."""
        self.verdicts.cancel_work(entry, reason)
        self.moves.offered.pop(entry.spec.request_id, None)
        self.state.queue.remove(entry)
        self.state.placement.left(entry)
        entry.phase = Phase.FENCING
        if entry.recovering_since is None:
            entry.recovering_since = lost_at
        self._ask_for_fence(entry)

    def _ask_for_fence(self, entry: Entry) -> None:
        self.state.send(entry.spec.gateway, FenceRequest(entry.spec.request_id, entry.epoch + 1))

    def fenced(self, gateway: Peer, message: RequestFenced, now: float) -> None:
        entry = self.state.entries.get(message.request_id)
        if entry is None or entry.phase is not Phase.FENCING or message.epoch <= entry.epoch:
            return
        if entry.spec.gateway != gateway:
            return  # its client reads elsewhere by now, and has what that gateway says
        if message.epoch > entry.epoch + 1:
            # It was fenced by somebody whose retry the ledger never saw: go on from there.
            entry.epoch = message.epoch - 1
        entry.taken_in |= bool(message.output)
        if not self.blames.fenced(entry, message.output, now):
            return
        entry.phase = Phase.RETRYING
        entry.ledger_since = now
        self.ask_again(entry, now)

    def reserved(self, peer: Peer, message: DecodeReserved) -> None:
        """Decode has its blocks: the placement was right."""
        entry = self._placed_entry(message.request_id, message.epoch)
        if entry is not None and entry.decode == peer:
            entry.reserved = entry.taken_in = True
            entry.refusals = 0
            self.moves.settled(entry)
            self.forecasts.reserved(entry, message.cached_tokens)

    def move_offered(self, peer: Peer, message: MoveOffered) -> None:
        """A draining decode worker would give it away."""
        entry = self._placed_entry(message.request_id, message.epoch)
        if entry is not None and entry.decode == peer:
            self.moves.offer(entry, message)
