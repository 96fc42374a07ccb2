"""All lines of one process: who is accepted, on which way, and when a peer is lost.

Decides the handshake and its refusals, that there is one link between two incarnations whoever
dials, and what a frame from nobody gets for an answer. Pure: frames, times and deaths come in,
effects go out (``baton.transport.effects``); the ZeroMQ transport and the simulated one run the
same switchboard.

When both sides dial at once, the lower ``(worker_id, incarnation)`` keeps its dial: it lets the
other's hello pass, and the other, on receiving the lower one's hello, accepts it and drops its own
dial. Once a side has given up (no answer for ``handshake_ms``) it accepts whatever comes.

Every link of a pair of incarnations has its own number, greater than any before, and every frame
carries it: what still arrives of a link that is over is never taken for the next one's. A hello
with a greater number ends the link there is: the dialling side has lost it already. Who is *gone*
(died, said goodbye, replaced) is never linked again.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.ids import Member, Peer
from baton.core.limits import Limits
from baton.ports.transport import PeerLost, PeerRefused, PeerUp, Received
from baton.transport.effects import (
    Answer,
    Connect,
    Count,
    Disconnect,
    Effect,
    Emit,
    Flush,
    Inbound,
    Outbound,
    Route,
    Unwatch,
    Watch,
)
from baton.transport.line import REFUSED_REDIAL_S, Line, LineState
from baton.wire import codec, frames
from baton.wire.frames import PROTOCOL_VERSION, Frame, FrameError, Kind, RefusalCode
from baton.wire.link import GOODBYE
from baton.wire.messages import AnyMessage

#: Pairs with a past and reported refusals remembered; the oldest are forgotten.
MEMORY_MAX = 4_096


@dataclass(slots=True)
class _Past:
    """What this process remembers of one incarnation beyond its lines."""

    used: int = 0
    """Greatest number of any link dialled or accepted."""
    ended: int = 0
    """Greatest number of a link that was up and is over."""
    reason: str = "no link"
    gone: bool = False


#: Stands for a frame whose header cannot be read beyond its first eight bytes.
_UNREAD = Frame(Kind.HELLO, 0, 0)


class Switchboard:
    """The lines of ``member``, by peer."""

    def __init__(self, member: Member, limits: Limits) -> None:
        self.member = member
        self._limits = limits
        self._lines: dict[Peer, Line] = {}
        self._past: dict[Peer, _Past] = {}
        self._reported: dict[tuple[str, str], None] = {}

    # --- what the process asks for ---

    def dial(self, member: Member, now: float) -> list[Effect]:
        """Open a line to ``member`` unless there is one, or the peer is gone."""
        peer = member.peer
        if peer == self.member.peer or peer in self._lines:
            return []
        past = self._past_of(peer)
        if past.gone:
            return [Count("dial_over")]
        if not member.endpoint:
            return [Count("dial_no_endpoint")]
        line = self._new_line(member, Outbound(peer), past.used + 1, now)
        return [Connect(peer, member.endpoint), *self._watch(member), Flush(line)]

    def send(self, peer: Peer, message: AnyMessage) -> list[Effect]:
        """Queue ``message``; a peer that is being dialled gets it when the link opens.

        Raises:
            ValueError: the message is larger than any frame may be: a bug of the sender.
        """
        line = self._lines.get(peer)
        if line is None or line.gave_up:
            past = self._past.get(peer, _Past())
            return [Count("send_no_link"), Emit(PeerLost(peer, past.reason, past.gone))]
        body = codec.encode(message)
        if len(body) > self._limits.frame_bytes_max - frames.HEADER_BYTES:
            text = f"{type(message).__name__} of {len(body)} bytes exceeds frame_bytes_max"
            raise ValueError(text)
        line.link.send(body)
        if line.link.over is not None:
            return self._lose(line, line.link.over, tell=True)
        return [Flush(line)]

    def hang_up(self, peer: Peer) -> list[Effect]:
        """Say goodbye; nothing of ``peer`` is emitted from now on."""
        line = self._lines.get(peer)
        if line is None:
            return []
        line.muted = True
        if line.state is LineState.DIALLING:
            return self._forget(line)
        return self._drop(line, "hung up", gone=True, goodbye=True)

    def close(self) -> list[Effect]:
        """Say goodbye to all."""
        return [effect for peer in list(self._lines) for effect in self.hang_up(peer)]

    def handled(self, line: Line, seq: int, now: float) -> None:
        """The process has handled the message ``seq`` of ``line``."""
        line.link.handled(seq, now)

    # --- what comes from the sockets ---

    def on_frame(self, route: Route, parts: list[bytes], now: float) -> list[Effect]:
        """Take the two parts of a frame, or whatever somebody sent instead."""
        try:
            frame = frames.unpack(parts, self._limits.frame_bytes_max)
        except FrameError as error:
            return [Count(error.reason), *self._on_no_frame(error, route, parts, now)]
        peer = route.peer if isinstance(route, Outbound) else frames.peer_of(route.identity)
        if peer is None or (peer.incarnation != frame.source and not _from_successor(route, frame)):
            return [Count("frame_identity"), *self._deny_hello(route, frame)]
        if frame.target != self.member.peer.incarnation:
            return self._on_stale(route, frame)
        if frame.kind is Kind.HELLO:
            return self._on_hello(route, peer, frame, now)
        line = self._lines.get(peer)
        if line is None or line.route != route:
            return self._on_stray(route, peer, frame)
        if frame.link != line.number:
            # Sent before the peer knew of this link. It knows by now, or our hello is on its way.
            return [Count("frame_no_link")]
        if frame.kind is Kind.WELCOME:
            return self._on_welcome(line, frame, now)
        if frame.kind is Kind.REFUSED:
            return self._on_refused(line, frame.body, now)
        if line.state is LineState.DIALLING:
            # Its welcome was lost; it will say so again, and then repeat this.
            return [Count("frame_early")]
        return self._on_link_frame(line, frame, now)

    def _on_link_frame(self, line: Line, frame: Frame, now: float) -> list[Effect]:
        duplicates = line.link.duplicates
        effects: list[Effect] = []
        delivered = line.link.on_frame(frame, now)
        for seq, body in delivered:
            try:
                event = Received(line.peer, codec.decode(body))
            except codec.MessageError:
                effects += [Count("message_malformed"), Emit(None, line, seq)]
            else:
                effects.append(Emit(event, line, seq))
        if line.link.duplicates != duplicates:
            effects.append(Count("message_duplicate"))
        if line.link.over is not None:
            gone = line.link.over == GOODBYE
            return effects + self._lose(line, line.link.over, gone=gone, tell=not gone)
        if not delivered:
            # Else the shell flushes when all of it was handled.
            effects.append(Flush(line))
        return effects

    def _on_no_frame(
        self, error: FrameError, route: Route, parts: list[bytes], now: float
    ) -> list[Effect]:
        """Tell a foreign version so, and hear it from one: both sides name both versions."""
        if error.reason != "frame_version" or error.kind is None or error.version is None:
            return []
        name = route.peer if isinstance(route, Outbound) else frames.peer_of(route.identity)
        text = (
            f"{self.member.peer} speaks protocol version {PROTOCOL_VERSION}, "
            f"{name or 'the other side'} speaks {error.version}"
        )
        if error.kind is Kind.HELLO:
            refusal = self._refusal(route, _UNREAD, RefusalCode.VERSION, text)
            return [refusal, *self._report(name.worker_id if name else "?", text)]
        line = self._lines.get(name) if name else None
        if error.kind is not Kind.REFUSED or line is None or line.route != route:
            return []
        try:
            text = frames.decode_refusal(parts[1]).text
        except FrameError:
            pass
        return self._refuse(line, text, now)

    def _deny_hello(self, route: Route, frame: Frame) -> list[Effect]:
        if frame.kind is not Kind.HELLO:
            return []
        text = f"the hello to {self.member.peer} does not fit its socket's identity"
        return [self._refusal(route, frame, RefusalCode.MALFORMED, text)]

    def _on_stale(self, route: Route, frame: Frame) -> list[Effect]:
        """Meant for another incarnation of this worker: not obeyed."""
        text = f"{self.member.peer.worker_id}/{frame.target} is gone, here is {self.member.peer}"
        return [Count("frame_stale"), *self._tell(route, frame, RefusalCode.STALE, text)]

    def _on_stray(self, route: Route, peer: Peer, frame: Frame) -> list[Effect]:
        """From a peer without a line, or on a way that is not its line's."""
        reason = Count("frame_no_link")
        if peer in self._lines:
            return [reason]
        past = self._past.get(peer, _Past())
        text = f"{self.member.peer} has no link with {peer}: {past.reason}"
        code = RefusalCode.ENDED if past.gone else RefusalCode.OVER
        return [reason, *self._tell(route, frame, code, text)]

    def _tell(self, route: Route, frame: Frame, code: RefusalCode, text: str) -> list[Effect]:
        # Never an answer to an end: two sides would answer each other for ever.
        if frame.kind in (Kind.REFUSED, Kind.BYE, Kind.WELCOME):
            return []
        return [self._refusal(route, frame, code, text)]

    # --- the handshake ---

    def _on_hello(self, route: Route, peer: Peer, frame: Frame, now: float) -> list[Effect]:
        member = _member_in(frame.body, peer)
        if not isinstance(route, Inbound) or member is None:
            text = f"the hello of {peer} cannot be read"
            refusal = self._refusal(route, frame, RefusalCode.MALFORMED, text)
            return [Count("hello_malformed"), refusal]
        past = self._past_of(peer)
        if past.gone or self._newer(peer):
            why = f"replaced by {self._newer(peer)}" if not past.gone else past.reason
            text = f"{self.member.peer} has no link with {peer} any more: {why}"
            return [Count("hello_over"), self._refusal(route, frame, RefusalCode.ENDED, text)]
        if frame.link <= past.ended:
            text = f"{self.member.peer} has ended this link with {peer}: {past.reason}"
            return [Count("hello_over"), self._refusal(route, frame, RefusalCode.OVER, text)]
        if text := self._misfit(member):
            refusal = self._refusal(route, frame, RefusalCode.INCOMPATIBLE, text)
            return [Count("hello_incompatible"), refusal, *self._report(peer.worker_id, text)]
        line = self._lines.get(peer)
        if line is None:
            return self._accept(member, route, frame.link, now)
        if line.state is LineState.DIALLING:
            return self._on_hello_while_dialling(line, member, frame, now)
        if frame.link <= line.number:
            return self._on_hello_again(line, route, frame, now)
        lost = self._lose(line, "opened anew by the other side", lives=True)
        return [*lost, *self._accept(member, route, frame.link, now)]

    def _on_hello_while_dialling(
        self, line: Line, member: Member, frame: Frame, now: float
    ) -> list[Effect]:
        ours_counts = (line.number, member.peer) > (frame.link, self.member.peer)
        if ours_counts and not line.gave_up:
            return [Count("hello_crossed")]
        route = Inbound(frames.identity_of(line.peer))
        line.renumber(frame.link)
        past = self._past_of(line.peer)
        past.used = max(past.used, frame.link)
        effects = [Disconnect(line.peer), *self._open(line, member, route, now)]
        line.owe_welcome()
        return effects

    def _on_hello_again(self, line: Line, route: Route, frame: Frame, now: float) -> list[Effect]:
        if line.route != route or frame.link != line.number:
            # It dialled before it knew that our dial was accepted.
            return [Count("hello_crossed")]
        line.link.heard(now)
        line.owe_welcome()
        return [Flush(line)]

    def _accept(self, member: Member, route: Route, number: int, now: float) -> list[Effect]:
        line = self._new_line(member, route, number, now)
        effects = [*self._watch(member), *self._open(line, member, route, now)]
        line.owe_welcome()
        return effects

    def _newer(self, peer: Peer) -> Peer | None:
        """Return the connected later incarnation of the same worker, if there is one."""
        for other, line in self._lines.items():
            if other.worker_id == peer.worker_id and other > peer and line.state is LineState.UP:
                return other
        return None

    def _open(self, line: Line, member: Member, route: Route, now: float) -> list[Effect]:
        """Both sides agreed: older incarnations of the name are over, then this one is up."""
        effects: list[Effect] = []
        for other in list(self._lines.values()):
            if other.peer.worker_id == line.peer.worker_id and other.peer < line.peer:
                effects += self._lose(other, f"replaced by {line.peer}", gone=True)
        line.opened(member, route, now)
        return [*effects, Emit(PeerUp(member), line), Flush(line)]

    def _on_welcome(self, line: Line, frame: Frame, now: float) -> list[Effect]:
        if line.state is LineState.UP:
            line.link.heard(now)
            return []
        member = _member_in(frame.body, line.peer)
        if member is None:
            return [Count("hello_malformed")]
        if text := self._misfit(member):
            refusal = self._refusal(line.route, frame, RefusalCode.INCOMPATIBLE, text)
            return [Count("hello_incompatible"), refusal, *self._refuse(line, text, now)]
        return self._open(line, member, line.route, now)

    def _on_refused(self, line: Line, body: bytes, now: float) -> list[Effect]:
        try:
            refusal = frames.decode_refusal(body)
        except FrameError as error:
            return [Count(error.reason)]
        if refusal.target not in (0, line.peer.incarnation):
            return [Count("frame_no_link")]
        gone = refusal.code in (RefusalCode.STALE, RefusalCode.ENDED)
        if gone or line.state is LineState.UP or refusal.code == RefusalCode.OVER:
            return self._lose(line, refusal.text, gone=gone, lives=not gone)
        return self._refuse(line, refusal.text, now)

    def _misfit(self, member: Member) -> str:
        """Return what differs between the two sides, naming both; empty if nothing does."""
        mine, theirs = self.member.compat, member.compat
        if mine is None or theirs is None:
            return ""
        differences = mine.differences(theirs)
        if not differences:
            return ""
        return f"{self.member.peer} and {member.peer} differ: {'; '.join(differences)}"

    def _refuse(self, line: Line, text: str, now: float) -> list[Effect]:
        self._past_of(line.peer).reason = text
        lost = line.slow_down(REFUSED_REDIAL_S, now)
        effects = self._report(line.peer.worker_id, text)
        if lost:
            effects.append(Emit(PeerLost(line.peer, text), line))
        return [*effects, Flush(line)]

    def _report(self, worker_id: str, text: str) -> list[Effect]:
        if (worker_id, text) in self._reported:
            return []
        self._reported[worker_id, text] = None
        if len(self._reported) > MEMORY_MAX:
            del self._reported[next(iter(self._reported))]
        return [Emit(PeerRefused(worker_id, text))]

    def _refusal(self, route: Route, refused: Frame, code: RefusalCode, text: str) -> Answer:
        """Return the answer to the frame ``refused``, in the name of its link."""
        body = frames.encode_refusal(code, text, refused.target)
        me = self.member.peer.incarnation
        return Answer(route, Frame(Kind.REFUSED, me, refused.source, refused.link, body=body))

    # --- ends ---

    def on_died(self, peer: Peer) -> list[Effect]:
        """The kernel says that the process of ``peer`` has ended."""
        line = self._lines.get(peer)
        return [] if line is None else self._lose(line, "died", gone=True)

    def _lose(
        self,
        line: Line,
        reason: str,
        *,
        gone: bool = False,
        tell: bool = False,
        lives: bool = False,
    ) -> list[Effect]:
        """The link (or the dial) is over for a reason of its own; ``tell`` the other side."""
        effects: list[Effect] = []
        if tell:
            text = f"{self.member.peer} has ended this link with {line.peer}: {reason}"
            me = self.member.peer.incarnation
            ended = Frame(Kind.ACK, line.peer.incarnation, me, line.number)
            effects.append(self._refusal(line.route, ended, RefusalCode.OVER, text))
        effects += self._drop(line, reason, gone=gone)
        return [*effects, Emit(PeerLost(line.peer, reason, gone, lives), line)]

    def _drop(self, line: Line, reason: str, *, gone: bool, goodbye: bool = False) -> list[Effect]:
        past = self._past_of(line.peer)
        past.reason = reason
        past.gone = past.gone or gone
        if line.state is LineState.UP:
            past.ended = max(past.ended, line.number)
        del self._lines[line.peer]
        line.ended(reason, goodbye=goodbye)
        effects: list[Effect] = [Flush(line)] if goodbye else []
        if isinstance(line.route, Outbound):
            effects.append(Disconnect(line.peer))
        return [*effects, Unwatch(line.peer)]

    def _new_line(self, member: Member, route: Route, number: int, now: float) -> Line:
        past = self._past_of(member.peer)
        past.used = max(past.used, number)
        line = Line(self.member, member, route, self._limits, number=number, now=now)
        self._lines[member.peer] = line
        return line

    def _past_of(self, peer: Peer) -> _Past:
        past = self._past.get(peer)
        if past is None:
            past = self._past[peer] = _Past()
            if len(self._past) > MEMORY_MAX:
                oldest = next(known for known in self._past if known not in self._lines)
                del self._past[oldest]
        return past

    def _watch(self, member: Member) -> list[Effect]:
        if member.boot_id != self.member.boot_id:
            return []
        return [Watch(member.peer, member.pid)]

    # --- time ---

    def tick(self, now: float) -> list[Effect]:
        """Look at all clocks. Called at :meth:`deadline` or sooner."""
        effects: list[Effect] = []
        for line in list(self._lines.values()):
            line.tick(now)
            if line.link.over is not None:
                effects += self._lose(line, line.link.over, tell=True)
            elif line.forgotten(now):
                effects += [Count("dial_forgotten"), *self._forget(line)]
            elif line.unanswered(now):
                text = f"no answer to the hello for {self._limits.handshake_ms} ms"
                self._past_of(line.peer).reason = text
                line.slow_down(self._limits.handshake_ms / 1e3, now)
                effects += [Count("dial_unanswered"), Emit(PeerLost(line.peer, text), line)]
            else:
                effects.append(Flush(line))
        return effects

    def _forget(self, line: Line) -> list[Effect]:
        return self._drop(line, "dial forgotten", gone=False)

    def deadline(self) -> float | None:
        """Return when to tick next."""
        dues = (line.deadline() for line in self._lines.values())
        return min((due for due in dues if due is not None), default=None)

    # --- for the shell, checks and reports ---

    @property
    def quiescent(self) -> bool:
        """Whether every open link is."""
        lines = self._lines.values()
        return all(line.link.quiescent for line in lines if line.state is LineState.UP)

    @property
    def peers(self) -> list[Member]:
        """Who is up."""
        return [line.member for line in self._lines.values() if line.state is LineState.UP]

    def line(self, peer: Peer) -> Line | None:
        """Return the line to ``peer``, if there is one."""
        return self._lines.get(peer)

    def check(self) -> None:
        """Assert every invariant."""
        up: set[str] = set()
        for peer, line in self._lines.items():
            assert line.peer == peer
            assert line.state is not LineState.OVER
            assert line.number > self._past[peer].ended
            assert not self._past[peer].gone
            line.link.check()
            if line.state is LineState.UP:
                assert peer.worker_id not in up, f"two links to {peer.worker_id}"
                up.add(peer.worker_id)


def _member_in(body: bytes, peer: Peer) -> Member | None:
    """Return who the hello in ``body`` speaks of, ``None`` unless it is ``peer``."""
    try:
        hello = frames.decode_hello(body)
    except FrameError:
        return None
    return hello.member if hello.member.peer == peer else None


def _from_successor(route: Route, frame: Frame) -> bool:
    """Whether another incarnation took the endpoint we dialled, and says that it is another."""
    return isinstance(route, Outbound) and frame.kind is Kind.REFUSED
