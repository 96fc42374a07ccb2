"""The gateway's decisions: sessions, from submission to the one outcome.

Decides where a request is submitted, which tokens its client gets and how it ends. Text, stop
strings and HTTP are not its business: it hands out token ids and hears what the HTTP layer found.
The gateway is the linearization point for tokens (ADR 0008); ``session.py`` holds the rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import assert_never

from baton.core.events import DrainRequested, LeaseChanged, TimePassed
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.gateway.endings import Endings
from baton.gateway.links import Links, Mode
from baton.gateway.reports import Reports
from baton.gateway.session import Phase, Session, Verdict
from baton.gateway.timers import Timers
from baton.gateway.vocabulary import (
    ClientGone,
    Command,
    Deliver,
    End,
    Event,
    ReportsWanted,
    StopMatched,
    Submitted,
)
from baton.ports.driving import Exit, LedgerAnswered, Measure, Note, Send
from baton.ports.ledger import EndRequest
from baton.ports.transport import PeerLost, PeerRefused, PeerUp, Received
from baton.wire.messages import (
    FenceRequest,
    PoolStatus,
    Report,
    RequestEnded,
    RequestFailed,
    RequestFenced,
    RequestPlaced,
    RequestRefused,
    SubmitRequest,
    TokenChunk,
    TokenRun,
    TokensWanted,
)

#: A gap that was asked for is asked for again after this long.
WANTED_AGAIN_S = 1.0
#: Routers enforce the waiting limit; the gateway's own is later, for when no router answers.
QUEUE_SLACK_S = 1.0


class GatewayMachine:
    """A :class:`baton.core.machine.Machine` for :data:`Event` and :data:`Command`."""

    def __init__(self, me: Peer, limits: Limits, mode: Mode = "split") -> None:
        self._me = me
        self._limits = limits
        self._links = Links(mode)
        self._lease = LeaseState.VACANT
        self._sessions: dict[str, Session] = {}
        self._timers = Timers()
        self._endings = Endings(me)
        self._reports = Reports()
        self._drain_due: float | None = None
        self._exited = False

    # --- the Machine protocol -------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; return what is to be done, in order."""
        commands = self._handle(event, now)
        if self._drain_due is not None:
            commands += self._drained(now)
        return commands

    def deadline(self) -> float | None:
        """When :class:`TimePassed` is needed next."""
        times = (
            self._timers.next_at(),
            self._endings.deadline(),
            self._reports.deadline(),
            None if self._exited else self._drain_due,
        )
        return min((time for time in times if time is not None), default=None)

    def check(self) -> None:
        """Assert all invariants."""
        assert len(self._sessions) <= self._limits.sessions_max
        assert len(self._timers) <= len(self._sessions)
        self._links.check()
        for request_id, session in self._sessions.items():
            assert request_id == session.request_id
            session.check()
        self._endings.check()
        self._reports.check()

    def _handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received():
                return self._received(event, now)
            case Submitted():
                return self._submitted(event, now)
            case ClientGone():
                return self._client_gone(event, now)
            case StopMatched():
                return self._stop_matched(event, now)
            case LedgerAnswered():
                if isinstance(event.op, EndRequest):
                    return self._endings.answered(event, now)
                return []
            case TimePassed():
                return self._time_passed(now)
            case PeerUp():
                return self._peer_up(event.member, now)
            case PeerLost():
                return self._peer_lost(event, now)
            case PeerRefused():
                return [Note("peer_refused", {"peer": event.worker_id, "why": event.text}, "error")]
            case ReportsWanted():
                return self._reports.begin(event.token, event.kind, self._links, now)
            case LeaseChanged():
                self._lease = event.state
                return []
            case DrainRequested():
                if self._drain_due is None:
                    self._drain_due = now + self._limits.drain_ms / 1000
                return [Note("draining", {"sessions": len(self._sessions)})]
            case _:
                assert_never(event)

    # --- what can be asked ----------------------------------------------------------------------

    def unready(self) -> tuple[Reason, str] | None:
        """Return why a request would be refused now, or ``None`` if it could be served."""
        if self._drain_due is not None:
            return Reason.DRAINING, "the gateway is shutting down"
        if self._lease is not LeaseState.HELD:
            return Reason.LEDGER_UNAVAILABLE, "the gateway holds no lease: the ledger is away"
        return self._links.missing()

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken any more."""
        return self._drain_due is not None

    def status(self) -> dict[str, object]:
        """Describe this gateway for people; JSON-ready, no prompt, no ids of tokens."""
        unready = self.unready()
        return {
            "ready": unready is None,
            "reason": None if unready is None else str(unready[0]),
            "lease": str(self._lease),
            "draining": self._drain_due is not None,
            "sessions": len(self._sessions),
            "phases": dict(Counter(str(s.phase.value) for s in self._sessions.values())),
            "ends_unconfirmed": self._endings.waiting,
            "peers": [str(peer) for peer in sorted(self._links)],
        }

    def gauges(self) -> Mapping[str, float]:
        """Return the values of this machine's gauges."""
        running = sum(s.phase is Phase.RUNNING for s in self._sessions.values())
        return {
            "num_requests_running": running,
            "num_requests_waiting": len(self._sessions) - running,
        }

    # --- clients --------------------------------------------------------------------------------

    def _submitted(self, event: Submitted, now: float) -> list[Command]:
        spec = event.spec
        if spec.request_id in self._sessions or spec.request_id in self._endings.recent:
            return [Note("duplicate_submission", {"request_id": spec.request_id}, "error")]
        if refusal := self._refusal():
            reason, message = refusal
            outcome = Outcome(Ending.REFUSED, reason=reason, message=message)
            return [End(spec.request_id, outcome), *_measure_end(outcome)]
        session = Session(spec=spec, submitted_at=now)
        self._sessions[spec.request_id] = session
        commands: list[Command] = [
            Note(
                "request_submitted",
                {
                    "request_id": spec.request_id,
                    "prompt_tokens": spec.prompt_tokens,
                    "max_tokens": spec.max_tokens,
                },
            )
        ]
        return [*commands, *self._submit(session, now)]

    def _refusal(self) -> tuple[Reason, str] | None:
        """Why a new request is not even tried. Missing workers are the router's to judge."""
        if self._drain_due is not None:
            return Reason.DRAINING, "the gateway is shutting down"
        if self._lease in (LeaseState.SUSPECT, LeaseState.LOST):
            return Reason.LEDGER_UNAVAILABLE, "the ledger cannot be reached"
        if len(self._sessions) >= self._limits.sessions_max:
            return Reason.OVERLOADED, "too many requests are running in this gateway"
        return None

    def _submit(self, session: Session, now: float) -> list[Command]:
        """Give the request to the next router, or leave it waiting for one."""
        router = self._links.next_router()
        if router is None:
            self._schedule(session, now)
            return []
        session.become(Phase.SUBMITTED)
        session.router = router
        session.told.add(router)
        self._schedule(session, now)
        return [Send(router, SubmitRequest(spec=session.spec))]

    def _client_gone(self, event: ClientGone, now: float) -> list[Command]:
        session = self._sessions.get(event.request_id)
        if session is None:
            return []
        return self._end(session, Outcome(Ending.CANCELLED, reason=event.reason), now)

    def _stop_matched(self, event: StopMatched, now: float) -> list[Command]:
        session = self._sessions.get(event.request_id)
        if session is None:
            return []
        assert 0 < event.tokens_used <= len(session.ids)
        outcome = Outcome(
            Ending.COMPLETED, finish=FinishReason.STOP, completion_tokens=event.tokens_used
        )
        return self._end(session, outcome, now)

    # --- messages -------------------------------------------------------------------------------

    def _received(self, event: Received, now: float) -> list[Command]:
        message = event.message
        match message:
            case TokenChunk():
                commands: list[Command] = []
                for run in message.runs:
                    commands += self._tokens(event.peer, run, now)
                return commands
            case RequestPlaced():
                return self._with_session(
                    event, message.request_id, message.epoch, now, self._placed
                )
            case FenceRequest():
                return self._with_session(
                    event, message.request_id, message.epoch, now, self._fence
                )
            case RequestFailed():
                return self._with_session(
                    event, message.request_id, message.epoch, now, self._failed
                )
            case RequestRefused():
                return self._with_session(event, message.request_id, 1, now, self._refused)
            case PoolStatus():
                self._links.pool(event.peer, message)
                return []
            case Report():
                return self._reports.received(event.peer, message)
            case _:
                fields = {"peer": str(event.peer), "type": type(message).__name__}
                return [Note("message_unexpected", fields, "warning")]

    def _with_session(
        self,
        event: Received,
        request_id: str,
        epoch: int,
        now: float,
        handler: Callable[[Session, Received, float], list[Command]],
    ) -> list[Command]:
        session = self._sessions.get(request_id)
        if session is None:
            return self._over(event.peer, request_id, epoch)
        return handler(session, event, now)

    def _over(self, peer: Peer, request_id: str, epoch: int) -> list[Command]:
        """Somebody works on a request that is over (or never was): tell him so, once."""
        ended = self._endings.recent.get(request_id)
        if ended is None:
            outcome = Outcome(
                Ending.CANCELLED, reason=Reason.SUPERSEDED, message="unknown to this gateway"
            )
            self._endings.remember(request_id, outcome, {peer})
        elif peer in ended.told:
            return []
        else:
            ended.told.add(peer)
            outcome = ended.outcome
        return [
            Measure("stale_messages_total", labels={"kind": "unknown"}),
            Send(peer, RequestEnded(request_id=request_id, epoch=epoch, outcome=outcome)),
        ]

    def _placed(self, session: Session, event: Received, now: float) -> list[Command]:
        message = event.message
        assert isinstance(message, RequestPlaced)
        if not session.place(message.epoch, message.decode, message.prefill):
            fields = {"request_id": session.request_id, "epoch": message.epoch}
            return [
                Measure("stale_messages_total", labels={"kind": "epoch"}),
                Note("placement_refused", fields, "warning"),
            ]
        session.become(Phase.RUNNING)
        session.router = event.peer
        session.told.add(event.peer)
        session.recovery_due = None
        missing = [
            peer
            for peer in (message.decode, message.prefill)
            if peer is not None and peer not in self._links
        ]
        if missing:
            # Not linked yet, or lost already: either it turns up, or somebody takes over in time.
            session.recovery_due = now + self._limits.recovery_ms / 1000
        self._schedule(session, now)
        fields = {
            "request_id": session.request_id,
            "epoch": message.epoch,
            "decode": str(message.decode),
            "prefill": str(message.prefill),
        }
        return [Note("request_placed", fields)]

    def _fence(self, session: Session, event: Received, now: float) -> list[Command]:
        message = event.message
        assert isinstance(message, FenceRequest)
        if message.epoch > session.epoch:
            session.fence(message.epoch)
            session.become(Phase.RUNNING)
            # Its router sees to it, however long it waits there for memory.
            session.recovery_due = None
        session.router = event.peer
        session.told.add(event.peer)
        self._schedule(session, now)
        # A fence below ours is answered with ours: the asking router sees that it is out of date.
        fenced = RequestFenced(
            request_id=session.request_id, epoch=session.epoch, output=session.ids.tobytes()
        )
        fields = {
            "request_id": session.request_id,
            "epoch": session.epoch,
            "ids_held": len(session.ids),
        }
        return [Send(event.peer, fenced), Note("request_fenced", fields)]

    def _failed(self, session: Session, event: Received, now: float) -> list[Command]:
        message = event.message
        assert isinstance(message, RequestFailed)
        if message.epoch < session.epoch:
            return [Measure("stale_messages_total", labels={"kind": "epoch"})]
        return self._end(session, message.outcome, now)

    def _refused(self, session: Session, event: Received, now: float) -> list[Command]:
        message = event.message
        assert isinstance(message, RequestRefused)
        if event.peer != session.router:
            return [Measure("stale_messages_total", labels={"kind": "incarnation"})]
        if session.phase is Phase.RUNNING:
            session.router = None  # it does not take over what another one had placed
            return []
        outcome = Outcome(
            Ending.REFUSED,
            reason=message.reason,
            message=message.message,
        )
        return self._end(session, outcome, now, retry_after_ms=message.retry_after_ms)

    # --- tokens ---------------------------------------------------------------------------------

    def _tokens(self, peer: Peer, run: TokenRun, now: float) -> list[Command]:
        session = self._sessions.get(run.request_id)
        if session is None:
            return self._over(peer, run.request_id, run.epoch)
        verdict, fresh = session.accept(peer, self._links.role(peer), run)
        match verdict:
            case Verdict.FRESH:
                return self._deliver(session, fresh, now)
            case Verdict.REPEATED:
                session.recovery_due = self._still_missing(session)
                return []
            case Verdict.STALE:
                kind = "epoch" if run.epoch != session.epoch else "incarnation"
                return [Measure("stale_messages_total", labels={"kind": kind})]
            case Verdict.GAP:
                return self._want(session, peer, now)
            case Verdict.CORRUPT:
                fields = {"request_id": run.request_id, "peer": str(peer), "index": run.index}
                outcome = Outcome(
                    Ending.FAILED,
                    reason=Reason.INTEGRITY,
                    message="a worker sent tokens that contradict those already delivered",
                    completion_tokens=len(session.ids),
                )
                commands: list[Command] = [Note("tokens_contradict", fields, "error")]
                return [*commands, *self._end(session, outcome, now)]
            case _:
                assert_never(verdict)

    def _deliver(self, session: Session, fresh: list[TokenRun], now: float) -> list[Command]:
        if session.phase is not Phase.RUNNING:
            session.become(Phase.RUNNING)
        session.recovery_due = self._still_missing(session)
        commands: list[Command] = []
        count = 0
        for run in fresh:
            count += len(run.ids)
            commands.append(
                Deliver(
                    request_id=session.request_id,
                    index=run.index,
                    ids=run.ids,
                    logprobs=run.logprobs,
                    finish=run.finish,
                    cached_tokens=session.cached_tokens,
                )
            )
        commands += self._measure_tokens(session, count, now)
        if (finish := fresh[-1].finish) is not None:
            outcome = Outcome(Ending.COMPLETED, finish=finish, completion_tokens=len(session.ids))
            return [*commands, *self._end(session, outcome, now)]
        self._schedule(session, now)
        return commands

    def _measure_tokens(self, session: Session, count: int, now: float) -> list[Command]:
        commands: list[Command] = [Measure("tokens_sent_total", count)]
        if session.first_at is None:
            session.first_at = now
            commands.append(Measure("time_to_first_token_seconds", now - session.submitted_at))
        elif session.last_at is not None and count:
            commands.append(Measure("inter_token_latency_seconds", now - session.last_at))
        session.last_at = now
        return commands

    def _want(self, session: Session, peer: Peer, now: float) -> list[Command]:
        """Ask for what is missing below a run, not more often than once a second."""
        if session.wanted_at is not None and now - session.wanted_at < WANTED_AGAIN_S:
            return []
        session.wanted_at = now
        self._schedule(session, now)
        return [self._wanted(session, peer), Measure("token_gaps_total")]

    def _wanted(self, session: Session, peer: Peer) -> Send:
        wanted = TokensWanted(
            request_id=session.request_id, epoch=session.epoch, index=len(session.ids)
        )
        return Send(peer, wanted)

    def _still_missing(self, session: Session) -> float | None:
        """Keep the recovery deadline only while it is decode that is missing."""
        if session.decode is not None and session.decode in self._links:
            return None if session.decode_spoke else session.recovery_due
        return session.recovery_due

    # --- ends -----------------------------------------------------------------------------------

    def _end(
        self, session: Session, outcome: Outcome, now: float, retry_after_ms: int = 0
    ) -> list[Command]:
        """Decide the outcome: tell everybody who may hold something, and the ledger."""
        request_id = session.request_id
        del self._sessions[request_id]
        self._timers.set(request_id, None)
        told = {peer for peer in session.told if peer in self._links}
        self._endings.remember(request_id, outcome, told)
        ended = RequestEnded(request_id=request_id, epoch=session.epoch, outcome=outcome)
        commands: list[Command] = [Send(peer, ended) for peer in sorted(told)]
        tell_first = outcome.ending is not Ending.COMPLETED
        commands += self._endings.begin(
            request_id,
            session.epoch,
            outcome,
            now,
            tell_first=tell_first,
            retry_after_ms=retry_after_ms,
        )
        commands += _measure_end(outcome)
        commands.append(Measure("request_seconds", now - session.submitted_at))
        tokens = len(session.ids)
        if tokens > 1 and session.first_at is not None and session.last_at is not None:
            mean = (session.last_at - session.first_at) / (tokens - 1)
            commands.append(Measure("time_per_output_token_seconds", mean))
        fields = {
            "request_id": request_id,
            "epoch": session.epoch,
            "outcome": str(outcome.ending),
            "finish": outcome.finish and str(outcome.finish),
            "reason": outcome.reason and str(outcome.reason),
            "tokens": tokens,
        }
        return [*commands, Note("request_ended", fields)]

    # --- peers and time -------------------------------------------------------------------------

    def _peer_up(self, member: Member, now: float) -> list[Command]:
        self._links.up(member)
        commands: list[Command] = []
        if member.role is Role.ROUTER:
            for session in list(self._sessions.values()):
                if session.phase is Phase.WAITING:
                    commands += self._submit(session, now)
                else:
                    commands += self._take_over(session)
            return commands
        for session in self._sessions.values():
            # A worker that was placed before its link was up has turned up.
            bound = (session.decode, session.prefill)
            if session.router not in self._links:
                continue  # nobody makes good what its lost link took along
            if member.peer in bound and all(p in self._links for p in bound if p is not None):
                session.recovery_due = None
                self._schedule(session, now)
        return commands

    def _peer_lost(self, event: PeerLost, now: float) -> list[Command]:
        peer = event.peer
        role = self._links.lost(peer)
        self._endings.unheard(peer)
        commands: list[Command] = [*self._reports.lost(peer)]
        if role is Role.ROUTER:
            for session in list(self._sessions.values()):
                if session.phase is Phase.SUBMITTED and session.router == peer:
                    # Create-or-return: giving the same id to another router is harmless.
                    session.become(Phase.WAITING)
                    session.resubmissions += 1
                    commands += self._submit(session, now)
                elif session.router == peer:
                    commands += self._router_lost(session, now)
            return commands
        for session in self._sessions.values():
            matters = peer == session.decode or (
                peer == session.prefill and not session.decode_spoke
            )
            if matters and session.recovery_due is None:
                session.recovery_due = now + self._limits.recovery_ms / 1000
                self._schedule(session, now)
                commands += self._take_over(session)
        return commands

    def _router_lost(self, session: Session, now: float) -> list[Command]:
        """While decode speaks a placed request needs no router (the next token says so); one that
        waits for its first token is given to another at once: its placement may be lost."""
        if session.recovery_due is None:
            session.recovery_due = now + self._limits.recovery_ms / 1000
            self._schedule(session, now)
        return [] if session.decode_spoke else self._take_over(session)

    def _take_over(self, session: Session) -> list[Command]:
        """A request that lost its worker after its router has nobody left: ask another router.

        Create-or-return again; that router finds the record and goes on with the next epoch.
        """
        lost = session.recovery_due is not None and session.phase is Phase.RUNNING
        if not lost or session.router in self._links:
            return []
        router = self._links.next_router()
        if router is None:
            return []
        session.router = router
        session.told.add(router)
        return [Send(router, SubmitRequest(spec=session.spec))]

    def _schedule(self, session: Session, now: float) -> None:
        due = session.submitted_at + session.spec.deadline_ms / 1000
        if session.phase is not Phase.RUNNING:
            due = min(due, self._placement_due(session))
        if session.recovery_due is not None:
            due = min(due, session.recovery_due)
        if session.wanted_at is not None:
            due = min(due, session.wanted_at + WANTED_AGAIN_S)
        self._timers.set(session.request_id, due)

    def _placement_due(self, session: Session) -> float:
        if session.phase is Phase.WAITING and not session.resubmissions:
            # No router has ever been there: the start is a matter of seconds, or it is broken.
            return session.submitted_at + self._limits.lease_ttl_ms / 1000
        return session.submitted_at + self._limits.queue_deadline_ms / 1000 + QUEUE_SLACK_S

    def _time_passed(self, now: float) -> list[Command]:
        commands = [*self._endings.time_passed(now), *self._reports.time_passed(now)]
        for request_id in self._timers.pop_due(now):
            commands += self._session_due(self._sessions[request_id], now)
        if self._drain_due is not None and now >= self._drain_due:
            for session in list(self._sessions.values()):
                outcome = Outcome(
                    Ending.FAILED,
                    reason=Reason.DRAINING,
                    message="the gateway shut down before the answer was complete",
                    completion_tokens=len(session.ids),
                )
                commands += self._end(session, outcome, now)
        return commands

    def _session_due(self, session: Session, now: float) -> list[Command]:
        tokens = len(session.ids)
        if now >= session.submitted_at + session.spec.deadline_ms / 1000:
            message = "the request's deadline passed"
            outcome = Outcome(Ending.EXPIRED, None, Reason.DEADLINE, message, tokens)
            return self._end(session, outcome, now)
        if session.phase is not Phase.RUNNING and now >= self._placement_due(session):
            return self._end(session, self._unplaced(session), now)
        if session.recovery_due is not None and now >= session.recovery_due:
            message = "the worker of this request was lost and nobody took over in time"
            outcome = Outcome(Ending.FAILED, None, Reason.WORKER_LOST, message, tokens)
            return self._end(session, outcome, now)
        commands: list[Command] = []
        if session.wanted_at is not None and now >= session.wanted_at + WANTED_AGAIN_S:
            session.wanted_at = now
            if session.decode is not None and session.decode in self._links:
                commands.append(self._wanted(session, session.decode))
        self._schedule(session, now)
        return commands

    def _unplaced(self, session: Session) -> Outcome:
        if session.phase is Phase.WAITING:
            return Outcome(
                Ending.REFUSED, reason=Reason.NO_ROUTER, message="no router is connected"
            )
        return Outcome(
            Ending.REFUSED,
            reason=Reason.OVERLOADED,
            message="no worker had room for the request in time",
        )

    def _drained(self, now: float) -> list[Command]:
        assert self._drain_due is not None
        quiet = not self._sessions and not self._endings.waiting
        if self._exited or not (quiet or now >= self._drain_due):
            return []
        self._exited = True
        return [Exit(0, "drained")]


def _measure_end(outcome: Outcome) -> list[Command]:
    reason = str(outcome.reason) if outcome.reason is not None else ""
    labels = {"outcome": str(outcome.ending), "reason": reason}
    commands: list[Command] = [Measure("requests_total", labels=labels)]
    if outcome.ending is Ending.REFUSED:
        commands.append(Measure("requests_refused_total", labels={"reason": reason}))
    return commands
