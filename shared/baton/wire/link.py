"""One side of a link between two incarnations: ordered, exactly once, bounded, and mortal.

Decides what is sent, sent again, acknowledged, delivered and when the other side counts as lost.
It has no socket and no clock: the shell gives it frames and the time, takes frames from it with
:meth:`Link.next_frame` and tells it when the socket did not take one. It knows nothing of hellos
(``baton.transport.line``) and does not look into a body.

Numbers: every message has a ``seq`` from 1. ``ack`` is cumulative and says *handled*, not
received: a process that dies while it handles a message has not acknowledged it.

Sending again goes back to the oldest unacknowledged message, and to that one alone. If the peer
then acknowledges more than it was sent again, it was slow and had everything, and nothing else is
repeated. If it acknowledges just that, what followed was lost, and twice as many go with each
acknowledgement. A peer frozen with thousands of messages in its socket so gets a few repetitions.

Silence is judged by this side's own time, less the time this side itself did not run: a process
that was stopped must not declare everybody else lost when it wakes up.
"""

from __future__ import annotations

from collections import deque

from baton.core.limits import Limits
from baton.wire.frames import Frame, Kind

#: Why a link is over after a BYE.
GOODBYE = "said goodbye"
#: Most messages held beyond a gap; what is further away is ignored and comes again.
HELD_MAX = 256
#: The wait before sending again doubles up to this.
RESEND_MAX_S = 2.0
#: This many handled messages are acknowledged at once, without waiting ``link_ack_ms``.
ACK_EVERY = 64
#: A refused frame is offered again after this long, doubling up to the second value.
REFUSED_FIRST_S = 0.002
REFUSED_MAX_S = 0.1
#: An idle side shows itself this often within the time after which it would be lost.
PINGS_PER_SILENCE = 4


class Link:
    """All state of one side. ``over`` is ``None`` as long as it lives, then the reason."""

    def __init__(
        self, source: int, target: int, limits: Limits, now: float, *, number: int = 1
    ) -> None:
        self._source = source
        self._target = target
        self.number = number
        self._unacked_max = limits.link_unacked_max
        self._ack_s = limits.link_ack_ms / 1e3
        self._resend_first_s = limits.link_resend_ms / 1e3
        self._silent_s = limits.peer_silent_ms / 1e3
        self._ping_s = self._silent_s / PINGS_PER_SILENCE
        self.over: str | None = None
        self.resent = 0
        """Messages sent more than once."""
        self.duplicates = 0
        """Messages received more than once, or too far beyond a gap."""

        # sending: _acked < _cursor <= _last + 1, and _put >= _cursor - 1
        self._unacked: deque[bytes] = deque()
        self._acked = 0
        self._cursor = 1
        self._put = 0
        self._last = 0
        self._window: int | None = None
        self._catch_up_to = 0
        self._resend_s = self._resend_first_s
        self._resend_at: float | None = None
        self._blocked_until = 0.0
        self._blocked_s = REFUSED_FIRST_S

        # receiving: _acked_there <= _handled <= _received
        self._received = 0
        self._handled = 0
        self._acked_there = 0
        self._held: dict[int, bytes] = {}
        self._ack_at: float | None = None

        self._heard_at = now
        self._ping_at = now + self._ping_s
        self._ticked_at = now

    # --- what the process does ---

    def send(self, body: bytes) -> None:
        """Queue a message. Too many unacknowledged ones end the link."""
        if self.over is not None:
            return
        if len(self._unacked) >= self._unacked_max:
            self.end(f"left {self._unacked_max} messages unacknowledged")
            return
        self._unacked.append(body)
        self._last += 1

    def handled(self, seq: int, now: float) -> None:
        """Say that the message ``seq``, which :meth:`on_frame` delivered, has been handled."""
        if self.over is not None:
            return
        assert seq == self._handled + 1, f"handled {seq} after {self._handled}"
        self._handled = seq
        if self._handled - self._acked_there >= ACK_EVERY:
            self._ack_at = now
        elif self._ack_at is None:
            self._ack_at = now + self._ack_s

    def end(self, reason: str) -> None:
        """End the link for ever and let go of everything it held."""
        if self.over is None:
            self.over = reason
            self._unacked.clear()
            self._held.clear()

    # --- what comes from the socket ---

    def on_frame(self, frame: Frame, now: float) -> list[tuple[int, bytes]]:
        """Take a DATA, ACK, PING or BYE frame; return (seq, body) of what is to be delivered."""
        if self.over is not None:
            return []
        self.heard(now)
        self._on_ack(frame.ack, now)
        if frame.kind is Kind.DATA:
            return self._on_data(frame.seq, frame.body, now)
        if frame.kind is Kind.BYE:
            self.end(GOODBYE)
        return []

    def heard(self, now: float) -> None:
        """Note a sign of life. Who speaks may be reachable again, so a refusal is forgotten."""
        self._heard_at = now
        self.on_writable()

    def _on_ack(self, ack: int, now: float) -> None:
        if ack <= self._acked:
            return
        if ack > self._put:
            self.end(f"acknowledged message {ack}, but only {self._put} were sent")
            return
        for _ in range(ack - self._acked):
            self._unacked.popleft()
        self._acked = ack
        self._resend_s = self._resend_first_s
        self._resend_at = now + self._resend_s if self._unacked else None
        self._catch_up(ack)

    def _catch_up(self, ack: int) -> None:
        if self._window is None:
            self._cursor = max(self._cursor, ack + 1)
        elif ack >= self._cursor or ack >= self._catch_up_to:
            self._window = None
            self._cursor = self._put + 1
        else:
            self._window *= 2

    def _on_data(self, seq: int, body: bytes, now: float) -> list[tuple[int, bytes]]:
        if seq != self._received + 1:
            # Whoever sends what we have, or beyond what we have, does not know what we have.
            self._ack_at = now
            if self._received < seq <= self._received + HELD_MAX and seq not in self._held:
                self._held[seq] = body
            else:
                self.duplicates += 1
            return []
        delivered = [(seq, body)]
        while (held := self._held.pop(seq + 1, None)) is not None:
            seq += 1
            delivered.append((seq, held))
        self._received = seq
        return delivered

    # --- what goes to the socket ---

    def next_frame(self, now: float) -> Frame | None:
        """Return the next frame to put on the socket, ``None`` if there is none at ``now``.

        The caller puts it at once, or gives it back with :meth:`refused`.
        """
        if self.over is not None or now < self._blocked_until:
            return None
        if self._may_put():
            return self._data(now)
        if self._ack_at is not None and now >= self._ack_at:
            return self._said(self._frame(Kind.ACK), now)
        if now >= self._ping_at:
            return self._said(self._frame(Kind.PING), now)
        return None

    def goodbye(self) -> Frame:
        """Return the last frame of this side; it acknowledges all that was handled."""
        return self._frame(Kind.BYE)

    def _frame(self, kind: Kind, seq: int = 0, body: bytes = b"") -> Frame:
        return Frame(kind, self._source, self._target, self.number, seq, self._handled, body)

    @property
    def blocked_until(self) -> float:
        """When a frame may be offered again, after the socket refused one."""
        return self._blocked_until

    def refused(self, frame: Frame, now: float) -> None:
        """The socket did not take ``frame``: offer it again in a while, in the same order."""
        self._blocked_until = now + self._blocked_s
        self._blocked_s = min(2 * self._blocked_s, REFUSED_MAX_S)
        if frame.kind is Kind.DATA:
            self._cursor = min(self._cursor, frame.seq)
        # The acknowledgement it carried was not heard either.
        if self._handled:
            self._ack_at = now

    def on_writable(self) -> None:
        """The socket takes frames again."""
        self._blocked_until = 0.0
        self._blocked_s = REFUSED_FIRST_S

    def _may_put(self) -> bool:
        if self._window is not None and self._cursor > self._acked + self._window:
            return False
        return self._cursor <= self._last

    def _data(self, now: float) -> Frame:
        seq = self._cursor
        body = self._unacked[seq - self._acked - 1]
        self._cursor = seq + 1
        if seq <= self._put:
            self.resent += 1
        else:
            self._put = seq
        if self._resend_at is None:
            self._resend_at = now + self._resend_s
        return self._said(self._frame(Kind.DATA, seq, body), now)

    def _said(self, frame: Frame, now: float) -> Frame:
        self._ack_at = None
        self._acked_there = self._handled
        self._ping_at = now + self._ping_s
        return frame

    # --- time ---

    def tick(self, now: float) -> None:
        """Look at all clocks of the link. Called at :meth:`deadline` or sooner."""
        if self.over is not None:
            return
        self._forgive_own_absence(now)
        if now - self._heard_at >= self._silent_s:
            self.end(f"silent for {round(1e3 * (now - self._heard_at))} ms")
        elif self._resend_at is not None and now >= self._resend_at:
            self._go_back(now)

    def _forgive_own_absence(self, now: float) -> None:
        # The shell calls at least once per _ping_s; twice that late means we did not run.
        absence = now - self._ticked_at
        if absence > 2 * self._ping_s:
            self._heard_at = min(now, self._heard_at + absence)
        self._ticked_at = now

    def _go_back(self, now: float) -> None:
        self._resend_s = min(2 * self._resend_s, RESEND_MAX_S)
        self._resend_at = now + self._resend_s
        self._cursor = self._acked + 1
        self._catch_up_to = self._put
        self._window = 1

    def deadline(self) -> float | None:
        """Return when :meth:`tick` and :meth:`next_frame` are to be called next."""
        if self.over is not None:
            return None
        put_at = self._ping_at if self._ack_at is None else min(self._ping_at, self._ack_at)
        if self._may_put():
            put_at = 0.0
        due = min(
            max(put_at, self._blocked_until),
            self._heard_at + self._silent_s,
            self._ticked_at + self._ping_s,
        )
        return due if self._resend_at is None else min(due, self._resend_at)

    # --- for tests, checks and the report ---

    @property
    def unacked(self) -> int:
        """Messages queued and not yet acknowledged."""
        return len(self._unacked)

    @property
    def held(self) -> int:
        """Messages waiting for a gap below them to fill."""
        return len(self._held)

    @property
    def quiescent(self) -> bool:
        """Whether nothing waits on either side, as far as this side knows."""
        return not self._unacked and not self._held and self._acked_there == self._received

    def check(self) -> None:
        """Assert every invariant."""
        if self.over is not None:
            assert not self._unacked and not self._held
            return
        assert len(self._unacked) == self._last - self._acked <= self._unacked_max
        assert self._acked < self._cursor <= self._last + 1
        assert self._cursor - 1 <= self._put <= self._last
        assert self._acked_there <= self._handled <= self._received
        assert len(self._held) <= HELD_MAX
        assert all(seq > self._received + 1 for seq in self._held)
        assert self._resend_at is not None or self._put == self._acked
