"""Tokens on their way to the client: what a run from decode makes of a session.

Decides what is handed out, what is asked for again, and when the answer is complete. Which runs
count at all is the session's rule (``session.py``).
"""

from __future__ import annotations

from typing import assert_never

from baton.core.ids import Peer
from baton.core.outcomes import Ending, Outcome, Reason
from baton.gateway.session import Phase, Session, Verdict
from baton.gateway.state import WANTED_AGAIN_S, State
from baton.gateway.vocabulary import Command, Deliver
from baton.ports.driving import Measure, Note, Send
from baton.wire.messages import RequestEnded, TokenRun, TokensWanted


class Delivery:
    """The token path of one gateway."""

    def __init__(self, state: State) -> None:
        self.state = state

    def tokens(self, session: Session, peer: Peer, run: TokenRun, now: float) -> list[Command]:
        """Take one run from a linked peer."""
        verdict, fresh = session.accept(peer, self.state.links.role(peer), run)
        match verdict:
            case Verdict.FRESH:
                return self._deliver(session, fresh, now)
            case Verdict.REPEATED:
                session.recovery_due = self._still_missing(session, now)
                return []
            case Verdict.STALE:
                return self._stale(session, peer, run)
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
                return [*commands, *self.state.end(session, outcome, now)]
            case _:
                assert_never(verdict)

    def _stale(self, session: Session, peer: Peer, run: TokenRun) -> list[Command]:
        """Tokens of an attempt that is over: its worker was not told, or could not be."""
        kind = "epoch" if run.epoch != session.epoch else "incarnation"
        commands: list[Command] = [Measure("stale_messages_total", labels={"kind": kind})]
        if (peer, run.epoch) not in session.told_stale and run.epoch <= session.epoch:
            session.told_stale.add((peer, run.epoch))
            outcome = Outcome(Ending.CANCELLED, reason=Reason.SUPERSEDED)
            commands.append(Send(peer, RequestEnded(session.request_id, run.epoch, outcome)))
        return commands

    def wanted(self, session: Session, peer: Peer) -> Send:
        """Ask ``peer`` for what is missing."""
        wanted = TokensWanted(
            request_id=session.request_id, epoch=session.epoch, index=len(session.ids)
        )
        return Send(peer, wanted)

    def want_again(self, session: Session, now: float) -> list[Command]:
        """Repeat what was asked for, when its answer takes too long."""
        if session.wanted_at is None or now < session.wanted_at + WANTED_AGAIN_S:
            return []
        session.wanted_at = now
        if session.decode is None or session.decode not in self.state.links:
            return []
        return [self.wanted(session, session.decode)]

    def _deliver(self, session: Session, fresh: list[TokenRun], now: float) -> list[Command]:
        if session.phase is not Phase.RUNNING:
            session.become(Phase.RUNNING)
        session.recovery_due = self._still_missing(session, now)
        commands: list[Command] = []
        count = 0
        for run in fresh:
            count += len(run.ids)
            commands.append(
                Deliver(
                    request_id=session.name,
                    index=run.index,
                    ids=run.ids,
                    logprobs=run.logprobs,
                    finish=run.finish,
                    cached_tokens=session.cached_tokens,
                )
            )
        commands += self._measure(session, count, now)
        if session.bound is not None and session.bound_told != session.epoch:
            commands += self.state.tell_bound(session)
        if (finish := fresh[-1].finish) is not None:
            outcome = Outcome(Ending.COMPLETED, finish=finish, completion_tokens=len(session.ids))
            return [*commands, *self.state.end(session, outcome, now)]
        self.state.schedule(session)
        return commands

    def _measure(self, session: Session, count: int, now: float) -> list[Command]:
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
        self.state.schedule(session)
        return [self.wanted(session, peer), Measure("token_gaps_total")]

    def _still_missing(self, session: Session, now: float) -> float | None:
        """Decode speaks: somebody is missing only if it is decode. Without a router nobody would
        say so if decode fell silent: then the time runs anew from each word of it."""
        links = self.state.links
        if session.router not in links:
            return now + self.state.limits.recovery_ms / 1000
        if session.decode is not None and session.decode in links:
            return None if session.decode_spoke else session.recovery_due
        return session.recovery_due
