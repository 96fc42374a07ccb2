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
    RequestPlaced,
    RequestRefused,
    SubmitRequest,
)


class Attempts:
    """All attempts of one gateway's requests."""

    def __init__(self, state: State) -> None:
        self.state = state

    # --- giving it to a router ------------------------------------------------------------------

    def submit(self, session: Session) -> list[Command]:
        """Give the request to the next router, or leave it waiting for one."""
        router = self.state.links.next_router()
        if router is None:
            self.state.schedule(session)
            return []
        session.become(Phase.SUBMITTED)
        session.router = router
        session.told.add(router)
        self.state.schedule(session)
        return [Send(router, SubmitRequest(spec=session.spec))]

    def take_over(self, session: Session) -> list[Command]:
        """A request that lost its worker after its router has nobody left: ask another router.

        Create-or-return again; that router finds the record and goes on with the next epoch.
        """
        lost = session.recovery_due is not None and session.phase is Phase.RUNNING
        if not lost or session.router in self.state.links:
            return []
        router = self.state.links.next_router()
        if router is None:
            return []
        session.router = router
        session.told.add(router)
        return [Send(router, SubmitRequest(spec=session.spec))]

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
        """Take what a router (or decode, without one) says of one request."""
        session = self.state.sessions.get(message.request_id)
        if session is None:
            epoch = 1 if isinstance(message, RequestRefused) else message.epoch
            return self.over(event.peer, message.request_id, epoch)
        handlers: dict[type, Callable[..., list[Command]]] = {
            RequestPlaced: self._placed,
            FenceRequest: self._fence,
            RequestFailed: self._failed,
            RequestRefused: self._refused,
        }
        return handlers[type(message)](session, event.peer, message, now)

    def over(self, peer: Peer, request_id: str, epoch: int) -> list[Command]:
        """Somebody works on a request that is over (or never was): tell him so, once."""
        endings = self.state.endings
        ended = endings.recent.get(request_id)
        if ended is None:
            outcome = Outcome(
                Ending.CANCELLED, reason=Reason.SUPERSEDED, message="unknown to this gateway"
            )
            endings.remember(request_id, outcome, {peer})
        elif peer in ended.told:
            return []
        else:
            ended.told.add(peer)
            outcome = ended.outcome
        return [
            Measure("stale_messages_total", labels={"kind": "unknown"}),
            Send(peer, RequestEnded(request_id=request_id, epoch=epoch, outcome=outcome)),
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
        session.router = peer
        session.told.add(peer)
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
        return [Note("request_placed", placed)]

    def _fence(
        self, session: Session, peer: Peer, message: FenceRequest, now: float
    ) -> list[Command]:
        if message.epoch > session.epoch:
            session.fence(message.epoch)
            session.become(Phase.RUNNING)
            # Its router sees to it, however long it waits there for memory.
            session.recovery_due = None
        session.router = peer
        session.told.add(peer)
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
        if peer not in (session.router, session.decode):
            # A router that was superseded, or a worker of no attempt of this request.
            return [Measure("stale_messages_total", labels={"kind": "incarnation"})]
        return self.state.end(session, message.outcome, now)

    def _refused(
        self, session: Session, peer: Peer, message: RequestRefused, now: float
    ) -> list[Command]:
        if peer != session.router:
            return [Measure("stale_messages_total", labels={"kind": "incarnation"})]
        if session.phase is Phase.RUNNING:
            session.router = None  # it does not take over what another one had placed
            return []
        outcome = Outcome(
            Ending.REFUSED,
            reason=message.reason,
            message=message.message,
        )
        return self.state.end(session, outcome, now, retry_after_ms=message.retry_after_ms)

    # --- links ----------------------------------------------------------------------------------

    def peer_up(self, member: Member) -> list[Command]:
        """A link is open: a router gets what waits, a worker that was awaited is there."""
        commands: list[Command] = []
        if member.role is Role.ROUTER:
            for session in list(self.state.sessions.values()):
                if session.phase is Phase.WAITING:
                    commands += self.submit(session)
                else:
                    commands += self.take_over(session)
            return commands
        links = self.state.links
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
        for session in list(self.state.sessions.values()):
            if session.phase is Phase.SUBMITTED and session.router == peer:
                # Create-or-return: giving the same id to another router is harmless.
                session.become(Phase.WAITING)
                session.resubmissions += 1
                commands += self.submit(session)
            elif session.router == peer:
                # While decode speaks a placed request needs no router (the next token says so); one
                # that waits for its first token is given to another at once: its placement may be
                # lost.
                if session.recovery_due is None:
                    session.recovery_due = now + self.state.limits.recovery_ms / 1000
                    self.state.schedule(session)
                commands += [] if session.decode_spoke else self.take_over(session)
        return commands

    def worker_lost(self, peer: Peer, now: float) -> list[Command]:
        """Somebody must take over in time what it worked on."""
        commands: list[Command] = []
        for session in self.state.sessions.values():
            matters = peer == session.decode or (
                peer == session.prefill and not session.decode_spoke
            )
            if matters and session.recovery_due is None:
                session.recovery_due = now + self.state.limits.recovery_ms / 1000
                self.state.schedule(session)
                commands += self.take_over(session)
        return commands
