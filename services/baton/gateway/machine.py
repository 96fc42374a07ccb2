"""The gateway's decisions: sessions, from submission to the one outcome.

Decides where a request is submitted, which tokens its client gets and how it ends. Text, stop
strings and HTTP are not its business: it hands out token ids and hears what the HTTP layer found.
The gateway is the linearization point for tokens (ADR 0008); ``session.py`` holds the rule,
``delivery.py`` applies it, ``attempts.py`` deals with routers and lost workers; here is who calls
whom when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import assert_never

from baton.core.events import DrainRequested, LeaseChanged, RestartRequested, TimePassed
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.gateway.attempts import Attempts
from baton.gateway.delivery import Delivery
from baton.gateway.endings import Endings
from baton.gateway.keeping import Keeping
from baton.gateway.links import Links, Mode
from baton.gateway.remaking import Remaking
from baton.gateway.reports import Reports
from baton.gateway.resuming import Resuming
from baton.gateway.session import Phase, Session
from baton.gateway.state import State, measure_end
from baton.gateway.unknown import UnknownSweep
from baton.gateway.vocabulary import (
    CancelWanted,
    ClientGone,
    ClientsLeft,
    Command,
    End,
    Event,
    LeaveClients,
    ReaderBack,
    ReaderGone,
    ReportsWanted,
    ResumableWanted,
    ResumeWanted,
    StopMatched,
    Submitted,
)
from baton.ports.driving import EXIT_RESTART, Exit, LedgerAnswered, Measure, Note
from baton.ports.ledger import EndRequest, FindOwned
from baton.ports.transport import PeerLost, PeerRefused, PeerUp, Received
from baton.wire.holdings import HeldRequest, Holdings
from baton.wire.messages import (
    FenceRequest,
    PoolStatus,
    Report,
    RequestFailed,
    RequestPlaced,
    RequestRefused,
    RequestResumed,
    TokenChunk,
)


class GatewayMachine:
    """A :class:`baton.core.machine.Machine` for :data:`Event` and :data:`Command`."""

    def __init__(
        self,
        me: Peer,
        limits: Limits,
        mode: Mode = "split",
        *,
        others: bool = False,
        spare: bool = False,
    ) -> None:
        """Decide for the gateway ``me``.

        Args:
            me: this process.
            limits: all of them.
            mode: whether a prefill worker is needed.
            others: listen on the same socket, always.
            spare: it runs while another one is restarted, and has no successor.
        """
        self.state = State(me, limits, Links(mode), Endings(me))
        self.attempts = Attempts(self.state)
        self.delivery = Delivery(self.state)
        keeping = self.state.keeping = Keeping(self.state, self.attempts)
        remaking = self.state.remaking = Remaking(self.state, self.attempts, keeping)
        self.resuming = Resuming(self.state, self.attempts, keeping, remaking)
        self._unknown = UnknownSweep(self.state)
        self._reports = Reports()
        self._others = others or spare
        self._spare = spare
        self._leaving = False
        """Others take new connections; what came before is still served."""
        self._clients_left = False
        self._exit_code = 0
        self._exited = False

    # --- the Machine protocol -------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; return what is to be done, in order."""
        commands = self._handle(event, now)
        commands += self._unknown.time_passed(now)
        if self.draining:
            commands += self._drained(now)
        return commands

    def deadline(self) -> float | None:
        """When :class:`TimePassed` is needed next."""
        times = (
            self.state.timers.next_at(),
            self.state.endings.deadline(),
            self.resuming.deadline(),
            self._reports.deadline(),
            self._unknown.next_at,
            None if self._exited else self.state.drain_due,
        )
        return min((time for time in times if time is not None), default=None)

    def check(self) -> None:
        """Assert all invariants."""
        state = self.state
        assert len(state.sessions) <= state.limits.sessions_max
        assert len(state.timers) <= len(state.sessions)
        state.links.check()
        for request_id, session in state.sessions.items():
            assert request_id == session.request_id
            session.check()
        state.endings.check()
        state.keeping.check()
        self._reports.check()
        self._unknown.check()

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
            case LedgerAnswered(FindOwned(), reply):
                return self._unknown.found(reply)
            case LedgerAnswered():
                if isinstance(event.op, EndRequest):
                    if self._unknown.sent(event.op):
                        return self._unknown.answered(event.op, event.reply)
                    return self.state.endings.answered(event, now)
                return self.resuming.answered(event, now)
            case ResumableWanted():
                return self.resuming.open(event, self._refusal(), now)
            case ResumeWanted():
                return self.resuming.resume(event, now)
            case ReaderGone():
                return self.resuming.reader_gone(event, now)
            case ReaderBack():
                return self.resuming.reader_back(event, now)
            case CancelWanted():
                return self.resuming.cancel(event, now)
            case TimePassed():
                return self._time_passed(now)
            case PeerUp(member):
                self.state.links.up(member)
                return self.attempts.peer_up(member, now)
            case PeerLost():
                return self._peer_lost(event, now)
            case PeerRefused():
                return [Note("peer_refused", {"peer": event.worker_id, "why": event.text}, "error")]
            case ReportsWanted():
                return self._reports.begin(event.token, event.kind, self.state.links, now)
            case LeaseChanged():
                before, self.state.lease = self.state.lease, event.state
                again = event.state is LeaseState.HELD and before is LeaseState.LOST
                return self.resuming.announce() if again else []
            case DrainRequested():
                if not self.state.stopping:
                    self.state.stopping = True
                    self._end_by(now + self.state.limits.drain_ms / 1000)
                self._exit_code = 0
                return self._leave(for_others=self._others)
            case RestartRequested():
                self._end_by(now + self.state.limits.restart_ms / 1000)
                self._exit_code = 0 if self._spare else EXIT_RESTART
                return self._leave(for_others=True)
            case ClientsLeft():
                self._clients_left = True
                return []
            case _:
                assert_never(event)

    # --- what can be asked ----------------------------------------------------------------------

    def unready(self) -> tuple[Reason, str] | None:
        """Return why a request would be refused now, or ``None`` if it could be served."""
        if self.draining:
            return Reason.DRAINING, "the gateway is shutting down"
        if self.state.lease is not LeaseState.HELD:
            return Reason.LEDGER_UNAVAILABLE, "the gateway holds no lease: the ledger is away"
        return self.state.links.missing()

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken any more."""
        return self.state.drain_due is not None

    def status(self) -> dict[str, object]:
        """Describe this gateway for people; JSON-ready, no prompt, no ids of tokens."""
        unready = self.unready()
        state = self.state
        return {
            "ready": unready is None,
            "reason": None if unready is None else str(unready[0]),
            "lease": str(state.lease),
            "draining": self.draining,
            "sessions": len(state.sessions),
            "resumables": len(state.kept),
            "phases": dict(Counter(str(s.phase.value) for s in state.sessions.values())),
            "ends_unconfirmed": state.endings.waiting,
            "peers": [str(peer) for peer in sorted(state.links)],
        }

    def holdings(self) -> Holdings:
        """Return what ``baton audit`` compares."""
        return Holdings(
            requests=tuple(
                HeldRequest(
                    request_id=request_id,
                    epoch=session.epoch,
                    stage=session.phase.value,
                    gateway=self.state.me,
                    router=session.router,
                    decode=session.decode,
                    prefill=session.prefill,
                )
                for request_id, session in self.state.sessions.items()
            ),
            ends=self.state.endings.unconfirmed,
        )

    def gauges(self) -> Mapping[str, float]:
        """Return the values of this machine's gauges."""
        sessions = self.state.sessions
        running = sum(s.phase is Phase.RUNNING for s in sessions.values())
        return {
            "num_requests_running": running,
            "num_requests_waiting": len(sessions) - running,
            "resumables": self.resuming.held,
        }

    # --- clients --------------------------------------------------------------------------------

    def _submitted(self, event: Submitted, now: float) -> list[Command]:
        spec, state = event.spec, self.state
        if event.resumable_id:
            return self.resuming.submitted(event, self._refusal(), now)
        if spec.request_id in state.sessions or spec.request_id in state.endings.recent:
            return [Note("duplicate_submission", {"request_id": spec.request_id}, "error")]
        if refusal := self._refusal():
            reason, message = refusal
            outcome = Outcome(Ending.REFUSED, reason=reason, message=message)
            return [End(spec.request_id, outcome), *measure_end(outcome)]
        return self.attempts.begin(Session(spec=spec, submitted_at=now), now)

    def _refusal(self) -> tuple[Reason, str] | None:
        """Why a new request is not even tried. Missing workers are the router's to judge."""
        if self.draining and not self._leaving:
            return Reason.DRAINING, "the gateway is shutting down"
        if self.state.lease in (LeaseState.SUSPECT, LeaseState.LOST):
            return Reason.LEDGER_UNAVAILABLE, "the ledger cannot be reached"
        if len(self.state.sessions) >= self.state.limits.sessions_max:
            return Reason.OVERLOADED, "too many requests are running in this gateway"
        return None

    def _client_gone(self, event: ClientGone, now: float) -> list[Command]:
        session = self.state.session_of(event.request_id)
        if session is None:
            return []
        return self.state.end(session, Outcome(Ending.CANCELLED, reason=event.reason), now)

    def _stop_matched(self, event: StopMatched, now: float) -> list[Command]:
        session = self.state.session_of(event.request_id)
        if session is None:
            return []
        assert 0 < event.tokens_used <= len(session.ids)
        outcome = Outcome(
            Ending.COMPLETED, finish=FinishReason.STOP, completion_tokens=event.tokens_used
        )
        return self.state.end(session, outcome, now)

    # --- messages -------------------------------------------------------------------------------

    def _received(self, event: Received, now: float) -> list[Command]:
        message = event.message
        match message:
            case TokenChunk():
                commands: list[Command] = []
                for run in message.runs:
                    session = self.state.sessions.get(run.request_id)
                    if session is None:
                        commands += self.attempts.over(event.peer, run.request_id, run.epoch)
                    else:
                        commands += self.delivery.tokens(session, event.peer, run, now)
                return commands
            case RequestPlaced() | FenceRequest() | RequestFailed() | RequestRefused():
                return self.attempts.received(event, message, now)
            case RequestResumed():
                return self.resuming.resumed_elsewhere(message)
            case PoolStatus():
                self.state.links.pool(event.peer, message)
                return []
            case Report():
                return self._reports.received(event.peer, message)
            case _:
                fields = {"peer": str(event.peer), "kind": type(message).__name__}
                stale = Measure("stale_messages_total", labels={"kind": "unknown"})
                return [stale, Note("unexpected_message", fields, "warning")]

    # --- peers and time -------------------------------------------------------------------------

    def _peer_lost(self, event: PeerLost, now: float) -> list[Command]:
        peer = event.peer
        role = self.state.links.lost(peer)
        self.state.endings.unheard(peer)
        commands = self._reports.lost(peer)
        if role is Role.ROUTER:
            return [*commands, *self.attempts.router_lost(peer, now)]
        self.attempts.worker_lost(peer, now)
        return commands

    def _time_passed(self, now: float) -> list[Command]:
        state = self.state
        commands = [*state.endings.time_passed(now), *self._reports.time_passed(now)]
        commands += self.resuming.time_passed(now)
        for request_id in state.timers.pop_due(now):
            # One that ends takes the other choices of a resumable request along.
            if (due := state.sessions.get(request_id)) is not None:
                commands += self._session_due(due, now)
        if state.drain_due is not None and now >= state.drain_due:
            commands += self.resuming.drained()
            for session in list(state.sessions.values()):
                outcome = Outcome(
                    Ending.FAILED,
                    reason=Reason.DRAINING,
                    message="the gateway shut down before the answer was complete",
                    completion_tokens=len(session.ids),
                )
                commands += state.end(session, outcome, now)
        return commands

    def _session_due(self, session: Session, now: float) -> list[Command]:
        state, tokens = self.state, len(session.ids)
        if now >= session.submitted_at + session.spec.deadline_ms / 1000:
            message = "the request's deadline passed"
            outcome = Outcome(Ending.EXPIRED, None, Reason.DEADLINE, message, tokens)
            return state.end(session, outcome, now)
        if session.phase is not Phase.RUNNING and now >= state.placement_due(session):
            return state.end(session, self.attempts.unplaced(session), now)
        if session.recovery_due is not None and now >= session.recovery_due:
            reason, who = Reason.WORKER_LOST, "the worker"
            if session.router not in state.links:
                reason, who = Reason.NO_ROUTER, "the router"
            message = f"{who} of this request was lost and nobody took over in time"
            outcome = Outcome(Ending.FAILED, None, reason, message, tokens)
            return state.end(session, outcome, now)
        commands = self.delivery.want_again(session, now)
        state.schedule(session)
        return commands

    def _end_by(self, due: float) -> None:
        """What still runs then is ended; what was asked for first may be sooner."""
        state = self.state
        state.drain_due = due if state.drain_due is None else min(state.drain_due, due)

    def _leave(self, *, for_others: bool) -> list[Command]:
        commands: list[Command] = [Note("draining", {"sessions": len(self.state.sessions)})]
        commands += self.resuming.drain()
        if for_others and not self._leaving:
            self._leaving = True
            commands.append(LeaveClients())
        return commands

    def _drained(self, now: float) -> list[Command]:
        state = self.state
        quiet = not (state.sessions or state.endings.waiting or state.keeping.closing)
        if self._leaving:
            quiet = quiet and self._clients_left
        due = state.drain_due is not None and now >= state.drain_due
        if self._exited or not (quiet or due):
            return []
        self._exited = True
        return [Exit(self._exit_code, "drained")]
