"""What the parts of the gateway machine share: sessions, links, timers, ends.

Decides when a session must be looked at again, and what the end of one entails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.ids import Peer
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, Outcome
from baton.gateway.endings import Endings
from baton.gateway.kept import Kept
from baton.gateway.links import Links
from baton.gateway.session import Phase, Session
from baton.gateway.timers import Timers
from baton.gateway.vocabulary import Command
from baton.ports.driving import Measure, Note, Send
from baton.wire.messages import RequestEnded, TokensBounded

if TYPE_CHECKING:
    from baton.gateway.keeping import Keeping
    from baton.gateway.remaking import Remaking

#: A gap that was asked for is asked for again after this long.
WANTED_AGAIN_S = 1.0
#: Routers enforce the waiting limit; the gateway's own is later, for when no router answers.
QUEUE_SLACK_S = 1.0


@dataclass(slots=True)
class State:
    """Shared by the machine and its parts; one owner: the machine."""

    me: Peer
    limits: Limits
    links: Links
    endings: Endings
    sessions: dict[str, Session] = field(default_factory=dict)
    timers: Timers = field(default_factory=Timers)
    lease: LeaseState = LeaseState.VACANT
    drain_due: float | None = None
    """This gateway is to end; by then at the latest."""
    stopping: bool = False
    """It has no successor."""
    kept: dict[str, Kept] = field(default_factory=dict)
    """Resumable requests, by id."""
    names: dict[str, str] = field(default_factory=dict)
    """Request id of those choices that their clients know by another one."""
    keeping: Keeping = field(init=False)
    remaking: Remaking = field(init=False)

    def session_of(self, choice: str) -> Session | None:
        """Return the session of what a client knows as ``choice``."""
        return self.sessions.get(self.names.get(choice, choice))

    def remove(self, session: Session, turn: int = 0) -> None:
        """It is not this gateway's any more (since ``turn``, if that is known): whoever has it goes
        on."""
        self._drop(session)
        self.endings.leave(session.request_id, turn)

    def _drop(self, session: Session) -> None:
        del self.sessions[session.request_id]
        self.names.pop(session.name, None)
        self.timers.set(session.request_id, None)

    def tell_bound(self, session: Session) -> list[Command]:
        """Tell decode how far it may go while nobody reads."""
        if session.bound is None or session.decode is None or session.decode not in self.links:
            return []
        session.bound_told = session.epoch
        bounded = TokensBounded(session.request_id, session.epoch, session.bound)
        return [Send(session.decode, bounded)]

    def schedule(self, session: Session) -> None:
        """Set when ``session`` must be looked at next."""
        due = session.submitted_at + session.spec.deadline_ms / 1000
        if session.phase is not Phase.RUNNING:
            due = min(due, self.placement_due(session))
        if session.recovery_due is not None:
            due = min(due, session.recovery_due)
        if session.wanted_at is not None:
            due = min(due, session.wanted_at + WANTED_AGAIN_S)
        self.timers.set(session.request_id, due)

    def placement_due(self, session: Session) -> float:
        """When a request that nobody has placed is given up."""
        due = session.submitted_at + self.limits.queue_deadline_ms / 1000 + QUEUE_SLACK_S
        if session.waiting_since is None:
            return due
        # One that was there comes back within that time; without one the start is broken.
        limits = self.limits
        patience_ms = limits.recovery_ms if self.links.had_router else limits.lease_ttl_ms
        return min(due, session.waiting_since + patience_ms / 1000)

    def end(
        self, session: Session, outcome: Outcome, now: float, retry_after_ms: int = 0
    ) -> list[Command]:
        """Decide the outcome: tell everybody who may hold something, and the ledger."""
        if (left := self.keeping.refused(session, outcome, now)) is not None:
            return left
        request_id = session.request_id
        self._drop(session)
        told = {peer for peer in session.told if peer in self.links}
        self.endings.remember(request_id, outcome, told)
        early = session.phase is not Phase.RUNNING
        first_at = session.first_at
        ttft_ms = None if first_at is None else (first_at - session.submitted_at) * 1000
        ended = RequestEnded(request_id, session.epoch, outcome, early, ttft_ms)
        commands: list[Command] = [Send(peer, ended) for peer in sorted(told)]
        tell_first = outcome.ending is not Ending.COMPLETED
        commands += self.endings.begin(
            request_id,
            session.epoch,
            outcome,
            now,
            turn=session.turn,
            tell_first=tell_first,
            retry_after_ms=retry_after_ms,
            early=early and session.turn > 0,
            name=session.name,
        )
        commands += self.keeping.ended(session, outcome, now)
        commands += measure_end(outcome)
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


def measure_end(outcome: Outcome) -> list[Command]:
    """Count an end, also that of a request which never became a session."""
    reason = str(outcome.reason) if outcome.reason is not None else ""
    labels = {"outcome": str(outcome.ending), "reason": reason}
    commands: list[Command] = [Measure("requests_total", labels=labels)]
    if outcome.ending is Ending.REFUSED:
        commands.append(Measure("requests_refused_total", labels={"reason": reason}))
    return commands
