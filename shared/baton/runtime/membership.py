"""This process among the others: its lease, who it dials, which links it has.

Decides when links are dialled again, and when the process stays cut off and must start anew (with
``LinkWatch``); answers reports. All other events go on to the service's machine as they came.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.core.events import LeaseChanged, PromptsTaken, RoleLeft
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import LeaseState
from baton.ports.lease import MembersChanged, Replaced
from baton.ports.transport import PeerLost, PeerRefused, PeerUp, Received, TransportEvent
from baton.runtime.catalogue import DROPPED
from baton.runtime.members import LinkWatch, to_dial
from baton.runtime.metrics import Metrics
from baton.runtime.role_change import RoleChange
from baton.runtime.service import EX_AGAIN, EX_CONFIG, Context
from baton.wire.messages import ChangeRole, ReadReport, Report, RoleAnswered

#: Ends of links that are nobody's trouble.
_IN_ORDER = frozenset({"goodbye", "replaced"})


class Membership:
    """Between transport, lease keeper and the machine."""

    def __init__(
        self,
        context: Context,
        report: Callable[[str], bytes],
        held: Callable[[], None],
        busy: Callable[[], str],
        become: Callable[[PromptsTaken | RoleLeft], None],
    ) -> None:
        """``report`` makes the body of a report; ``held`` is called when the lease is held;
        ``busy`` and ``become`` are :class:`RoleChange`'s."""
        self.lease = LeaseState.VACANT
        self._context = context
        self._report = report
        self.roles = RoleChange(context, self._others, busy, become)
        self._held = held
        self._members: tuple[Member, ...] = ()
        self._links = LinkWatch(context.me, context.role)
        self._open: set[Peer] = set()

    @property
    def executors(self) -> dict[type, Callable[..., None]]:
        """Of the lease keeper's commands."""
        return {
            LeaseChanged: self._lease_changed,
            MembersChanged: self._members_changed,
            Replaced: self._replaced,
        }

    def on_transport(self, event: TransportEvent) -> None:
        """Answer a report, have the role changed, note a link's begin and end; everything else is
        the machine's."""
        context = self._context
        match event:
            case Received(peer, ReadReport(kind=kind, token=token)):
                body = self._report(kind)
                context.transport.send(peer, Report(kind=kind, token=token, body=body))
                return
            case Received(peer, ChangeRole() as question):
                self.roles.ask(question, lambda refused: self._tell_role(peer, question, refused))
                return
            case PeerUp(member):
                self._links.up(member.peer)
                self._note_link(member.peer, is_open=True)
                context.log.info("peer_up", peer=member.peer)
            case PeerLost(peer, reason):
                self._links.lost(event, context.clock.now())
                self._note_link(peer, is_open=False)
                word = lost_word(reason)
                context.metrics.measure("peers_lost_total", labels={"reason": word})
                log = context.log.info if word in _IN_ORDER else context.log.warning
                log("peer_lost", peer=peer, reason=reason)
            case PeerRefused(worker_id, text):
                context.metrics.measure("peers_refused_total")
                context.log.error("peer_refused", peer=worker_id, reason=text)
            case Received():
                pass
        context.feed(event)

    def _tell_role(self, peer: Peer, question: ChangeRole, refused: str) -> None:
        log, wanted = self._context.log, question.role
        log.info("role_wanted", wanted=wanted, by=peer, refused=refused or None)
        self._context.transport.send(peer, RoleAnswered(question.role, refused))

    def _others(self, role: Role) -> tuple[Peer, ...]:
        """Who else of that role holds a lease."""
        me = self._context.me
        return tuple(each.peer for each in self._members if each.role is role and each.peer != me)

    def look_around(self) -> None:
        """Dial again whoever is not linked; end the process if it stays cut off all the same."""
        self._dial()
        peer = self._links.cut_off(self._context.clock.now())
        if peer is not None:
            self._context.end(EX_AGAIN, f"cut off from {peer}, which lives: starting anew")

    def _note_link(self, peer: Peer, *, is_open: bool) -> None:
        if is_open:
            self._open.add(peer)
        else:
            self._open.discard(peer)
        self._context.metrics.gauges({"peers": len(self._open)})

    def _lease_changed(self, change: LeaseChanged) -> None:
        self.lease = change.state
        metrics = self._context.metrics
        self._context.log.info("lease_changed", state=change.state)
        metrics.gauges(
            {f"lease_state:{state}": float(state is change.state) for state in LeaseState}
        )
        if change.state is LeaseState.LOST:
            metrics.measure("leases_lost_total")
        if change.state is LeaseState.HELD:
            self._held()
        self._context.feed(change)

    def _members_changed(self, change: MembersChanged) -> None:
        newcomer = not self._members
        self._members = change.members
        self._links.members(change.members)
        self._dial(newcomer=newcomer)

    def _dial(self, *, newcomer: bool = False) -> None:
        me, role = self._context.me, self._context.role
        # Idempotent for those that are linked or being dialled.
        for member in to_dial(me, role, self._members, newcomer=newcomer):
            self._context.transport.dial(member)

    def _replaced(self, _: Replaced) -> None:
        # Two owners of one name: whoever starts last has it, and we must not take it back.
        self._context.end(EX_CONFIG, "another process has started under this worker_id")


def count_frame(metrics: Metrics, word: str) -> None:
    """Count what the transport dropped, refused or did again, in its own words."""
    if word in DROPPED:
        metrics.measure("frames_dropped_total", labels={"reason": word})
    else:
        metrics.measure("link_events_total", labels={"kind": word})


def lost_word(reason: str) -> str:
    """Return the bounded word for the transport's text about the end of a link."""
    for start, word in (
        ("died", "died"),
        ("silent", "silent"),
        ("said goodbye", "goodbye"),
        ("replaced", "replaced"),
        ("no answer", "no_answer"),
        ("left ", "unacked"),
    ):
        if reason.startswith(start):
            return word
    return "over"
