"""The router machine: admits, places, and sees to it that every request it admitted ends.

Decides admission (bounds, reasons, retry-after), placement (``placement.py``) and retries. It is
not on the token path. Before an attempt with a higher epoch starts, the gateway has refused the
lower ones and said which ids the client may have seen; the new attempt continues exactly those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

import msgspec

from baton.core.events import DrainRequested, LeaseChanged, TimePassed
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, Outcome, Reason
from baton.ports.driving import CallLedger, Exit, LedgerAnswered, Measure, Note, Send
from baton.ports.ledger import (
    AdmitRequest,
    AnyOp,
    Conflict,
    Done,
    EndRequest,
    PlaceRequest,
    Reply,
    RetryRequest,
    Unavailable,
)
from baton.ports.transport import PeerLost, PeerRefused, PeerUp, Received
from baton.router.entry import Entry, Phase, WaitingQueue
from baton.router.placement import Placement, WorkerView
from baton.wire.messages import (
    AnyMessage,
    AssignPrefill,
    CancelWork,
    DecodeReserved,
    FenceRequest,
    RequestEnded,
    RequestFailed,
    RequestFenced,
    RequestPlaced,
    RequestRefused,
    RequestSpec,
    ReserveDecode,
    SubmitRequest,
    WorkerStatus,
    WorkFailed,
    WorkRefused,
)

Event = (
    TimePassed
    | LeaseChanged
    | DrainRequested
    | PeerUp
    | PeerLost
    | PeerRefused
    | Received
    | LedgerAnswered
)

TICK_S = 0.05
LEDGER_AGAIN_S = 0.2
#: Between a refused placement and the next one; doubles, since each costs an epoch.
REFUSED_PAUSE_S = 0.025
REFUSED_PAUSE_MAX_S = 0.8
RETRY_AFTER_MIN_MS = 1_000
RETRY_AFTER_MAX_MS = 30_000
QUEUE_WEIGHT = 0.1

#: The transition whose answer each phase waits for; an answer to another one is late.
PENDING: Mapping[Phase, type[object]] = {
    Phase.ADMITTING: AdmitRequest,
    Phase.PLACING: PlaceRequest,
    Phase.RETRYING: RetryRequest,
}


class RouterMachine:
    """One router. ``Machine[Event, Command]``."""

    def __init__(self, me: Peer, limits: Limits, *, local_prefill_max_tokens: int = 0) -> None:
        self.me = me
        self.limits = limits
        self.placement = Placement(limits, local_prefill_max_tokens=local_prefill_max_tokens)
        self.entries: dict[str, Entry] = {}
        self.queue = WaitingQueue()
        self.gateways: set[Peer] = set()
        self.lease = LeaseState.VACANT
        self.draining = False
        self.drain_due: float | None = None
        self.exited = False
        self.commands: list[object] = []
        self.queue_s = 0.0
        """Moving mean of the time from admission to placement: what Retry-After rests on."""
        self.tick_at: float | None = None

    # --- Machine ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[object]:
        self.commands = []
        self._dispatch(event, now)
        self._place_waiting(now)
        if not self.entries:
            self.tick_at = None
        elif self.tick_at is None:
            self.tick_at = now + TICK_S
        if self.draining and not self.entries:
            self._exit_drained()
        return self.commands

    def deadline(self) -> float | None:
        times = [time for time in (self.tick_at, self.drain_due) if time is not None]
        return min(times, default=None)

    def check(self) -> None:
        queued = [entry for entry in self.entries.values() if entry.phase is Phase.QUEUED]
        assert len(self.queue) == len(queued)
        assert self.queue.tokens == sum(entry.spec.prompt_tokens for entry in queued)
        assert self.queue.tokens >= 0
        for entry in self.entries.values():
            assert (entry.phase is not Phase.PLACED) or entry.decode is not None
            assert entry.epoch >= 1

    def _emit(self, command: object) -> None:
        self.commands.append(command)

    def _send(self, peer: Peer, message: AnyMessage) -> None:
        if peer in self.gateways or peer in self.placement.workers:
            self._emit(Send(peer, message))

    def _note(self, event: str, entry: Entry, level: str = "info", **fields: object) -> None:
        ids = {"request_id": entry.spec.request_id, "epoch": entry.epoch}
        self._emit(Note(event, {**ids, **fields}, level))

    def _measure(self, name: str, value: float = 1.0, **labels: str) -> None:
        self._emit(Measure(name, value, labels))

    # --- events -------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case TimePassed():
                self._tick(now)
            case Received(peer, message):
                self._received(peer, message, now)
            case LedgerAnswered(op, reply):
                self._answered(op, reply, now)
            case PeerUp(member):
                self._peer_up(member, now)
            case PeerLost():
                self._peer_lost(event, now)
            case LeaseChanged(state):
                self.lease = state
            case DrainRequested():
                self._drain(now)
            case PeerRefused():
                pass  # the shell logs it; the pair is simply not used
            case _:
                assert_never(event)

    def _received(self, peer: Peer, message: AnyMessage, now: float) -> None:
        match message:
            case SubmitRequest(spec):
                self._submit(peer, spec, now)
            case RequestEnded(request_id, epoch, outcome):
                self._ended(request_id, outcome)
            case RequestFenced(request_id, epoch, output):
                self._fenced(request_id, epoch, output, now)
            case WorkerStatus():
                view = self.placement.workers.get(peer)
                if view is not None:
                    view.refresh(message)
            case DecodeReserved(request_id, epoch):
                entry = self._placed_entry(request_id, epoch)
                if entry is not None and entry.decode == peer:
                    entry.reserved = True
                    entry.refusals = 0
                    self.placement.workers[peer].succeeded()
            case WorkRefused():
                self._work_refused(peer, message, now)
            case WorkFailed():
                self._work_failed(peer, message, now)
            case _:
                self._emit(Measure("stale_messages_total", 1, {"kind": "unknown"}))
                self._emit(Note("unexpected_message", {"kind": type(message).__name__}, "warning"))

    # --- admission ----------------------------------------------------------------------------

    def _submit(self, gateway: Peer, spec: RequestSpec, now: float) -> None:
        entry = self.entries.get(spec.request_id)
        if entry is not None:
            self._tell_again(entry, now)
            return
        refusal = self._why_not(spec)
        if refusal is not None:
            reason, text = refusal
            self._measure("requests_refused_total", reason=reason)
            self._emit(
                Note("refused", {"request_id": spec.request_id, "reason": reason, "message": text})
            )
            self._send(
                gateway,
                RequestRefused(spec.request_id, reason, text, self._retry_after_ms(reason)),
            )
            return
        largest = self.placement.largest_tokens()
        if spec.open_ended and spec.prompt_tokens + spec.max_tokens > largest:
            spec = msgspec.structs.replace(spec, max_tokens=largest - spec.prompt_tokens)
        entry = Entry.create(spec, now)
        self.entries[spec.request_id] = entry
        self._emit(CallLedger(AdmitRequest(spec, self.me)))

    def _why_not(self, spec: RequestSpec) -> tuple[Reason, str] | None:
        limits = self.limits
        if self.draining:
            return Reason.DRAINING, "this router is draining"
        if self.lease is not LeaseState.HELD:
            return Reason.LEDGER_UNAVAILABLE, "the ledger cannot be reached"
        largest = self.placement.largest_tokens()
        if not largest:
            return Reason.NO_DECODE_WORKER, "no decode worker is up"
        waiting = [
            entry.spec.prompt_tokens
            for entry in self.entries.values()
            if entry.phase not in (Phase.PLACED, Phase.CLOSING)
        ]
        if len(waiting) >= limits.queue_requests_max:
            return Reason.OVERLOADED, f"{len(waiting)} requests are waiting"
        if sum(waiting) + spec.prompt_tokens > limits.queue_tokens_max:
            return Reason.OVERLOADED, f"{sum(waiting)} prompt tokens are waiting"
        needed = spec.prompt_tokens + (1 if spec.open_ended else spec.max_tokens)
        if needed > largest:
            return (
                Reason.TOO_LONG,
                f"prompt and answer need {needed} tokens, the largest arena holds {largest}",
            )
        return None

    def _retry_after_ms(self, reason: Reason) -> int:
        if reason is Reason.TOO_LONG:
            return 0
        return int(min(max(RETRY_AFTER_MIN_MS, self.queue_s * 1000), RETRY_AFTER_MAX_MS))

    # --- the ledger's answers -----------------------------------------------------------------

    def _answered(self, op: AnyOp, reply: Reply | Unavailable, now: float) -> None:
        if not isinstance(op, AdmitRequest | PlaceRequest | RetryRequest):
            return
        request_id = op.spec.request_id if isinstance(op, AdmitRequest) else op.request_id
        entry = self.entries.get(request_id)
        if entry is None or type(op) is not PENDING.get(entry.phase):
            return
        if not isinstance(op, AdmitRequest) and op.epoch != entry.epoch:
            return
        match reply:
            case Unavailable(reason):
                self._ledger_silent(entry, reason, now)
            case Done():
                entry.ledger_again = None
                self._done(entry, op, reply, now)
            case Conflict():
                entry.ledger_again = None
                self._conflict(entry, op, reply, now)
            case _:
                raise AssertionError(f"{type(reply).__name__} does not answer {type(op).__name__}")

    def _done(
        self, entry: Entry, op: AdmitRequest | PlaceRequest | RetryRequest, reply: Done, now: float
    ) -> None:
        match op:
            case AdmitRequest():
                entry.epoch = reply.epoch
                self._measure("requests_admitted_total")
                self._measure("prompt_tokens_total", entry.spec.prompt_tokens)
                self._note("admitted", entry, prompt_tokens=entry.spec.prompt_tokens)
                if reply.state is RequestState.ADMITTED and reply.epoch == 1:
                    self._enqueue(entry)
                else:
                    self._recover(entry)  # admitted before this router knew of it
            case PlaceRequest():
                self._start_attempt(entry, now)
            case RetryRequest():
                entry.epoch = reply.epoch
                self._enqueue(entry, front=True)

    def _conflict(
        self,
        entry: Entry,
        op: AdmitRequest | PlaceRequest | RetryRequest,
        reply: Conflict,
        now: float,
    ) -> None:
        """The record says otherwise: it is the truth."""
        if reply.outcome is not None:
            self._note("already_ended", entry, ending=reply.outcome.ending)
            self._forget(entry)
        elif reply.state is None:
            self._give_up(entry, now, Reason.INTERNAL, "the ledger has lost this request")
        elif isinstance(op, AdmitRequest):
            # Its router is gone (the gateway asked here): go on with the next epoch.
            entry.epoch = reply.epoch
            self._recover(entry)
        else:
            self._superseded(entry, reply.epoch)

    def _superseded(self, entry: Entry, epoch: int) -> None:
        """Another router went on with it, and answers for it: a verdict from here could end what
        runs well there."""
        self._note("superseded", entry, by_epoch=epoch)
        self._forget(entry)

    def _ledger_silent(self, entry: Entry, reason: str, now: float) -> None:
        waited_ms = (now - entry.ledger_since) * 1000
        if entry.phase is Phase.ADMITTING and waited_ms > self.limits.ledger_wait_ms:
            text = f"the ledger does not answer: {reason}"
            self._refuse(entry, now, Reason.LEDGER_UNAVAILABLE, text)
            return
        entry.ledger_again = now + LEDGER_AGAIN_S

    def _ask_again(self, entry: Entry) -> None:
        """Repeat the pending transition: every one is idempotent."""
        entry.ledger_again = None
        request_id = entry.spec.request_id
        match entry.phase:
            case Phase.ADMITTING:
                self._emit(CallLedger(AdmitRequest(entry.spec, self.me)))
            case Phase.RETRYING:
                self._emit(CallLedger(RetryRequest(request_id, entry.epoch, self.me)))
            case Phase.PLACING:
                assert entry.decode is not None
                self._emit(
                    CallLedger(
                        PlaceRequest(request_id, entry.epoch, self.me, entry.decode, entry.prefill)
                    )
                )
            case _:
                pass

    # --- placement ----------------------------------------------------------------------------

    def _enqueue(self, entry: Entry, *, front: bool = False) -> None:
        entry.phase = Phase.QUEUED
        entry.decode = entry.prefill = None
        entry.reserved = False
        entry.bypassed = 0
        self.queue.push(entry, front=front)

    def _place_waiting(self, now: float) -> None:
        """Place from the head; a few may pass one that waits for memory, never for ever."""
        head: Entry | None = None
        for entry in self.queue:
            if entry.not_before > now:
                continue
            place = self.placement.choose(entry, now)
            if place is None:
                head = head or entry
                if head.bypassed >= self.limits.bypass_max:
                    return
                continue
            if head is not None:
                head.bypassed += 1
            self.queue.remove(entry)
            self.placement.placed(entry, place)
            entry.phase = Phase.PLACING
            entry.decode, entry.prefill = place.decode, place.prefill
            entry.ledger_since = now
            self._ask_again(entry)

    def _start_attempt(self, entry: Entry, now: float) -> None:
        """The attempt is counted: tell everybody."""
        decode, prefill = entry.decode, entry.prefill
        assert decode is not None
        entry.phase = Phase.PLACED
        gone = [p for p in (decode, prefill) if p is not None and p not in self.placement.workers]
        if gone:
            self._recover(entry, now)
            return
        if not entry.placed_once:
            entry.placed_once = True
            waited = now - entry.arrived
            self.queue_s += QUEUE_WEIGHT * (waited - self.queue_s)
            self._measure("request_queue_seconds", waited)
        entry.recovering_since = None
        self._measure("attempts_total")
        self._note("placed", entry, decode=str(decode), prefill=str(prefill or "local"))
        self._send(decode, ReserveDecode(entry.spec, entry.epoch, prefill, entry.output))
        if prefill is not None:
            self._send(prefill, AssignPrefill(entry.spec, entry.epoch, decode, entry.output))
        self._tell_placed(entry, now)

    def _tell_placed(self, entry: Entry, now: float) -> None:
        assert entry.decode is not None
        self._send(
            entry.spec.gateway,
            RequestPlaced(
                request_id=entry.spec.request_id,
                epoch=entry.epoch,
                decode=entry.decode,
                prefill=entry.prefill,
                queued_ms=int((now - entry.arrived) * 1000),
            ),
        )

    def _placed_entry(self, request_id: str, epoch: int) -> Entry | None:
        entry = self.entries.get(request_id)
        if entry is None or entry.epoch != epoch or entry.phase is not Phase.PLACED:
            return None
        return entry

    # --- attempts that end --------------------------------------------------------------------

    def _work_refused(self, peer: Peer, message: WorkRefused, now: float) -> None:
        entry = self._placed_entry(message.request_id, message.epoch)
        if entry is None or peer not in (entry.decode, entry.prefill):
            return
        reason, text = message.reason, message.message
        self._note("placement_refused", entry, by=str(peer), reason=reason, message=text)
        if reason is Reason.TOO_LONG:
            self._cancel_work(entry, reason)
            self._refuse(entry, now, reason, text)
            return
        if reason is not Reason.NO_BLOCKS:
            self.placement.workers[peer].failed(now)  # another one may have its links and a lease
        entry.refusals += 1
        entry.not_before = now + min(REFUSED_PAUSE_S * 2.0**entry.refusals, REFUSED_PAUSE_MAX_S)
        self._recover(entry)

    def _work_failed(self, peer: Peer, message: WorkFailed, now: float) -> None:
        entry = self._placed_entry(message.request_id, message.epoch)
        if entry is None or peer not in (entry.decode, entry.prefill):
            return
        reason = message.reason
        self._measure("attempts_failed_total", reason=reason)
        self._note("attempt_failed", entry, by=str(peer), reason=reason, message=message.message)
        if not message.retryable:
            self._cancel_work(entry, reason)
            self._give_up(entry, now, reason, message.message)
            return
        if reason in (Reason.NO_BLOCKS, Reason.DRAINING):
            self._recover(entry)  # pre-empted, or its worker shuts down: nobody failed
            return
        if reason is not Reason.WORKER_LOST:
            self.placement.workers[peer].failed(now)
        self._attempt_failed(entry, f"{reason}: {message.message}", now)

    def _attempt_failed(self, entry: Entry, text: str, now: float) -> None:
        entry.failures += 1
        if entry.failures >= self.limits.attempts_max:
            self._cancel_work(entry, Reason.ATTEMPTS_EXHAUSTED)
            self._give_up(
                entry,
                now,
                Reason.ATTEMPTS_EXHAUSTED,
                f"{entry.failures} attempts failed, the last one: {text}",
            )
            return
        self._recover(entry, now)

    def _recover(self, entry: Entry, lost_at: float | None = None) -> None:
        """Towards the next epoch: first the gateway refuses the old one and says what it holds."""
        self._cancel_work(entry, Reason.SUPERSEDED)
        self.queue.remove(entry)
        entry.phase = Phase.FENCING
        if entry.recovering_since is None:
            entry.recovering_since = lost_at
        self._ask_for_fence(entry)

    def _ask_for_fence(self, entry: Entry) -> None:
        self._send(entry.spec.gateway, FenceRequest(entry.spec.request_id, entry.epoch + 1))

    def _fenced(self, request_id: str, epoch: int, output: bytes, now: float) -> None:
        entry = self.entries.get(request_id)
        if entry is None or entry.phase is not Phase.FENCING or epoch <= entry.epoch:
            return
        if epoch > entry.epoch + 1:
            self._superseded(entry, epoch)
            return
        entry.output = output
        entry.phase = Phase.RETRYING
        entry.ledger_since = now
        self._ask_again(entry)

    def _cancel_work(self, entry: Entry, reason: Reason) -> None:
        if entry.phase is not Phase.PLACED:
            return
        for peer in (entry.decode, entry.prefill):
            if peer is not None:
                self._send(peer, CancelWork(entry.spec.request_id, entry.epoch, reason))

    # --- requests that end --------------------------------------------------------------------

    def _refuse(self, entry: Entry, now: float, reason: Reason, text: str) -> None:
        """Nothing was computed, and nothing will be: the client may come again.

        What the gateway takes for running (it was placed or fenced before) can only fail."""
        if entry.begun:
            self._give_up(entry, now, reason, text)
            return
        self._measure("requests_refused_total", reason=reason)
        self._note("refused", entry, reason=reason, message=text)
        retry_after_ms = self._retry_after_ms(reason)
        verdict = RequestRefused(entry.spec.request_id, reason, text, retry_after_ms)
        self._close(entry, verdict, now)

    def _give_up(
        self,
        entry: Entry,
        now: float,
        reason: Reason,
        text: str,
        ending: Ending = Ending.FAILED,
    ) -> None:
        self._note("given_up", entry, level="warning", reason=reason, message=text)
        outcome = Outcome(ending, reason=reason, message=text)
        # A gateway that was fenced refuses what is below its fence, verdicts too.
        epoch = entry.epoch + (entry.phase in (Phase.FENCING, Phase.RETRYING))
        self._close(entry, RequestFailed(entry.spec.request_id, epoch, outcome), now)

    def _close(self, entry: Entry, verdict: RequestRefused | RequestFailed, now: float) -> None:
        """Kept until the gateway says how it ended, so that a repeated submit starts nothing; at
        most as long as the ledger's record would answer that as well."""
        self.queue.remove(entry)
        entry.phase = Phase.CLOSING
        entry.closed_at = now
        entry.verdict = verdict
        self._send(entry.spec.gateway, verdict)

    def _ended(self, request_id: str, outcome: Outcome) -> None:
        entry = self.entries.get(request_id)
        if entry is None:
            return
        if outcome.ending is not Ending.COMPLETED:
            # The gateway may not know yet whom this was given to.
            self._cancel_work(entry, outcome.reason or Reason.CLIENT_CANCELLED)
        self._note("ended", entry, ending=outcome.ending)
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        self.queue.remove(entry)
        self.entries.pop(entry.spec.request_id, None)

    # --- peers and time -----------------------------------------------------------------------

    def _peer_up(self, member: Member, now: float) -> None:
        if member.role is Role.GATEWAY:
            self.gateways.add(member.peer)
            for entry in self._of_gateway(member.peer):
                self._tell_again(entry, now)
        elif member.role in (Role.DECODE, Role.PREFILL):
            self.placement.workers[member.peer] = WorkerView(
                member.peer, member.role, WorkerStatus(accepting=False)
            )

    def _of_gateway(self, gateway: Peer) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.spec.gateway == gateway]

    def _tell_again(self, entry: Entry, now: float) -> None:
        """The gateway is back on another link: what the first one lost is said again."""
        entry.gateway_lost_at = None
        if entry.phase is Phase.PLACED:
            self._tell_placed(entry, now)
        elif entry.phase is Phase.FENCING:
            self._ask_for_fence(entry)
        elif entry.verdict is not None:
            self._send(entry.spec.gateway, entry.verdict)

    def _peer_lost(self, event: PeerLost, now: float) -> None:
        peer = event.peer
        if peer in self.gateways:
            self.gateways.discard(peer)
            for entry in self._of_gateway(peer):
                entry.gateway_lost_at = now
                if event.gone:
                    self._end_for_lost_gateway(entry)
            return
        if peer not in self.placement.workers:
            return
        self.placement.forget(peer)
        # A lost prefill worker is decode's to report: it alone knows whether the commit came.
        for entry in list(self.entries.values()):
            if entry.phase is Phase.PLACED and entry.decode == peer:
                self._measure("attempts_failed_total", reason=Reason.WORKER_LOST)
                self._note("worker_lost", entry, by=str(peer), message=event.reason)
                self._attempt_failed(entry, f"{peer} is lost: {event.reason}", now)

    def _end_for_lost_gateway(self, entry: Entry) -> None:
        outcome = Outcome(Ending.CANCELLED, reason=Reason.GATEWAY_LOST)
        self._note("ended", entry, ending=outcome.ending, reason=Reason.GATEWAY_LOST)
        self._cancel_work(entry, Reason.GATEWAY_LOST)
        self._emit(CallLedger(EndRequest(entry.spec.request_id, entry.epoch, outcome, self.me)))
        self._forget(entry)

    def _drain(self, now: float) -> None:
        """Refuse what was not placed yet; see the rest through."""
        if self.draining:
            return
        self.draining = True
        self.drain_due = now + self.limits.drain_ms / 1000
        self._refuse_all(now, Phase.ADMITTING, Phase.QUEUED)

    def _end_drain(self, now: float) -> None:
        """Time is up: running requests go on without their router."""
        self.drain_due = None
        self._refuse_all(now, *(set(Phase) - {Phase.PLACED, Phase.CLOSING}))
        self._exit_drained()

    def _refuse_all(self, now: float, *phases: Phase) -> None:
        for entry in list(self.entries.values()):
            if entry.phase in phases:
                self._refuse(entry, now, Reason.DRAINING, "this router is draining")

    def _exit_drained(self) -> None:
        if not self.exited:
            self.exited = True
            self._emit(Exit(0, "drained"))

    def _tick(self, now: float) -> None:
        self.tick_at = None
        if self.drain_due is not None and now >= self.drain_due:
            self._end_drain(now)
        for entry in list(self.entries.values()):
            self._check_time(entry, now)

    def _check_time(self, entry: Entry, now: float) -> None:
        limits = self.limits
        lost_at = entry.gateway_lost_at
        away_ms = 0.0 if lost_at is None else (now - lost_at) * 1000
        if away_ms > limits.recovery_ms and entry.phase is not Phase.PLACED:
            # What is placed runs on: its tokens do not come this way.
            self._end_for_lost_gateway(entry)
            return
        if entry.phase is Phase.CLOSING:
            if (now - entry.closed_at) * 1000 > limits.terminal_ttl_ms:
                self._note("end_never_heard", entry, level="warning")
                self._forget(entry)
            return
        if entry.ledger_again is not None and now >= entry.ledger_again:
            self._ask_again(entry)
        age_ms = (now - entry.arrived) * 1000
        since = entry.recovering_since
        if age_ms > min(entry.spec.deadline_ms, limits.request_deadline_ms):
            self._cancel_work(entry, Reason.DEADLINE)
            text = "the request's deadline passed"
            self._give_up(entry, now, Reason.DEADLINE, text, Ending.EXPIRED)
        elif since is not None and (now - since) * 1000 > limits.recovery_ms and self._alone():
            self._cancel_work(entry, Reason.WORKER_LOST)
            text = "its worker was lost and no other could take over"
            self._give_up(entry, now, Reason.WORKER_LOST, text)
        elif not entry.placed_once and age_ms > limits.recovery_ms and self._alone():
            self._refuse(entry, now, Reason.NO_DECODE_WORKER, "no decode worker is up")
        elif not entry.placed_once and age_ms > limits.queue_deadline_ms:
            self._refuse(entry, now, Reason.OVERLOADED, "it waited too long for a place")

    def _alone(self) -> bool:
        """Whether no decode worker could take anything, however long one waits."""
        return not any(view.status.accepting for view in self.placement.of(Role.DECODE))

    # --- looking in ---------------------------------------------------------------------------

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of ``/metrics``."""
        phases = [entry.phase for entry in self.entries.values()]
        placed = phases.count(Phase.PLACED)
        return {
            "num_requests_running": float(placed),
            "num_requests_waiting": float(len(phases) - placed - phases.count(Phase.CLOSING)),
            "queue_tokens": float(self.queue.tokens),
        }

    def status(self) -> dict[str, object]:
        """Return what ``baton status`` shows."""
        phases = [entry.phase for entry in self.entries.values()]
        return {
            "lease": self.lease.value,
            "draining": self.draining,
            "requests": {phase.value: phases.count(phase) for phase in Phase},
            "queue_tokens": self.queue.tokens,
            "gateways": sorted(str(peer) for peer in self.gateways),
            "workers": {
                str(view.peer): msgspec.to_builtins(view.status)
                for view in self.placement.workers.values()
            },
        }
