"""The decode machine: takes requests in, receives or computes their KV, generates, lets go.

Decides per request on this worker; placement is the router's, the client's end the gateway's. What
is taken in is decided in ``admission.py``, the hand-over in ``handover.py``, what comes from other
decode workers in ``imports.py`` and what goes to them in ``departure.py``, batching and memory in
``scheduler.py``, what gateways are sent in ``output.py``, what routers hear of blocks in
``news.py``; here is who calls whom when. Every message names its epoch; what is older than the
sequence's own is dropped.
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
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, Outcome, Reason
from baton.core.slo import Slo
from baton.decode.admission import Admission
from baton.decode.departure import MOVABLE, Departure
from baton.decode.handover import Handover
from baton.decode.holdings import holdings_of
from baton.decode.imports import Imports
from baton.decode.io import (
    BlocksImported,
    BlocksVerified,
    StepFailed,
    StepFinished,
    WriterProbed,
)
from baton.decode.news import BlockNews
from baton.decode.output import Output
from baton.decode.readers import Readers
from baton.decode.scheduler import Scheduler
from baton.decode.sequence import Sequence, Stage
from baton.decode.state import State
from baton.decode.takeover import TakenOver
from baton.decode.view import View
from baton.ports.driving import EXIT_RESTART, EXIT_ROLE, CallLedger, Exit, LedgerAnswered
from baton.ports.ledger import AdvanceRequest, EndRequest, Unavailable
from baton.ports.transport import PeerLost, PeerRefused, PeerUp, Received
from baton.wire.holdings import Holdings
from baton.wire.messages import (
    ID_BYTES,
    AnyMessage,
    ArenaMapped,
    ArenaRef,
    BlocksWanted,
    CancelWork,
    ChunkAnnounced,
    DecodeReserved,
    LastStep,
    PrefillCommitted,
    PrefillFailed,
    RequestEnded,
    ReserveDecode,
    TokensBounded,
    TokensWanted,
    WorkAdopted,
    WorkAsked,
    WorkerStatus,
    WorkFailed,
    WriterStopped,
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
    prompts that a prefill worker could.
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
    ) -> None:
        pool = BlockPool(blocks_total) if found is None else found.pool
        assert pool.total == blocks_total
        self.state = State(me, limits, pool, arena, block_size, block_bytes, root, mixed=mixed)
        self.handover = Handover(self.state, {} if found is None else found.quarantined)
        self.scheduler = Scheduler(self.state, self.handover, slo)
        self.imports = Imports(self.state)
        self.admission = Admission(self.state, self.handover, self.imports, self.scheduler)
        self.output = Output(self.state)
        self.news = BlockNews(self.state)
        self.view = View(self.state, self.handover, self.scheduler, self.news)
        self.readers = Readers(self.state, self.output, self.scheduler)
        self.departure = Departure(self.state)
        self.left = left
        self.exited = False
        self.exit_code = 0
        """Of the end of a drain."""
        self.leaving = False
        """A successor takes the memory over."""
        self.arrivals = 0
        self.placements = 0
        """Heard of, taken in or not: a router counts each as load until the next status."""
        self.beat_at = 0.0
        self.beacon = Beacon(limits.lease_renew_ms / 1000, limits.status_pause_ms / 1000)
        self.commits: dict[tuple[str, int], float] = {}

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
                self._verified(event, now)
            case BlocksImported():
                self._imported(event, now)
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
                self._reserve(peer, message, now)
            case ArenaMapped():
                self.handover.mapped(peer, message)
            case ChunkAnnounced(request_id, epoch):
                self._complain(request_id, epoch, self.handover.announced(peer, message))
            case PrefillCommitted(request_id, epoch):
                self._complain(request_id, epoch, self.handover.committed(peer, message))
                self._join_if_complete(request_id, epoch, now)
            case PrefillFailed(request_id, epoch, reason, text, retryable):
                seq = self.handover.stopped(peer, (request_id, epoch))
                self._attempt_over(seq, reason, text, retryable=retryable)
            case WriterStopped(request_id, epoch):
                # Unasked: it was cancelled over another link, and so will this worker be.
                seq = self.handover.stopped(peer, (request_id, epoch))
                self._attempt_over(seq, Reason.FENCED, f"{peer} stopped")
            case CancelWork():
                self._cancel_work(message)
            case WorkAdopted():
                self._adopted(peer, message, now)
            case WorkAsked():
                self._asked(peer, message)
            case BlocksWanted(start):
                self.news.list_from(peer, start)
            case RequestEnded():
                self._ended(peer, message)
            case TokensBounded():
                self.readers.bounded(peer, message)
            case TokensWanted(request_id, epoch, index):
                self.output.resend(peer, request_id, epoch, index)
            case _:
                self.state.note("unexpected_message", level="warning", kind=type(message).__name__)
                self.state.measure("stale_messages_total", kind="unknown")

    # --- taking in ----------------------------------------------------------------------------

    def _reserve(self, router: Peer, message: ReserveDecode, now: float) -> None:
        self.placements += 1
        spec, epoch = message.spec, message.epoch
        known = self.state.sequences.get(spec.request_id)
        if known is not None and known.epoch >= epoch:
            if known.epoch == epoch and known.turn < message.turn:
                # It was placed once more: the ledger had lost that it was, and where.
                held = len(message.output) // ID_BYTES
                whom = message.turn, spec.gateway, held
                adopted = WorkAdopted(spec.request_id, epoch, *whom)
                self._adopted(router, adopted, now)
            if known.epoch > epoch:
                text = f"epoch {known.epoch} is here"
                self.admission.refuse(router, spec.request_id, epoch, Reason.STALE_EPOCH, text)
            return
        if known is not None:
            self._drop(known)
        refusal = self.admission.why_not(message)
        if refusal is not None:
            self.admission.refuse(router, spec.request_id, epoch, *refusal)
            return
        self.arrivals += 1
        seq = Sequence.create(
            message, router, order=self.arrivals, block_size=self.state.block_size
        )
        if seq.finish is None:
            refusal = self.admission.take_in(seq, message.prefill, message.source)
            if refusal is not None:
                self.admission.refuse(router, spec.request_id, epoch, *refusal)
                return
        self.state.sequences[spec.request_id] = seq
        self.readers.begin(seq, now)
        self.state.measure("prefix_cache_queries_total", seq.length)
        self.state.measure("prefix_cache_hits_total", seq.cached_tokens)
        if seq.finish is not None:
            # Only the word that it is complete was missing.
            self._reserved(seq)
            self.output.queue_run(seq, seq.held)
            self.output.finish(seq, now)
        elif seq.stage is not Stage.IMPORTING:
            if seq.forced or message.source:
                self.state.recovered(seq, self._way(seq, message))
            self._reserved(seq)

    def _way(self, seq: Sequence, message: ReserveDecode) -> str:
        if seq.stage is Stage.REMOTE:
            return "prefill"
        return "take_over" if message.source == self.state.me.worker_id else "local"

    def _reserved(self, seq: Sequence) -> None:
        reserved = DecodeReserved(seq.spec.request_id, seq.epoch, seq.cached_tokens)
        self.state.send(seq.router, reserved)

    def _imported(self, event: BlocksImported, now: float) -> None:
        """Go on from what came; if too much is missing, the router gives it to prefill first."""
        seq = self.imports.finished(event)
        if seq is None:
            return
        seq.stage = Stage.LOCAL
        refusal = self.admission.too_much(seq)
        if refusal is not None and seq.router in self.state.peers:
            self._drop(seq)
            self.admission.refuse(seq.router, *seq.key, *refusal)
            return
        self.state.recovered(seq, "import" if event.sums else "local")
        self._reserved(seq)

    def _adopted(self, router: Peer, message: WorkAdopted, now: float) -> None:
        """Another router answers for the attempt from now on; without one here it has to know."""
        request_id, epoch = message.request_id, message.epoch
        seq = self.state.sequences.get(request_id)
        if seq is not None and seq.epoch == epoch and seq.stage is Stage.MOVED:
            self._drop(seq)  # its router took it away, and did not come to place it elsewhere
            seq = None
        mine = seq is not None and seq.epoch == epoch and seq.turn <= message.turn
        if seq is not None and mine and not self.readers.adopted(seq, message, now):
            self._drop(seq)  # it is computed again, with all that its gateway has to be told
            seq = None
        if seq is None or seq.epoch < epoch:
            self._unknown(router, request_id, epoch)
        elif seq.epoch == epoch and seq.turn <= message.turn:
            seq.router, seq.turn, seq.offered = router, message.turn, False
            if seq.stage is not Stage.IMPORTING:
                self._reserved(seq)

    def _asked(self, router: Peer, message: WorkAsked) -> None:
        """A router that cannot see the gateway asks: whoever ended it here may have told nobody
        else before it died."""
        seq = self.state.sequences.get(message.request_id)
        if seq is None or seq.epoch != message.epoch or seq.turn > message.turn:
            self._unknown(router, message.request_id, message.epoch)

    def _unknown(self, router: Peer, request_id: str, epoch: int) -> None:
        text = f"{self.state.me} has no such attempt"
        self.state.send(router, WorkFailed(request_id, epoch, Reason.UNKNOWN_ATTEMPT, text))

    # --- the hand-over ------------------------------------------------------------------------

    def _attempt_over(
        self, seq: Sequence | None, reason: Reason, text: str, *, retryable: bool = True
    ) -> None:
        if seq is not None:
            self._drop(seq)
            self.state.work_failed(seq, reason, text, retryable=retryable)

    def _complain(self, request_id: str, epoch: int, wrong: str | None) -> None:
        """A message that does not fit its ticket ends the attempt: never guess."""
        seq = self.state.sequences.get(request_id)
        if wrong is None or seq is None or seq.epoch != epoch:
            return
        self._integrity(seq, wrong)

    def _integrity(self, seq: Sequence, text: str) -> None:
        self.state.measure("integrity_failures_total")
        self._drop(seq)
        self.state.work_failed(seq, Reason.INTEGRITY, text)

    def _verified(self, event: BlocksVerified, now: float) -> None:
        self.state.measure("verify_seconds", event.seconds)
        seq = self.state.sequences.get(event.request_id)
        if seq is None or seq.epoch != event.epoch or seq.stage is not Stage.REMOTE:
            return
        bad = set(event.bad)
        good = [check for check in event.checks if check.logical not in bad]
        self.handover.verified(event.request_id, event.epoch, good, now)
        if bad:
            self._integrity(seq, f"checksum of blocks {sorted(bad)} does not match")
            return
        self._join_if_complete(event.request_id, event.epoch, now)

    def _join_if_complete(self, request_id: str, epoch: int, now: float) -> None:
        seq = self.state.sequences.get(request_id)
        if seq is None or seq.epoch != epoch or seq.stage is not Stage.REMOTE:
            return
        commit = self.handover.complete(seq)
        if commit is None:
            return
        fresh = len(seq.blocks) - seq.cached_tokens // seq.block_size
        verified_s = self.handover.check_seconds(seq, commit)
        self.handover.adopt(seq)
        seq.stage = Stage.RUNNING
        seq.computed = seq.length
        seconds = max(0.0, now - commit.ended_ns / 1e9)
        if commit.ended_ns:
            self.state.figures.handed_over(seconds)
        self.state.measure("handover_seconds", seconds)
        self.state.measure("handover_verified_seconds", max(0.0, verified_s))
        self.state.measure("handovers_total")
        self.state.measure("handover_bytes_total", fresh * self.state.block_bytes)
        self.state.note(
            "committed",
            seq,
            blocks=fresh,
            handover_ms=round(seconds * 1e3, 3),
            verified_ms=round(verified_s * 1e3, 3),
            prefill_ms=round(commit.prefill_ms, 1),
        )
        self._advance(seq, RequestState.DECODING)
        self.commits[seq.key] = now
        seq.running_since = now
        self.state.measure("generation_tokens_total")
        self.output.emit_token(seq, commit.first_id, commit.first_logprob, now)
        self.readers.pause(seq)

    # --- stepping -----------------------------------------------------------------------------

    def _step_finished(self, event: StepFinished, now: float) -> None:
        assert event.step == self.scheduler.step
        seconds, results = event.seconds, event.results
        self.scheduler.learn(now)
        rows = self.scheduler.end_step()
        tokens = sum(len(row.token_ids) for row, _, _ in rows)
        kind = "mixed" if tokens > len(rows) else "decode"
        self.state.measure("engine_step_seconds", seconds, kind=kind)
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
                    self._advance(seq, RequestState.DECODING)
            committed_at = self.commits.pop(seq.key, None)
            if committed_at is not None:
                self.state.measure("first_decode_seconds", now - committed_at)
            self.output.emit_token(seq, sampled.token_id, sampled.logprob, now)
            self.readers.pause(seq)
        self._release_dropped()

    def _step_failed(self, event: StepFailed) -> None:
        """Only the rows that the engine blames end; the others are stepped again in place."""
        assert event.step == self.scheduler.step
        for _, _, seq in self.scheduler.end_step():
            request_id = seq.spec.request_id
            if request_id in event.request_ids and self.state.sequences.get(request_id) is seq:
                self._drop(seq)
                self.state.work_failed(
                    seq, Reason.DECODE_ERROR, event.error, retryable=event.retryable
                )
        self._release_dropped()

    # --- letting go ---------------------------------------------------------------------------

    def _cancel_work(self, message: CancelWork) -> None:
        """A router that lost the request to another one has no say."""
        request_id, epoch = message.request_id, message.epoch
        seq = self.state.sequences.get(request_id)
        if seq is not None and message.turn < seq.turn:
            self.state.measure("stale_messages_total", kind="turn")
        elif message.reason is Reason.MOVED:
            self._move(request_id, epoch)
        else:
            self._cancel(request_id, epoch, message.reason)

    def _ended(self, gateway: Peer, message: RequestEnded) -> None:
        """A gateway that lost the request to another one has no say."""
        seq = self.state.sequences.get(message.request_id)
        if seq is not None and seq.gateway != gateway:
            self.state.measure("stale_messages_total", kind="turn")
        else:
            self._cancel(message.request_id, message.epoch, message.outcome.reason)

    def _cancel(self, request_id: str, epoch: int, reason: Reason | None) -> None:
        seq = self.state.sequences.get(request_id)
        if seq is None or seq.epoch > epoch:
            return
        if seq.stage is not Stage.FINISHED:
            self.state.note(
                "cancelled", seq, reason=reason, stage=seq.stage.value, blocks=len(seq.blocks)
            )
        self._drop(seq)

    def _move(self, request_id: str, epoch: int) -> None:
        """Its router has another place for it."""
        seq = self.state.sequences.get(request_id)
        if seq is None or seq.epoch != epoch:
            return
        if seq.stage in MOVABLE:
            self.departure.keep(seq)
        elif seq.stage is not Stage.FINISHED:
            self._cancel(request_id, epoch, Reason.MOVED)

    def _drop(self, seq: Sequence) -> None:
        """Forget a sequence in any stage. Blocks of the step in flight wait for its end, those of
        an import for the thread."""
        del self.state.sequences[seq.spec.request_id]
        self.commits.pop(seq.key, None)
        if seq.stage is Stage.IMPORTING:
            assert seq.key in self.imports.running
        elif seq.stage is Stage.REMOTE:
            self.handover.drop(seq)
        elif self.state.in_flight.get(seq.spec.request_id) is seq:
            self.state.pinned.append(seq)
        else:
            self.state.pool.release(seq.blocks)
            seq.blocks = []

    def _release_dropped(self) -> None:
        for seq in self.state.pinned:
            self.state.pool.release(seq.blocks)
            seq.blocks = []
        self.state.pinned.clear()

    def _advance(self, seq: Sequence, target: RequestState) -> None:
        if self.state.lease is LeaseState.HELD:
            self.state.emit(
                CallLedger(AdvanceRequest(seq.spec.request_id, seq.epoch, target, self.state.me))
            )

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
                self._drop(seq)
                self.state.work_failed(seq, Reason.WORKER_LOST, f"{peer} is lost: {event.reason}")
        if member.role is Role.ROUTER:
            for seq in self.departure.router_lost(peer):
                self._drop(seq)
        if member.role is Role.GATEWAY:
            for seq in [s for s in self.state.sequences.values() if s.gateway == peer]:
                self._gateway_lost(seq, event, now)

    def _gateway_lost(self, seq: Sequence, event: PeerLost, now: float) -> None:
        """Its tokens reach nobody from here. If the gateway is over, so is the request, unless it
        may be resumed; otherwise the router knows a way (or finds that it is over)."""
        if not event.gone:
            self._drop(seq)
            self.state.work_failed(
                seq, Reason.NO_LINK, f"{event.peer} cannot be reached: {event.reason}"
            )
        elif seq.spec.resume_ms:
            self.readers.away(seq, now)
        else:
            self._end_for_lost_gateway(seq)

    def _end_for_lost_gateway(self, seq: Sequence) -> None:
        """The owner ends the request in its gateway's place."""
        self._drop(seq)
        self.state.note("cancelled", seq, reason=Reason.GATEWAY_LOST, stage=seq.stage.value)
        outcome = Outcome(
            Ending.CANCELLED, reason=Reason.GATEWAY_LOST, completion_tokens=len(seq.output)
        )
        op = EndRequest(seq.spec.request_id, seq.epoch, outcome, self.state.me, seq.turn)
        self.state.emit(CallLedger(op))

    def _drain(self, now: float) -> None:
        if not self.state.draining:
            self.departure.begin(now)
            self.beacon.forget()

    def _end_drain(self) -> None:
        """Time is up: the router places elsewhere what still runs; the memory goes with us."""
        self.departure.due = None
        for seq in list(self.state.sequences.values()):
            self._drop(seq)
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
            self._end_for_lost_gateway(seq)
        keep = limits.terminal_ttl_ms / 1000
        for seq in self.state.live(Stage.FINISHED):
            if seq.away_since is None and now - seq.finished_at > keep:
                self.state.note("end_never_heard", seq, level="warning")
                self._drop(seq)

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
        due = self.beacon.must_tell((*self.view.load(), self.placements), now)
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
