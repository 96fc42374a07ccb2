"""One peer as this process knows it: being dialled, connected, or over.

Decides the pace of the hello and holds the link. Who is accepted is decided by the switchboard.
"""

from __future__ import annotations

from enum import StrEnum

from baton.core.ids import Member, Peer
from baton.core.limits import Limits
from baton.transport.effects import Route
from baton.wire import frames
from baton.wire.frames import Frame, Kind
from baton.wire.link import Link

#: A pair that was refused is tried again this often: only an operator can change it.
REFUSED_REDIAL_S = 10.0
#: After so many handshake times without a link the dial is forgotten; the next one starts anew.
DIAL_HANDSHAKES_MAX = 12


class LineState(StrEnum):
    """The life of a line."""

    DIALLING = "dialling"
    UP = "up"
    OVER = "over"


LINE_MOVES: dict[LineState, frozenset[LineState]] = {
    LineState.DIALLING: frozenset({LineState.UP, LineState.OVER}),
    LineState.UP: frozenset({LineState.OVER}),
    LineState.OVER: frozenset(),
}


class Line:
    """The record of one peer. ``member`` is what was known when it was dialled or accepted."""

    def __init__(
        self, me: Member, member: Member, route: Route, limits: Limits, *, number: int, now: float
    ) -> None:
        self.peer: Peer = member.peer
        self.number = number
        """Of the link; who dials takes the next one that this pair has not used."""
        self.member = member
        self.route = route
        self.state = LineState.DIALLING
        self.muted = False
        """The process hung up: it wants to hear nothing more of this peer."""
        self._me = me
        self._limits = limits
        self.link = self._new_link(now)

        self._handshake_s = limits.handshake_ms / 1e3
        self._hello_due = True
        self._hello_s = limits.link_resend_ms / 1e3
        self._hello_at = now + self._hello_s
        self._dialled_at = now
        self.gave_up = False
        """No answer, or a refusal: dialled slowly, and a hello from there is welcome."""
        self._bye_due = False

    def _new_link(self, now: float) -> Link:
        mine, theirs = self._me.peer.incarnation, self.peer.incarnation
        return Link(mine, theirs, self._limits, now, number=self.number)

    def _become(self, state: LineState) -> None:
        assert state in LINE_MOVES[self.state], f"{self.state} -> {state}"
        self.state = state

    def opened(self, member: Member, route: Route, now: float) -> None:
        """Both sides accepted each other. What was queued while dialling goes out now."""
        self._become(LineState.UP)
        self.member = member
        self.route = route
        self.gave_up = False
        self._hello_due = False
        self.link.heard(now)

    def renumber(self, number: int) -> None:
        """Take the number of the peer's dial instead of our own, which never opened."""
        assert self.state is LineState.DIALLING
        self.number = self.link.number = number

    def owe_welcome(self) -> None:
        """The peer asks (again) whether it is accepted."""
        self._hello_due = True

    def ended(self, reason: str, *, goodbye: bool = False) -> None:
        """The link is over, with or without a ``goodbye``."""
        self._become(LineState.OVER)
        self._bye_due = goodbye
        self.link.end(reason)

    def slow_down(self, pace_s: float, now: float) -> int:
        """Dial at a slow pace from now on; return how many queued messages were let go."""
        lost = self.link.unacked
        self.link = self._new_link(now)
        self.gave_up = True
        self._hello_due = False
        self._hello_s = pace_s
        self._hello_at = now + pace_s
        return lost

    # --- frames ---

    def next_frame(self, now: float) -> Frame | None:
        """Return the next frame for the socket, or ``None``."""
        if self.state is LineState.OVER:
            if not self._bye_due:
                return None
            self._bye_due = False
            return self.link.goodbye()
        if self._hello_due:
            return self._hello() if now >= self.link.blocked_until else None
        return self.link.next_frame(now) if self.state is LineState.UP else None

    def _hello(self) -> Frame:
        self._hello_due = False
        kind = Kind.WELCOME if self.state is LineState.UP else Kind.HELLO
        body = frames.encode_hello(self._me)
        mine, theirs = self._me.peer.incarnation, self.peer.incarnation
        return Frame(kind, mine, theirs, self.number, body=body)

    def refused(self, frame: Frame, now: float) -> None:
        """The socket did not take ``frame``."""
        if self.state is LineState.OVER:
            return
        self.link.refused(frame, now)
        if frame.kind in (Kind.HELLO, Kind.WELCOME):
            self._hello_due = True

    # --- time ---

    def tick(self, now: float) -> None:
        """Look at the clocks. Called at :meth:`deadline` or sooner."""
        if self.state is LineState.UP:
            self.link.tick(now)
        elif self.state is LineState.DIALLING and now >= self._hello_at:
            self._hello_due = True
            if not self.gave_up:
                self._hello_s = min(2 * self._hello_s, self._handshake_s)
            self._hello_at = now + self._hello_s

    def unanswered(self, now: float) -> bool:
        """Whether the hello is without an answer for too long, and this was not told yet."""
        dialling = self.state is LineState.DIALLING and not self.gave_up
        return dialling and now >= self._dialled_at + self._handshake_s

    def forgotten(self, now: float) -> bool:
        """Whether this dial has gone on for long enough."""
        dialling = self.state is LineState.DIALLING
        return dialling and now >= self._dialled_at + DIAL_HANDSHAKES_MAX * self._handshake_s

    def deadline(self) -> float | None:
        """Return when :meth:`tick` and :meth:`next_frame` are to be called next."""
        if self.state is LineState.OVER:
            return None
        if self._hello_due:
            return self.link.blocked_until
        if self.state is LineState.UP:
            return self.link.deadline()
        if self.gave_up:
            return self._hello_at
        return min(self._hello_at, self._dialled_at + self._handshake_s)
