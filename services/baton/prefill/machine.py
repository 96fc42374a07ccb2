"""The prefill machine: computes prompts straight into decode's arena, chunk by chunk.

Decides the order of prompts (first come, first served, packed into a token budget) and how large a
chunk may be. It owns no memory: whatever it stores, a ticket allows, the fence is looked at before
each chunk, and a block once announced is never stored into again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from baton.core.beacon import Beacon
from baton.core.events import (
    DrainRequested,
    LeaseChanged,
    RestartRequested,
    RoleLeft,
    TimePassed,
)
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.core.step_times import StepTimes, pairs_of
from baton.ports.driving import (
    EXIT_RESTART,
    EXIT_ROLE,
    CallLedger,
    Exit,
    LedgerAnswered,
    Measure,
    Note,
    RecordStep,
    Send,
)
from baton.ports.ledger import AdvanceRequest
from baton.ports.transport import PeerLost, PeerRefused, PeerUp, Received
from baton.prefill.arenas import Arenas
from baton.prefill.chunk_size import ChunkSize
from baton.prefill.holdings import holdings_of
from baton.prefill.io import (
    ArenaOpened,
    ChunkFinished,
    ChunkResult,
    ChunkRow,
    ChunkStored,
    MapArena,
    RunChunk,
    UnmapArena,
)
from baton.prefill.job import Job
from baton.wire.holdings import Holdings
from baton.wire.messages import (
    AnyMessage,
    ArenaMapped,
    ArenaOffered,
    ArenaRef,
    AssignPrefill,
    AttemptId,
    CancelWork,
    ChunkAnnounced,
    LastStep,
    PrefillCommitted,
    PrefillFailed,
    RequestEnded,
    Ticket,
    TicketRevoked,
    WorkAdopted,
    WorkerStatus,
    WorkFailed,
    WorkRefused,
    WriterStopped,
)

Event = (
    TimePassed
    | LeaseChanged
    | DrainRequested
    | RoleLeft
    | RestartRequested
    | PeerUp
    | PeerLost
    | PeerRefused
    | Received
    | LedgerAnswered
    | ArenaOpened
    | ChunkStored
    | ChunkFinished
)

EXIT_HUNG = 75
#: Weight of the newest chunk in the measured speed.
SPEED_WEIGHT = 0.3


class PrefillMachine:
    """One prefill worker. ``Machine[Event, Command]``.

    ``left`` is the chunk that the incarnation before it left.
    """

    def __init__(
        self,
        me: Peer,
        limits: Limits,
        *,
        block_size: int,
        root: bytes,
        left: LastStep | None = None,
    ) -> None:
        self.left = left
        self.recorded = False
        """Whether the record of steps names somebody."""
        self.me = me
        self.limits = limits
        self.block_size = block_size
        self.root = root
        self.commands: list[object] = []
        self.peers: dict[Peer, Member] = {}
        self.lease = LeaseState.VACANT
        self.draining = False
        self.drain_due: float | None = None
        self.exited = False
        self.exit_code = 0
        """Of the end of a drain."""
        #: By request id, in order of arrival.
        self.jobs: dict[str, Job] = {}
        #: Tickets whose assignment is still on its way (it comes over another link).
        self.early: dict[tuple[str, int], tuple[Ticket, Peer, float]] = {}
        self.arenas = Arenas(limits.arena_kept_ms / 1000)
        self.placements = 0
        """Heard of, taken in or not: a router counts each as load until the next status."""
        self.step = 0
        self.step_since: float | None = None
        self.flying: list[tuple[ChunkRow, Job]] = []
        quarter_s = limits.lease_ttl_ms / 4000
        self.chunk_size = ChunkSize(block_size, limits.prefill_chunk_tokens, quarter_s)
        self.step_times = StepTimes()
        self.tokens_per_s = 0.0
        self.beat_at = 0.0
        self.beacon = Beacon(limits.lease_renew_ms / 1000, limits.status_pause_ms / 1000)

    # --- Machine ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[object]:
        self.commands = []
        self._dispatch(event, now)
        self._start_chunk(now)
        self._report(now)
        if self.draining and not self.jobs and not self.flying:
            self._exit_drained()
        return self.commands

    def deadline(self) -> float | None:
        times = [self.beat_at, self.beacon.deadline()]
        if self.drain_due is not None:
            times.append(self.drain_due)
        return min(times)

    def check(self) -> None:
        assert len(self.jobs) <= self.limits.prefill_queue_max
        assert len(self.early) <= self.limits.prefill_queue_max
        assert (self.step_since is None) == (not self.flying)
        for job in self.jobs.values():
            assert job.computed <= len(job.tokens)
            assert job.ticket is not None or job.computed == 0

    def _emit(self, command: object) -> None:
        self.commands.append(command)

    def _send(self, peer: Peer, message: AnyMessage) -> None:
        if peer in self.peers:
            self._emit(Send(peer, message))

    def _note(self, event: str, job: Job | None = None, level: str = "info", **f: object) -> None:
        ids = {} if job is None else {"request_id": job.spec.request_id, "epoch": job.epoch}
        self._emit(Note(event, {**ids, **f}, level))

    # --- events -------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case TimePassed():
                self._tick(now)
            case Received(peer, message):
                self._received(peer, message, now)
            case ChunkStored():
                self._chunk_stored(event, now)
            case ChunkFinished():
                self._chunk_finished(event, now)
            case ArenaOpened(ref, error):
                self._arena_opened(ref, error, now)
            case PeerUp(member):
                self.peers[member.peer] = member
                self.beacon.forget()
                self._replaced(member.peer, now)
                if member.role is Role.ROUTER and self.left is not None:
                    self._send(member.peer, self.left)
            case PeerLost():
                self._peer_lost(event, now)
            case LeaseChanged(state):
                self.lease = state
                self.beacon.forget()
            case DrainRequested():
                self.exit_code = 0
                self._drain(now)
            case RestartRequested():
                self.exit_code = EXIT_RESTART
                self._drain(now)
            case RoleLeft():
                self.exit_code = EXIT_ROLE
                self._drain(now)
            case LedgerAnswered() | PeerRefused():
                pass  # nothing here rests on the answer; the shell counts and logs both
            case _:
                assert_never(event)

    def _received(self, peer: Peer, message: AnyMessage, now: float) -> None:
        match message:
            case AssignPrefill():
                self._assign(peer, message, now)
            case Ticket():
                self._ticket(peer, message, now)
            case TicketRevoked(request_id, epoch):
                self._revoke(peer, request_id, epoch)
            case CancelWork(request_id, epoch, reason, turn):
                self._cancel(request_id, epoch, reason, turn)
            case WorkAdopted():
                self._adopted(peer, message)
            case RequestEnded():
                self._ended(peer, message)
            case ArenaOffered(arena):
                if arena.owner == peer:
                    self.arenas.offered(arena, now)
                    self._emit(MapArena(arena))
                    self._unmap(now)
            case _:
                self._note("unexpected_message", level="warning", kind=type(message).__name__)
                self._emit(Measure("stale_messages_total", 1, {"kind": "unknown"}))

    # --- taking in ----------------------------------------------------------------------------

    def _assign(self, router: Peer, message: AssignPrefill, now: float) -> None:
        self.placements += 1
        request_id, epoch = message.spec.request_id, message.epoch
        known = self.jobs.get(request_id)
        if known is not None and known.epoch >= epoch:
            if known.epoch > epoch:
                self._refuse(router, message, Reason.STALE_EPOCH, f"epoch {known.epoch} is here")
            return
        if known is not None:
            self._end(known, Reason.SUPERSEDED, f"epoch {epoch} begins")
        refusal = self._why_not(message)
        if request_id in self.jobs and refusal is None:
            refusal = Reason.QUEUE_FULL, "the chunk of an older attempt still runs"
        if refusal is not None:
            self._refuse(router, message, *refusal)
            return
        job = Job.create(message, router, now)
        self.jobs[request_id] = job
        early = self.early.pop(job.key, None)
        if early is not None:
            self._accept(job, early[0], early[1])

    def _why_not(self, message: AssignPrefill) -> tuple[Reason, str] | None:
        if self.draining:
            return Reason.DRAINING, "this worker is draining"
        if self.lease is not LeaseState.HELD:
            return Reason.SUSPECT, "this worker cannot renew its lease"
        if len(self.jobs) >= self.limits.prefill_queue_max:
            return Reason.QUEUE_FULL, "prefill_queue_max prompts are here"
        if message.decode not in self.peers:
            return Reason.NO_LINK, f"no link to {message.decode} yet"
        return None

    def _refuse(self, router: Peer, message: AssignPrefill, reason: Reason, text: str) -> None:
        request_id, epoch = message.spec.request_id, message.epoch
        self._note("work_refused", request_id=request_id, epoch=epoch, reason=reason, message=text)
        self._send(router, WorkRefused(request_id, epoch, reason, text))

    def _ticket(self, peer: Peer, ticket: Ticket, now: float) -> None:
        job = self.jobs.get(ticket.request_id)
        if job is not None and job.epoch == ticket.epoch:
            if job.decode == peer and job.ticket is None:
                self._accept(job, ticket, peer)
            return
        stale = job is not None and job.epoch > ticket.epoch
        if stale or len(self.early) >= self.limits.prefill_queue_max:
            reason = Reason.STALE_EPOCH if stale else Reason.QUEUE_FULL
            self._send(peer, PrefillFailed(ticket.request_id, ticket.epoch, reason))
            return
        self.early[ticket.request_id, ticket.epoch] = (ticket, peer, now)

    def _accept(self, job: Job, ticket: Ticket, peer: Peer) -> None:
        if not ticket.blocks and not ticket.prefix:
            self._note("not_needed", job)
            self._forget(job)
            return
        if not self.arenas.allows(ticket.arena):
            self._fail(job, Reason.FENCED, f"the arena of {peer} is not mapped here")
            return
        wrong = job.accept(ticket, self.root, self.block_size)
        if wrong is not None:
            job.ticket = ticket
            self._fail(job, Reason.FENCED, wrong)

    # --- chunks -------------------------------------------------------------------------------

    def _start_chunk(self, now: float) -> None:
        if self.step_since is not None:
            return
        budget = self.chunk_size.tokens()
        rows: list[tuple[ChunkRow, Job]] = []
        for job in self.jobs.values():
            if job.ticket is None:
                continue
            if job.alone and rows:
                break
            chunk = job.chunk(budget, self.block_size)
            if chunk is None:
                break
            if job.started_at is None:
                job.started_at = now
                self._advance(job)
            rows.append((chunk, job))
            budget -= len(chunk.row.token_ids)
            if budget <= 0 or job.alone:
                break
        if not rows:
            if self.recorded:
                self.recorded = False
                self._emit(RecordStep(()))
            return
        self.step += 1
        self.step_since = now
        self.flying = rows
        self.recorded = True
        self._emit(RecordStep(tuple(AttemptId(*job.key) for _, job in rows)))
        self._emit(RunChunk(self.step, tuple(row for row, _ in rows)))

    def _advance(self, job: Job) -> None:
        if self.lease is LeaseState.HELD:
            request_id, epoch = job.key
            self._emit(
                CallLedger(AdvanceRequest(request_id, epoch, RequestState.PREFILLING, self.me))
            )

    def _chunk_stored(self, event: ChunkStored, now: float) -> None:
        """Announce it at once: decode verifies the last chunk while its first token is chosen."""
        assert event.step == self.step
        self._emit(Measure("checksum_seconds", event.sums_seconds))
        for (row, job), checksums in zip(self.flying, event.checksums, strict=True):
            if checksums is None or job.stopping:
                continue
            sums = job.advance(row, checksums)
            job.last_write_ns = event.last_write_ns
            if sums:
                self._send(job.decode, ChunkAnnounced(*job.key, sums))
            self._note(
                "chunk_stored",
                job,
                tokens=len(row.row.token_ids),
                upto=job.computed,
                blocks=len(sums),
                chunk_ms=round((now - (self.step_since or now)) * 1e3, 1),
            )

    def _chunk_finished(self, event: ChunkFinished, now: float) -> None:
        assert event.step == self.step
        flying, self.flying = self.flying, []
        since, self.step_since = self.step_since, None
        tokens = sum(len(row.row.token_ids) for row, _ in flying)
        self._emit(Measure("engine_step_seconds", event.seconds, {"kind": "prefill"}))
        self._emit(Measure("engine_step_tokens", tokens, {"kind": "prefill"}))
        if event.seconds > 0 and not any(result.fenced for result in event.results):
            speed = tokens / event.seconds
            weight = SPEED_WEIGHT if self.tokens_per_s else 1.0
            self.tokens_per_s += weight * (speed - self.tokens_per_s)
            self.chunk_size.learn(tokens, event.seconds)
            assert since is not None
            starts = ((row.row.start, len(row.row.token_ids)) for row, _ in flying)
            pairs = sum(pairs_of(start, count) for start, count in starts)
            self.step_times.learn(tokens, pairs, now - since)
        for (_, job), result in zip(flying, event.results, strict=True):
            if job.stopping:
                self._stop(job)
            elif result.fenced:
                self._fail(job, Reason.FENCED, "the ticket's blocks were taken back")
            elif result.failed:
                self._fail(job, Reason.PREFILL_ERROR, result.failed, retryable=result.retryable)
            elif not job.remaining:
                self._commit(job, result, event.ended_ns, now)

    def _commit(self, job: Job, result: ChunkResult, ended_ns: int, now: float) -> None:
        """Everything is stored and announced: give decode the first token, and keep nothing.

        The token goes to decode alone. Whether the KV it was sampled from is what it must be is
        known only when decode has verified the last block; before that no client may see it.
        """
        assert result.sampled is not None and job.ticket is not None
        request_id, epoch = job.key
        first, logprob = result.sampled.token_id, result.sampled.logprob
        prefill_s = now - (job.started_at or now)
        self._send(
            job.decode,
            PrefillCommitted(
                request_id=request_id,
                epoch=epoch,
                first_id=first,
                first_logprob=logprob,
                prefill_ms=prefill_s * 1000,
                last_write_ns=job.last_write_ns,
                ended_ns=ended_ns,
            ),
        )
        self._emit(Measure("request_prefill_seconds", prefill_s))
        self._note("prefilled", job, tokens=len(job.tokens), prefill_ms=round(prefill_s * 1e3, 1))
        del self.jobs[request_id]

    # --- ends ---------------------------------------------------------------------------------

    def _revoke(self, peer: Peer, request_id: str, epoch: int) -> None:
        self.early.pop((request_id, epoch), None)
        job = self.jobs.get(request_id)
        if job is None or job.epoch != epoch or job.decode != peer or job.ticket is None:
            # Nothing of that ticket was started, or all of it has returned.
            if not self._flies(request_id, epoch):
                self._send(peer, WriterStopped(request_id, epoch))
            return
        self._end(job, None, "revoked")

    def _flies(self, request_id: str, epoch: int) -> bool:
        return any(job.key == (request_id, epoch) for _, job in self.flying)

    def _adopted(self, router: Peer, message: WorkAdopted) -> None:
        """Another router answers for the attempt from now on. A ticket that still waits for its
        assignment waits for a router that is gone."""
        key = message.request_id, message.epoch
        job = self.jobs.get(message.request_id)
        if job is not None and job.key == key and job.turn <= message.turn:
            job.router, job.turn, job.gateway = router, message.turn, message.gateway
        early = self.early.pop(key, None)
        if early is not None:
            self._send(early[1], PrefillFailed(*key, Reason.FENCED, "no assignment came"))

    def _ended(self, gateway: Peer, message: RequestEnded) -> None:
        """A gateway that lost the request to another one has no say."""
        job = self.jobs.get(message.request_id)
        if job is not None and job.gateway != gateway:
            self._emit(Measure("stale_messages_total", 1, {"kind": "turn"}))
        else:
            self._cancel(message.request_id, message.epoch, message.outcome.reason)

    def _cancel(
        self, request_id: str, epoch: int, reason: Reason | None, turn: int | None = None
    ) -> None:
        """``turn`` is that of the router that cancels: a superseded one has no say."""
        job = self.jobs.get(request_id)
        if job is None or job.epoch > epoch:
            return
        if turn is not None and turn < job.turn:
            self._emit(Measure("stale_messages_total", 1, {"kind": "turn"}))
            return
        self._end(job, reason, "cancelled")

    def _end(self, job: Job, reason: Reason | None, text: str) -> None:
        """Stop working on ``job``: at once, or when its chunk has returned."""
        self._note("cancelled", job, reason=reason, message=text)
        if self._flies(*job.key):
            job.stopping = True
        else:
            self._stop(job)

    def _stop(self, job: Job) -> None:
        self._forget(job)
        if job.ticket is not None:
            self._send(job.decode, WriterStopped(*job.key))

    def _forget(self, job: Job) -> None:
        if self.jobs.get(job.spec.request_id) is job:
            del self.jobs[job.spec.request_id]

    def _fail(self, job: Job, reason: Reason, text: str, *, retryable: bool = True) -> None:
        """Tell decode (which releases the blocks) and the router (which decides what next)."""
        self._note("attempt_failed", job, level="warning", reason=reason, message=text)
        self._forget(job)
        request_id, epoch = job.key
        failed = PrefillFailed(request_id, epoch, reason, text, retryable=retryable)
        self._send(job.decode, failed)
        self._send(job.router, WorkFailed(request_id, epoch, reason, text, retryable=retryable))

    # --- arenas, peers, time ------------------------------------------------------------------

    def _arena_opened(self, ref: ArenaRef, error: str, now: float) -> None:
        """The engine's thread has come to it, so that nothing stores there for a former owner any
        more: the answer says that too."""
        self.arenas.opened(ref, error, now)
        if error:
            self._note("arena_refused", level="error", owner=str(ref.owner), error=error)
        else:
            self._note("arena_mapped", owner=str(ref.owner))
        self._send(ref.owner, ArenaMapped(ref.file_id, error))
        self._unmap(now)

    def _peer_lost(self, event: PeerLost, now: float) -> None:
        peer = event.peer
        member = self.peers.pop(peer, None)
        if member is None or member.role is not Role.DECODE:
            return
        self._drop_work_for(peer, f"{peer} is lost: {event.reason}")
        if event.gone:
            self.arenas.lost(peer, now)
        self._unmap(now)

    def _replaced(self, peer: Peer, now: float) -> None:
        """Who has this name now is the end of whoever had it before: one that was out of reach
        when it died is not reported otherwise."""
        decodes = (job.decode for job in self.jobs.values())
        for owner in self.arenas.succeeded_by(peer, decodes):
            self._drop_work_for(owner, f"{peer} has taken its place")
            self.arenas.lost(owner, now)
        self._unmap(now)

    def _drop_work_for(self, decode: Peer, text: str) -> None:
        """Nothing is stored for it any more, once the chunk that runs has returned."""
        for key in [key for key, (_, sender, _) in self.early.items() if sender == decode]:
            del self.early[key]
        for job in [job for job in self.jobs.values() if job.decode == decode]:
            self._end(job, Reason.WORKER_LOST, text)

    def _unmap(self, now: float) -> None:
        """Give up what nobody waits for."""
        for file_id in self.arenas.give_up(now, {row.row.arena for row, _ in self.flying}):
            self._emit(UnmapArena(file_id))

    def _drain(self, now: float) -> None:
        if self.draining:
            return
        self.draining = True
        self.drain_due = now + self.limits.drain_ms / 1000
        self.beacon.forget()
        self._note("draining", jobs=len(self.jobs))

    def _end_drain(self) -> None:
        """Time is up: give back what is not done. Of a running chunk nobody can say that it stores
        no more: our lock's end will."""
        self.drain_due = None
        text = "this worker is shutting down"
        for job in list(self.jobs.values()):
            if self._flies(*job.key):
                failed = WorkFailed(*job.key, Reason.DRAINING, text)
                self._send(job.router, failed)
            else:
                self._fail(job, Reason.DRAINING, text)
        self._exit_drained()

    def _exit_drained(self) -> None:
        if not self.exited:
            self.exited = True
            self._emit(Exit(self.exit_code, "drained"))

    def _tick(self, now: float) -> None:
        if self.drain_due is not None and now >= self.drain_due:
            self._end_drain()
        since = self.step_since
        if since is not None and now - since > self.limits.step_hung_ms / 1000:
            self._emit(Exit(EXIT_HUNG, f"step {self.step} is hung"))
            return
        if now < self.beat_at:
            return
        self.beat_at = now + self.limits.lease_renew_ms / 1000
        self._unmap(now)
        wait_s = self.limits.ticket_wait_ms / 1000
        for key, (_, sender, since) in list(self.early.items()):
            if now - since > wait_s:
                del self.early[key]
                self._send(sender, PrefillFailed(*key, Reason.FENCED, "no assignment came"))
        for job in list(self.jobs.values()):
            if job.ticket is None and now - job.assigned_at > wait_s:
                self._forget(job)
                self._note("ticket_never_came", job, level="warning")
                self._send(
                    job.router,
                    WorkFailed(*job.key, Reason.FENCED, "decode's ticket did not come in time"),
                )

    def _report(self, now: float) -> None:
        load = (self._accepting(), len(self.jobs), self.placements)
        if not self.beacon.must_tell(load, now):
            return
        status = self.worker_status(now)
        for peer, member in self.peers.items():
            if member.role is Role.ROUTER:
                self._send(peer, status)

    def _accepting(self) -> bool:
        return not self.draining and self.lease is LeaseState.HELD

    def worker_status(self, now: float) -> WorkerStatus:
        """Return what routers place by."""
        since = self.step_since
        return WorkerStatus(
            accepting=self._accepting(),
            running=len(self.flying),
            waiting=len(self.jobs),
            queued_tokens=sum(job.remaining for job in self.jobs.values()),
            block_size=self.block_size,
            step=self.step,
            step_age_ms=0 if since is None else int((now - since) * 1000),
            curve=self.step_times.curve(),
            chunk_tokens=self.chunk_size.tokens(),
        )

    # --- looking in ---------------------------------------------------------------------------

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of ``/metrics``."""
        return {
            "num_requests_running": float(len(self.flying)),
            "num_requests_waiting": float(len(self.jobs) - len(self.flying)),
            "queue_tokens": float(sum(job.remaining for job in self.jobs.values())),
        }

    def status(self) -> dict[str, object]:
        """Return what ``baton status`` shows."""
        return {
            "lease": self.lease.value,
            "draining": self.draining,
            "jobs": len(self.jobs),
            "queued_tokens": sum(job.remaining for job in self.jobs.values()),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "chunk_tokens": self.chunk_size.tokens(),
            "arenas": sorted(str(ref.owner) for ref in self.arenas.mapped.values()),
            "peers": sorted(str(peer) for peer in self.peers),
            "step": self.step,
        }

    def holdings(self) -> Holdings:
        """Return what ``baton audit`` compares."""
        # A stopped job whose chunk runs may have left ``jobs`` to a newer attempt already.
        flying = [job for _, job in self.flying if self.jobs.get(job.spec.request_id) is not job]
        jobs = [*self.jobs.values(), *flying]
        return holdings_of(self.me, jobs, self.early, self.arenas.mapped.values())
