"""The prefill machine: computes prompts straight into decode's arena, chunk by chunk.

It owns no memory: whatever it stores, a ticket allows, and the fence is looked at before each
chunk. What is taken in is decided in ``admission.py``, what is computed next in ``chunks.py``, how
a prompt leaves without a commit in ``ends.py``, which arenas stay mapped in ``arenas.py``; here is
who calls whom when, and what time and lost links do.
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
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.core.step_times import Rehearsed
from baton.ports.driving import EXIT_RESTART, EXIT_ROLE, Exit, LedgerAnswered
from baton.ports.transport import PeerLost, PeerRefused, PeerUp, Received
from baton.prefill.admission import Admission
from baton.prefill.arenas import Arenas
from baton.prefill.chunks import Chunks
from baton.prefill.ends import Ends
from baton.prefill.holdings import holdings_of
from baton.prefill.io import ArenaOpened, ChunkFinished, ChunkStored, MapArena, UnmapArena
from baton.prefill.state import State
from baton.wire.handover import ArenaMapped, ArenaOffered, ArenaRef, Ticket, TicketRevoked
from baton.wire.holdings import Holdings
from baton.wire.messages import (
    AnyMessage,
    AssignPrefill,
    CancelWork,
    LastStep,
    RequestEnded,
    WorkAdopted,
    WorkerStatus,
    WorkFailed,
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


class PrefillMachine:
    """One prefill worker. ``Machine[Event, Command]``.

    ``left`` is the chunk that the incarnation before it left, ``rehearsed`` what steps took when
    the engine was warmed up.
    """

    def __init__(
        self,
        me: Peer,
        limits: Limits,
        *,
        block_size: int,
        root: bytes,
        left: LastStep | None = None,
        rehearsed: Rehearsed = (),
    ) -> None:
        self.state = State(me, limits, block_size, root)
        self.arenas = Arenas(limits.arena_kept_ms / 1000)
        self.ends = Ends(self.state)
        self.admission = Admission(self.state, self.arenas, self.ends)
        self.chunks = Chunks(self.state, self.ends)
        self.chunks.rehearsed(rehearsed)
        self.left = left
        self.drain_due: float | None = None
        self.exited = False
        self.exit_code = 0
        """Of the end of a drain."""
        self.beat_at = 0.0
        self.beacon = Beacon(limits.lease_renew_ms / 1000, limits.status_pause_ms / 1000)

    # --- Machine ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[object]:
        self.state.commands = []
        self._dispatch(event, now)
        self.chunks.start(now)
        self._report(now)
        if self.state.draining and not self.state.jobs and not self.state.flying:
            self._exit_drained()
        return self.state.commands

    def deadline(self) -> float | None:
        times = [self.beat_at, self.beacon.deadline()]
        if self.drain_due is not None:
            times.append(self.drain_due)
        return min(times)

    def check(self) -> None:
        assert len(self.state.jobs) <= self.state.limits.prefill_queue_max
        assert len(self.state.early) <= self.state.limits.prefill_queue_max
        assert (self.chunks.step_since is None) == (not self.state.flying)
        for job in self.state.jobs.values():
            assert job.computed <= len(job.tokens)
            assert job.ticket is not None or job.computed == 0

    # --- events -------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case TimePassed():
                self._tick(now)
            case Received(peer, message):
                self._received(peer, message, now)
            case ChunkStored():
                self.chunks.stored(event, now)
            case ChunkFinished():
                self.chunks.finished(event, now)
            case ArenaOpened(ref, error):
                self._arena_opened(ref, error, now)
            case PeerUp(member):
                self.state.peers[member.peer] = member
                self.beacon.forget()
                self._replaced(member.peer, now)
                if member.role is Role.ROUTER and self.left is not None:
                    self.state.send(member.peer, self.left)
            case PeerLost():
                self._peer_lost(event, now)
            case LeaseChanged(state):
                self.state.lease = state
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
                self.admission.assign(peer, message, now)
            case Ticket():
                self.admission.ticket(peer, message, now)
            case WorkAdopted():
                self.admission.adopted(peer, message)
            case TicketRevoked():
                self.ends.revoke(peer, message)
            case CancelWork():
                self.ends.cancel_work(message)
            case RequestEnded():
                self.ends.ended(peer, message)
            case ArenaOffered(arena):
                if arena.owner == peer:
                    self.arenas.offered(arena, now)
                    self.state.emit(MapArena(arena))
                    self._unmap(now)
            case _:
                self.state.note("unexpected_message", level="warning", kind=type(message).__name__)
                self.state.measure("stale_messages_total", kind="unknown")

    # --- arenas, peers, time ------------------------------------------------------------------

    def _arena_opened(self, ref: ArenaRef, error: str, now: float) -> None:
        """The engine's thread has come to it, so that nothing stores there for a former owner any
        more: the answer says that too."""
        self.arenas.opened(ref, error, now)
        if error:
            self.state.note("arena_refused", level="error", owner=str(ref.owner), error=error)
        else:
            self.state.note("arena_mapped", owner=str(ref.owner))
        self.state.send(ref.owner, ArenaMapped(ref.file_id, error))
        self._unmap(now)

    def _peer_lost(self, event: PeerLost, now: float) -> None:
        peer = event.peer
        member = self.state.peers.pop(peer, None)
        if member is None or member.role is not Role.DECODE:
            return
        self.ends.drop_work_for(peer, f"{peer} is lost: {event.reason}")
        if event.gone:
            self.arenas.lost(peer, now)
        self._unmap(now)

    def _replaced(self, peer: Peer, now: float) -> None:
        """Who has this name now is the end of whoever had it before: one that was out of reach
        when it died is not reported otherwise."""
        decodes = (job.decode for job in self.state.jobs.values())
        for owner in self.arenas.succeeded_by(peer, decodes):
            self.ends.drop_work_for(owner, f"{peer} has taken its place")
            self.arenas.lost(owner, now)
        self._unmap(now)

    def _unmap(self, now: float) -> None:
        """Give up what nobody waits for."""
        for file_id in self.arenas.give_up(now, {row.row.arena for row, _ in self.state.flying}):
            self.state.emit(UnmapArena(file_id))

    def _drain(self, now: float) -> None:
        if self.state.draining:
            return
        self.state.draining = True
        self.drain_due = now + self.state.limits.drain_ms / 1000
        self.beacon.forget()
        self.state.note("draining", jobs=len(self.state.jobs))

    def _end_drain(self) -> None:
        """Time is up: give back what is not done. Of a running chunk nobody can say that it stores
        no more: our lock's end will."""
        self.drain_due = None
        text = "this worker is shutting down"
        for job in list(self.state.jobs.values()):
            if self.state.flies(*job.key):
                failed = WorkFailed(*job.key, Reason.DRAINING, text)
                self.state.send(job.router, failed)
            else:
                self.ends.fail(job, Reason.DRAINING, text)
        self._exit_drained()

    def _exit_drained(self) -> None:
        if not self.exited:
            self.exited = True
            self.state.emit(Exit(self.exit_code, "drained"))

    def _tick(self, now: float) -> None:
        if self.drain_due is not None and now >= self.drain_due:
            self._end_drain()
        since = self.chunks.step_since
        if since is not None and now - since > self.state.limits.step_hung_ms / 1000:
            self.state.emit(Exit(EXIT_HUNG, f"step {self.chunks.step} is hung"))
            return
        if now < self.beat_at:
            return
        self.beat_at = now + self.state.limits.lease_renew_ms / 1000
        self._unmap(now)
        self.admission.give_up(now)

    def _report(self, now: float) -> None:
        load = (self._accepting(), len(self.state.jobs), self.admission.placements)
        if not self.beacon.must_tell(load, now):
            return
        status = self.worker_status(now)
        for peer, member in self.state.peers.items():
            if member.role is Role.ROUTER:
                self.state.send(peer, status)

    def _accepting(self) -> bool:
        return not self.state.draining and self.state.lease is LeaseState.HELD

    def worker_status(self, now: float) -> WorkerStatus:
        """Return what routers place by."""
        since = self.chunks.step_since
        return WorkerStatus(
            accepting=self._accepting(),
            running=len(self.state.flying),
            waiting=len(self.state.jobs),
            queued_tokens=sum(job.remaining for job in self.state.jobs.values()),
            block_size=self.state.block_size,
            step=self.chunks.step,
            step_age_ms=0 if since is None else int((now - since) * 1000),
            curve=self.chunks.times.curve(),
            curve_borrowed=self.chunks.times.curve_borrowed(),
            chunk_tokens=self.chunks.size.tokens(),
        )

    # --- looking in ---------------------------------------------------------------------------

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of ``/metrics``."""
        return {
            "num_requests_running": float(len(self.state.flying)),
            "num_requests_waiting": float(len(self.state.jobs) - len(self.state.flying)),
            "queue_tokens": float(sum(job.remaining for job in self.state.jobs.values())),
        }

    def status(self) -> dict[str, object]:
        """Return what ``baton status`` shows."""
        return {
            "lease": self.state.lease.value,
            "draining": self.state.draining,
            "jobs": len(self.state.jobs),
            "queued_tokens": sum(job.remaining for job in self.state.jobs.values()),
            "tokens_per_s": round(self.chunks.tokens_per_s, 1),
            "chunk_tokens": self.chunks.size.tokens(),
            "arenas": sorted(str(ref.owner) for ref in self.arenas.mapped.values()),
            "peers": sorted(str(peer) for peer in self.state.peers),
            "step": self.chunks.step,
        }

    def holdings(self) -> Holdings:
        """Return what ``baton audit`` compares."""
        # A stopped job whose chunk runs may have left ``jobs`` to a newer attempt already.
        state, jobs = self.state, self.state.jobs
        flying = [job for _, job in state.flying if jobs.get(job.spec.request_id) is not job]
        held = [*jobs.values(), *flying]
        return holdings_of(state.me, held, state.early, self.arenas.mapped.values())
