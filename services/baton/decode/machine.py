"""The decode machine: takes requests in, receives or computes their KV, generates, lets go.

Decides per request on this worker; placement is the router's, the client's end the gateway's. What
routers say of an attempt is decided in ``attempts.py``, what is taken in in ``admission.py``, the
hand-over in ``handover.py`` and ``joining.py``, what comes from other decode workers in
``imports.py`` and what goes to them in ``departure.py``, batching and memory in ``scheduler.py``,
how a sequence leaves in ``ends.py``, what gateways are sent in ``output.py``, what routers hear of
blocks in ``news.py``; here is who calls whom when. Every message names its epoch; what is older
than the sequence's own is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from baton.core.beacon import Beacon
from baton.core.blocks import BlockPool
from baton.core.events import (
    DrainRequested,
    LeaseChanged,
    PromptsTaken,
    RestartRequested,
    RoleLeft,
    TimePassed,
)
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.core.slo import Slo
from baton.core.step_times import Rehearsed
from baton.decode.admission import Admission
from baton.decode.attempts import Attempts
from baton.decode.departure import Departure
from baton.decode.ends import Ends
from baton.decode.handover import Handover
from baton.decode.holdings import holdings_of
from baton.decode.imports import Imports
from baton.decode.io import BlocksImported, BlocksVerified, StepFailed, StepFinished, WriterProbed
from baton.decode.joining import Joining
from baton.decode.news import BlockNews
from baton.decode.output import Output
from baton.decode.readers import Readers
from baton.decode.scheduler import Scheduler
from baton.decode.sequence import Sequence, Stage
from baton.decode.state import State
from baton.decode.takeover import TakenOver
from baton.decode.view import View
from baton.ports.driving import EXIT_RESTART, EXIT_ROLE, Exit, LedgerAnswered
from baton.ports.ledger import EndRequest, Unavailable
from baton.ports.transport import PeerLost, PeerRefused, PeerUp, Received
from baton.wire.handover import (
    ArenaMapped,
    ArenaRef,
    ChunkAnnounced,
    PrefillCommitted,
    PrefillFailed,
    WriterStopped,
)
from baton.wire.holdings import Holdings
from baton.wire.messages import (
    AnyMessage,
    BlocksWanted,
    CancelWork,
    LastStep,
    RequestEnded,
    ReserveDecode,
    TokensBounded,
    TokensWanted,
    WorkAdopted,
    WorkAsked,
    WorkerStatus,
)

Event = (
    TimePassed
    | LeaseChanged
    | DrainRequested
    | RoleLeft
    | PromptsTaken
    | RestartRequested
    | PeerUp
    | PeerLost
    | PeerRefused
    | Received
    | LedgerAnswered
    | BlocksVerified
    | BlocksImported
    | StepFinished
    | StepFailed
    | WriterProbed
)

EXIT_HUNG = 75


class DecodeMachine:
    """One decode worker. ``Machine[Event, Command]``.

    ``found`` is what it has of the arena, if that was taken over; else all of it is free. ``left``
    is the step that the incarnation before it left. With an ``slo`` a chunk of a prompt beside
    running sequences is as long as their steps may take. ``mixed``: routers may have it compute
    prompts that a prefill worker could. ``rehearsed``: what steps took when the engine was warmed
    up.
    """

    def __init__(
        self,
        me: Peer,
        limits: Limits,
        arena: ArenaRef,
        *,
        blocks_total: int,
        block_size: int,
        block_bytes: int,
        root: bytes,
        slo: Slo | None = None,
        found: TakenOver | None = None,
        left: LastStep | None = None,
        mixed: bool = False,
        rehearsed: Rehearsed = (),
    ) -> None:
        pool = BlockPool(blocks_total) if found is None else found.pool
        assert pool.total == blocks_total
        self.state = State(me, limits, pool, arena, block_size, block_bytes, root, mixed=mixed)
        self.state.figures.steps.rehearsed(rehearsed)
        self.handover = Handover(self.state, {} if found is None else found.quarantined)
        self.scheduler = Scheduler(self.state, self.handover, slo)
        self.imports = Imports(self.state)
        self.output = Output(self.state)
        self.news = BlockNews(self.state)
        self.view = View(self.state, self.handover, self.scheduler, self.news)
        self.readers = Readers(self.state, self.output, self.scheduler)
        self.departure = Departure(self.state)
        self.ends = Ends(self.state, self.handover, self.imports, self.departure)
        self.joining = Joining(self.state, self.handover, self.output, self.readers, self.ends)
        self.attempts = Attempts(
            self.state,
            admission=Admission(self.state, self.handover, self.imports, self.scheduler),
            imports=self.imports,
            output=self.output,
            readers=self.readers,
            ends=self.ends,
        )
        self.left = left
        self.exited = False
        self.exit_code = 0
        """Of the end of a drain."""
        self.leaving = False
        """A successor takes the memory over."""
        self.beat_at = 0.0
        self.beacon = Beacon(limits.lease_renew_ms / 1000, limits.status_pause_ms / 1000)

    # --- Machine ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[object]:
        self.state.commands = []
        self._dispatch(event, now)
        self._after(now)
        return self.state.commands

    def deadline(self) -> float | None:
        times = [self.beat_at, self.beacon.deadline()]
        if self.handover.probe_at is not None:
            times.append(self.handover.probe_at)
        if self.departure.due is not None:
            times.append(self.departure.due)
        if (due := self.news.deadline()) is not None:
            times.append(due)
        return min(times)

    def check(self) -> None:
        self.state.pool.check()
        self.handover.check()
        references: dict[int, int] = {}
        over = [*self.state.pinned, *self.imports.dropped()]
        for seq in [*self.state.sequences.values(), *over]:
            assert seq.computed <= seq.length
            assert seq.stage not in (Stage.FINISHED, Stage.PAUSED) or not seq.blocks
            assert seq.away_since is None or seq.spec.resume_ms
            assert len(seq.blocks) == len(set(seq.blocks))
            for number in seq.blocks:
                references[number] = references.get(number, 0) + 1
        for number, block in enumerate(self.state.pool.blocks):
            assert block.references == references.get(number, 0), f"block {number} is miscounted"
        assert len(self.state.sequences) <= self.state.limits.reservations_max

    # --- events -------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case TimePassed():
                self._tick(now)
            case Received(peer, message):
                self._received(peer, message, now)
            case StepFinished():
                self._step_finished(event, now)
            case StepFailed():
                self._step_failed(event)
            case BlocksVerified():
                self.joining.verified(event, now)
            case BlocksImported():
                self.attempts.imported(event)
            case PeerUp(member):
                self._peer_up(member)
            case PeerLost():
                self._peer_lost(event, now)
            case WriterProbed(incarnation, alive):
                self.handover.probed(incarnation, alive)
            case LeaseChanged(state):
                self.state.lease = state
                self.beacon.forget()
            case DrainRequested():
                self.exit_code = 0
                self._drain(now)
            case RoleLeft():
                self.exit_code = EXIT_ROLE
                self._drain(now)
            case PromptsTaken(mixed):
                self.state.mixed = mixed
            case RestartRequested():
                self._leave()
            case LedgerAnswered(op, reply):
                if isinstance(op, EndRequest) and isinstance(reply, Unavailable):
                    self.state.note("end_not_recorded", request_id=op.request_id, level="warning")
            case PeerRefused():
                pass  # the shell logs it; the pair is simply not used
            case _:
                assert_never(event)

    def _received(self, peer: Peer, message: AnyMessage, now: float) -> None:
        match message:
            case ReserveDecode():
                self.attempts.reserve(peer, message, now)
            case ArenaMapped():
                self.handover.mapped(peer, message)
            case ChunkAnnounced():
                self.joining.announced(peer, message)
            case PrefillCommitted():
                self.joining.committed(peer, message, now)
            case PrefillFailed():
                self.joining.failed(peer, message)
            case WriterStopped():
                self.joining.stopped(peer, message)
            case CancelWork():
                self.ends.cancel_work(message)
            case WorkAdopted():
                self.attempts.adopted(peer, message, now)
            case WorkAsked():
                self.attempts.asked(peer, message)
            case BlocksWanted(start):
                self.news.list_from(peer, start)
            case RequestEnded():
                self.ends.ended(peer, message)
            case TokensBounded():
                self.readers.bounded(peer, message)
            case TokensWanted(request_id, epoch, index):
                self.output.resend(peer, request_id, epoch, index)
            case _:
                self.state.note("unexpected_message", level="warning", kind=type(message).__name__)
                self.state.measure("stale_messages_total", kind="unknown")

    # --- stepping -----------------------------------------------------------------------------

    def _step_finished(self, event: StepFinished, now: float) -> None:
        assert event.step == self.scheduler.step
        seconds, results = event.seconds, event.results
        self.scheduler.learn(now, event.borrowed)
        rows = self.scheduler.end_step()
        tokens = sum(len(row.token_ids) for row, _, _ in rows)
        kind = "mixed" if tokens > len(rows) else "decode"
        self.state.measure("engine_step_seconds", seconds, kind=kind)
        if event.borrowed:
            borrowed_s = seconds * event.borrowed
            self.state.measure("engine_borrowed_seconds_total", borrowed_s, kind=kind)
        self.state.measure("engine_step_tokens", tokens, kind=kind)
        self.state.measure("engine_step_rows", len(rows), kind=kind)
        self.state.measure("generation_tokens_total", sum(one is not None for one in results))
        for (row, seals, seq), sampled, sums in zip(rows, results, event.checksums, strict=True):
            if self.state.sequences.get(row.request_id) is not seq:
                continue  # dropped while the step ran: its blocks are released below
            seq.computed += len(row.token_ids)
            self.state.seal(seals, sums)
            if sampled is None or seq.stage is Stage.MOVED:
                continue
            if seq.stage is Stage.LOCAL:
                seq.stage = Stage.RUNNING
                if seq.running_since is None:
                    seq.running_since = now
                if not seq.sent_first:
                    self.state.advance(seq, RequestState.DECODING)
            if seq.joined_at is not None:
                self.state.measure("first_decode_seconds", now - seq.joined_at)
                seq.joined_at = None
            self.output.emit_token(seq, sampled.token_id, sampled.logprob, now)
            self.readers.pause(seq)
        self.output.step_over()
        self.ends.release_dropped()

    def _step_failed(self, event: StepFailed) -> None:
        """Only the rows that the engine blames end; the others are stepped again in place."""
        assert event.step == self.scheduler.step
        for _, _, seq in self.scheduler.end_step():
            request_id = seq.spec.request_id
            if request_id in event.request_ids and self.state.sequences.get(request_id) is seq:
                self.ends.fail(seq, Reason.DECODE_ERROR, event.error, retryable=event.retryable)
        self.output.step_over()
        self.ends.release_dropped()

    # --- peers and time -----------------------------------------------------------------------

    def _peer_up(self, member: Member) -> None:
        self.state.peers[member.peer] = member
        if member.role is Role.PREFILL:
            self.handover.offer(member.peer)
        if member.role is Role.GATEWAY:
            self.readers.gateway_up(member.peer)
        if member.role is Role.ROUTER:
            self.beacon.forget()
            if self.left is not None:
                self.state.send(member.peer, self.left)

    def _peer_lost(self, event: PeerLost, now: float) -> None:
        peer = event.peer
        member = self.state.peers.pop(peer, None)
        if member is None:
            return
        if member.role is Role.PREFILL:
            for seq in self.handover.writer_lost(peer, now):
                self.ends.fail(seq, Reason.WORKER_LOST, f"{peer} is lost: {event.reason}")
        if member.role is Role.ROUTER:
            for seq in self.departure.router_lost(peer):
                self.ends.drop(seq)
        if member.role is Role.GATEWAY:
            for seq in [s for s in self.state.sequences.values() if s.gateway == peer]:
                self._gateway_lost(seq, event, now)

    def _gateway_lost(self, seq: Sequence, event: PeerLost, now: float) -> None:
        """Its tokens reach nobody from here. If the gateway is over, so is the request, unless it
        may be resumed; otherwise the router knows a way (or finds that it is over)."""
        if not event.gone:
            text = f"{event.peer} cannot be reached: {event.reason}"
            self.ends.fail(seq, Reason.NO_LINK, text)
        elif seq.spec.resume_ms:
            self.readers.away(seq, now)
        else:
            self.ends.end_for_lost_gateway(seq)

    def _drain(self, now: float) -> None:
        if not self.state.draining:
            self.departure.begin(now)
            self.beacon.forget()

    def _end_drain(self) -> None:
        """Time is up: the router places elsewhere what still runs; the memory goes with us."""
        self.departure.due = None
        for seq in list(self.state.sequences.values()):
            self.ends.drop(seq)
            if seq.stage not in (Stage.FINISHED, Stage.MOVED):
                self.state.work_failed(seq, Reason.DRAINING, "this worker is shutting down")
        self._exit_drained()

    def _leave(self) -> None:
        """Stop where we are: the successor takes the memory over and goes on with every sequence.

        What is sent as the end of the step in flight, if there is one, is the last.
        """
        self.leaving = self.state.draining = True
        self.beacon.forget()
        self.state.note("leaving", sequences=len(self.state.sequences))

    def _exit_drained(self) -> None:
        self._exit(self.exit_code, "drained")

    def _exit(self, code: int, reason: str) -> None:
        if not self.exited:
            self.exited = True
            self.state.emit(Exit(code, reason))

    def _tick(self, now: float) -> None:
        self.handover.tick(now)
        limits = self.state.limits
        if self.departure.due is not None and now >= self.departure.due:
            self._end_drain()
        since = self.scheduler.step_since
        if since is not None and now - since > limits.step_hung_ms / 1000:
            self.state.emit(Exit(EXIT_HUNG, f"step {self.scheduler.step} is hung"))
            return
        if now < self.beat_at:
            return
        self.beat_at = now + limits.lease_renew_ms / 1000
        for seq in self.readers.given_up(now):
            self.ends.end_for_lost_gateway(seq)
        keep = limits.terminal_ttl_ms / 1000
        for seq in self.state.live(Stage.FINISHED):
            if seq.away_since is None and now - seq.finished_at > keep:
                self.state.note("end_never_heard", seq, level="warning")
                self.ends.drop(seq)

    def _after(self, now: float) -> None:
        """What every event ends with: next step, tokens out, status, exit when drained."""
        if not self.leaving:
            self.scheduler.start_step(now)
        self.output.flush()
        self.state.flush_marks()
        self._report(now)
        if self.leaving:
            if self.scheduler.step_since is None:
                self.scheduler.forget_step()
                self._exit(EXIT_RESTART, "restart")
            return
        self.departure.offer()
        working = not all(map(self.readers.waits, self.state.sequences.values()))
        held = working or self.handover.tickets or self.imports.running
        if self.state.draining and not held and self.scheduler.step_since is None:
            self._exit_drained()

    def _report(self, now: float) -> None:
        """Tell the routers, at every beat and when what matters to placement has changed."""
        # Growth alone is told with the next beat: the router is not on the token path.
        due = self.beacon.must_tell((*self.view.load(), self.attempts.placements), now)
        self.news.tell(now, at_once=due)
        if not due:
            return
        status = self.worker_status(now)
        for peer, member in self.state.peers.items():
            if member.role is Role.ROUTER:
                self.state.send(peer, status)

    # --- looking in ---------------------------------------------------------------------------

    def worker_status(self, now: float) -> WorkerStatus:
        """Return what routers place by."""
        return self.view.worker_status(now)

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of ``/metrics``."""
        return self.view.gauges()

    def status(self) -> dict[str, object]:
        """Return what ``baton status`` shows."""
        return self.view.status()

    def holdings(self) -> Holdings:
        """Return what ``baton audit`` compares."""
        return holdings_of(self.state, self.handover, self.imports)
