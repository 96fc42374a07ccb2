"""Attempts as the gateway sees them: routers that take a request, place it, fence it or give it up.

Decides which router a request is given to, what binds an attempt to its workers, and what a lost
router or worker means for the sessions that had it.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.core.ids import Member, Peer, Role
from baton.core.outcomes import Ending, Outcome, Reason
from baton.gateway.session import Phase, Session
from baton.gateway.state import State
from baton.gateway.vocabulary import Command
from baton.ports.driving import Measure, Note, Send
from baton.ports.transport import Received
from baton.wire.messages import (
    FenceRequest,
    RequestEnded,
    RequestFailed,
    RequestFenced,
    RequestLeft,
    RequestMoved,
    RequestPlaced,
    RequestRefused,
)

#: How a request can have ended elsewhere so that its answer can still be had: by making it again.
_WITHOUT_IDS = frozenset({Ending.COMPLETED, Ending.REFUSED})


class Attempts:
    """All attempts of one gateway's requests."""

    def __init__(self, state: State) -> None:
        self.state = state

    # --- giving it to a router ------------------------------------------------------------------

    def begin(self, session: Session, now: float) -> list[Command]:
        """A session begins here."""
        self.state.sessions[session.request_id] = session
        fields = {
            "request_id": session.request_id,
            "prompt_tokens": session.spec.prompt_tokens,
            "max_tokens": session.spec.max_tokens,
        }
        return [Note("request_submitted", fields), *self.give(session, now)]

    def give(self, session: Session, now: float) -> list[Command]:
        """Give the request to the router that had it, if that is linked again, else to the next
        one; without any it waits. Create-or-adopt: what runs goes on as it is."""
        links, router = self.state.links, session.router
        if router is None or router not in links or links.draining(router):
            router = links.next_router()
        if router is None and session.turn:
            # Nobody else is there, and it may be that one's: it sees through what it has.
            router = links.last_resort(session.declined)
        if router is None:
            if session.waiting_since is None:
                session.waiting_since = now
            self._arm(session, now)
            return []
        if router != session.router:
            session.router = router
            session.turn += 1
        if session.phase is Phase.WAITING:
            session.become(Phase.SUBMITTED)
        session.told.add(router)
        session.waiting_since = session.recovery_due = None  # it answers for it now
        session.bound_told = 0  # whom it tells decode to send to begins without a bound
        self.state.schedule(session)
        lost = session.decode is not None and session.decode not in links
        return [Send(router, session.submission(now, decode_lost=lost))]

    def _arm(self, session: Session, now: float) -> None:
        """Somebody must have taken over by then."""
        if session.phase is Phase.RUNNING and session.recovery_due is None:
            session.recovery_due = now + self.state.limits.recovery_ms / 1000
        self.state.schedule(session)

    def unplaced(self, session: Session) -> Outcome:
        """Return the outcome of a request that nobody placed in time."""
        if session.phase is Phase.WAITING:
            return Outcome(
                Ending.REFUSED, reason=Reason.NO_ROUTER, message="no router is connected"
            )
        return Outcome(
            Ending.REFUSED,
            reason=Reason.OVERLOADED,
            message="no worker had room for the request in time",
        )

    # --- what routers say -----------------------------------------------------------------------

    def received(
        self,
        event: Received,
        message: RequestPlaced | FenceRequest | RequestFailed | RequestRefused,
        now: float,
    ) -> list[Command]:
        """Take what a router says of one request: only the word of its current one counts."""
        session = self.state.sessions.get(message.request_id)
        if session is None:
            epoch = max(1, message.epoch)
            return self.over(event.peer, message.request_id, epoch)
        if event.peer != session.router:
            return self._moved(session, event.peer)
        handlers: dict[type, Callable[..., list[Command]]] = {
            RequestPlaced: self._placed,
            FenceRequest: self._fence,
            RequestFailed: self._failed,
            RequestRefused: self._refused,
        }
        return handlers[type(message)](session, event.peer, message, now)

    def _moved(self, session: Session, peer: Peer) -> list[Command]:
        """A router that lost the request to another speaks of it: it is told so."""
        commands: list[Command] = [Measure("stale_messages_total", labels={"kind": "turn"})]
        if self.state.links.role(peer) is Role.ROUTER:
            commands.append(Send(peer, RequestMoved(session.request_id, max(1, session.turn))))
        return commands

    def over(self, peer: Peer, request_id: str, epoch: int) -> list[Command]:
        """Somebody works on a request that is over (or never was): tell him so, once."""
        endings = self.state.endings
        ended = endings.recent.get(request_id)
        if ended is None:
            outcome = Outcome(
                Ending.CANCELLED, reason=Reason.SUPERSEDED, message="unknown to this gateway"
            )
            endings.remember(request_id, outcome, {peer})
        elif ended.left:
            # Not a word to workers: they hear from whoever has it. A router that does not know yet
            # may be one that has lost it with this gateway.
            if self.state.links.role(peer) is not Role.ROUTER:
                return []
            if ended.left_turn:
                return [Send(peer, RequestMoved(request_id, ended.left_turn))]
            # Nobody has claimed it yet: it must not wait for a word from here.
            return [Send(peer, RequestLeft(request_id))]
        elif peer in ended.told:
            return []
        else:
            ended.told.add(peer)
            outcome = ended.outcome
        return [
            Measure("stale_messages_total", labels={"kind": "unknown"}),
            Send(peer, RequestEnded(request_id, epoch, outcome, early=True)),
        ]

    def _placed(
        self, session: Session, peer: Peer, message: RequestPlaced, now: float
    ) -> list[Command]:
        if not session.place(message.epoch, message.decode, message.prefill):
            fields = {"request_id": session.request_id, "epoch": message.epoch}
            return [
                Measure("stale_messages_total", labels={"kind": "epoch"}),
                Note("placement_refused", fields, "warning"),
            ]
        session.become(Phase.RUNNING)
        session.recovery_due = None
        missing = [
            worker
            for worker in (message.decode, message.prefill)
            if worker is not None and worker not in self.state.links
        ]
        if missing:
            # Not linked yet, or lost already: either it turns up, or somebody takes over in time.
            session.recovery_due = now + self.state.limits.recovery_ms / 1000
        self.state.schedule(session)
        placed: dict[str, object] = {
            "request_id": session.request_id,
            "epoch": message.epoch,
            "decode": str(message.decode),
            "prefill": str(message.prefill),
        }
        others = [router for router in self.state.links.routers() if router != peer]
        return [
            Note("request_placed", placed),
            *(each for router in others for each in self._not_yours(session, router)),
        ]

    def _not_yours(self, session: Session, router: Peer) -> list[Command]:
        """A request that is here from another gateway is placed: whichever router had it under that
        one, which may be dead, hears it from nobody else."""
        if not session.from_elsewhere or session.phase is not Phase.RUNNING:
            return []
        return [Send(router, RequestMoved(session.request_id, session.turn))]

    def _fence(
        self, session: Session, peer: Peer, message: FenceRequest, now: float
    ) -> list[Command]:
        if message.epoch > session.epoch:
            session.fence(message.epoch)
            session.become(Phase.RUNNING)
            # Its router sees to it, however long it waits there for memory.
            session.recovery_due = None
        self.state.schedule(session)
        # A fence below ours is answered with ours: the asking router sees that it is out of date.
        fenced = RequestFenced(
            request_id=session.request_id, epoch=session.epoch, output=session.ids.tobytes()
        )
        fields = {
            "request_id": session.request_id,
            "epoch": session.epoch,
            "ids_held": len(session.ids),
        }
        return [Send(peer, fenced), Note("request_fenced", fields)]

    def _failed(
        self, session: Session, peer: Peer, message: RequestFailed, now: float
    ) -> list[Command]:
        if message.epoch < session.epoch:
            return [Measure("stale_messages_total", labels={"kind": "epoch"})]
        if message.outcome.ending in _WITHOUT_IDS and session.kept:
            return self.state.remaking.lost(session, now)
        return self.state.end(session, message.outcome, now)

    def _refused(
        self, session: Session, peer: Peer, message: RequestRefused, now: float
    ) -> list[Command]:
        leaving = message.reason is Reason.DRAINING and not self.state.stopping
        # It knows of less than has happened, or its client has a part of the answer.
        overtaken = session.phase is Phase.RUNNING and message.epoch < session.epoch
        if leaving or overtaken or session.ids:
            # Another one takes it, or its successor; this one is to forget it.
            if leaving:
                self.state.links.leaving(peer)
                session.declined.add(peer)
            moved = Send(peer, RequestMoved(session.request_id, session.turn + 1))
            return [moved, *self._without_router(session, now)]
        outcome = Outcome(
            Ending.REFUSED,
            reason=message.reason,
            message=message.message,
        )
        return self.state.end(session, outcome, now, retry_after_ms=message.retry_after_ms)

    # --- links ----------------------------------------------------------------------------------

    def peer_up(self, member: Member, now: float) -> list[Command]:
        """A link is open: a router gets what waits, a worker that was awaited is there."""
        commands: list[Command] = []
        links = self.state.links
        if member.role is Role.ROUTER:
            for session in self.state.sessions.values():
                orphan = session.router not in links or session.waiting_since is not None
                if orphan or session.router == member.peer:
                    commands += self.give(session, now)
                else:
                    commands += self._not_yours(session, member.peer)
            return commands
        for session in self.state.sessions.values():
            # A worker that was placed before its link was up has turned up.
            bound = (session.decode, session.prefill)
            if session.router not in links:
                continue  # nobody makes good what its lost link took along
            if member.peer in bound and all(p in links for p in bound if p is not None):
                session.recovery_due = None
                self.state.schedule(session)
        return commands

    def router_lost(self, peer: Peer, now: float) -> list[Command]:
        """Its requests are given to another one, or go on without."""
        commands: list[Command] = []
        for session in self.state.sessions.values():
            if session.router == peer:
                commands += self._without_router(session, now)
        return commands

    def _without_router(self, session: Session, now: float) -> list[Command]:
        """Another router takes the request over, now or when there is one. What runs, runs on."""
        if session.phase is Phase.SUBMITTED:
            session.become(Phase.WAITING)
        return self.give(session, now)

    def worker_lost(self, peer: Peer, now: float) -> None:
        """Somebody must take over in time what it worked on."""
        for session in self.state.sessions.values():
            matters = peer == session.decode or (
                peer == session.prefill and not session.decode_spoke
            )
            if matters:
                self._arm(session, now)
