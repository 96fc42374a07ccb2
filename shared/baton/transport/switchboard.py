"""All lines of one process: who is accepted, on which way, and when a peer is lost.

Decides the handshake and its refusals, that there is one link between two incarnations whoever
dials, and what a frame from nobody gets for an answer. Pure: frames, times and deaths come in,
effects go out (``baton.transport.effects``); the ZeroMQ transport and the simulated one run the
same switchboard.

When both sides dial at once, the lower ``(worker_id, incarnation)`` keeps its dial: it lets the
other's hello pass, and the other, on receiving the lower one's hello, accepts it and drops its own
dial. Once a side has given up (no answer for ``handshake_ms``) it accepts whatever comes.

A link that has ended is over for ever for this pair of incarnations: the machines have derived the
lost messages anew, and a second link would deliver them twice. A hello for it is refused as
``over``. A dial that never opened leaves no such trace.
"""

from __future__ import annotations

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
from baton.wire.messages import AnyMessage

#: Ended links and reported refusals remembered; the oldest are forgotten.
MEMORY_MAX = 4_096


class Switchboard:
    """The lines of ``member``, by peer."""

    def __init__(self, member: Member, limits: Limits) -> None:
        self.member = member
        self._limits = limits
        self._lines: dict[Peer, Line] = {}
        self._over: dict[Peer, str] = {}
        self._reported: dict[tuple[str, str], None] = {}

    # --- what the process asks for ---

    def dial(self, member: Member, now: float) -> list[Effect]:
        """Open a line to ``member`` unless there is, or was, one."""
        peer = member.peer
        if peer == self.member.peer or peer in self._lines:
            return []
        if peer in self._over:
            return [Count("dial_over")]
        if not member.endpoint:
            return [Count("dial_no_endpoint")]
        line = Line(self.member, member, Outbound(peer), self._limits, now=now)
        self._lines[peer] = line
        return [Connect(peer, member.endpoint), *self._watch(member), Flush(line)]

    def send(self, peer: Peer, message: AnyMessage) -> list[Effect]:
        """Queue ``message``; a peer that is being dialled gets it when the link opens.

        Raises:
            ValueError: the message is larger than any frame may be: a bug of the sender.
        """
        line = self._lines.get(peer)
        if line is None or line.gave_up:
            reason = self._over.get(peer, "no link")
            return [Count("send_no_link"), Emit(PeerLost(peer, reason))]
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
        return self._drop(line, "hung up", tell=True)

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
        for seq, body in line.link.on_frame(frame, now):
            try:
                event = Received(line.peer, codec.decode(body))
            except codec.MessageError:
                effects += [Count("message_malformed"), Emit(None, line, seq)]
            else:
                effects.append(Emit(event, line, seq))
        if line.link.duplicates != duplicates:
            effects.append(Count("message_duplicate"))
        if line.link.over is not None:
            return effects + self._lose(line, line.link.over)
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
            refusal = self._refusal(route, 0, RefusalCode.VERSION, text)
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
        return [self._refusal(route, frame.source, RefusalCode.MALFORMED, text)]

    def _on_stale(self, route: Route, frame: Frame) -> list[Effect]:
        """Meant for another incarnation of this worker: not obeyed."""
        text = f"{self.member.peer.worker_id}/{frame.target} is gone, here is {self.member.peer}"
        return [Count("frame_stale"), *self._tell(route, frame, RefusalCode.STALE, text)]

    def _on_stray(self, route: Route, peer: Peer, frame: Frame) -> list[Effect]:
        """From a peer without a line, or on a way that is not its line's."""
        reason = Count("frame_no_link")
        if peer in self._lines:
            return [reason]
        text = f"{self.member.peer} has no link with {peer}: {self._over.get(peer, 'never had')}"
        return [reason, *self._tell(route, frame, RefusalCode.OVER, text)]

    def _tell(self, route: Route, frame: Frame, code: RefusalCode, text: str) -> list[Effect]:
        # Never an answer to an end: two sides would answer each other for ever.
        if frame.kind in (Kind.REFUSED, Kind.BYE, Kind.WELCOME):
            return []
        return [self._refusal(route, frame.source, code, text)]

    # --- the handshake ---

    def _on_hello(self, route: Route, peer: Peer, frame: Frame, now: float) -> list[Effect]:
        member = _member_in(frame.body, peer)
        if not isinstance(route, Inbound) or member is None:
            text = f"the hello of {peer} cannot be read"
            refusal = self._refusal(route, peer.incarnation, RefusalCode.MALFORMED, text)
            return [Count("hello_malformed"), refusal]
        if peer in self._over:
            text = f"{self.member.peer} has ended its link with {peer}: {self._over[peer]}"
            refusal = self._refusal(route, peer.incarnation, RefusalCode.OVER, text)
            return [Count("hello_over"), refusal]
        if newer := self._newer(peer):
            text = f"{peer} has been replaced by {newer}"
            refusal = self._refusal(route, peer.incarnation, RefusalCode.OVER, text)
            return [Count("hello_over"), refusal]
        if text := self._misfit(member):
            refusal = self._refusal(route, peer.incarnation, RefusalCode.INCOMPATIBLE, text)
            return [Count("hello_incompatible"), refusal, *self._report(peer.worker_id, text)]
        line = self._lines.get(peer)
        if line is None:
            line = Line(self.member, member, route, self._limits, now=now)
            self._lines[peer] = line
            return [*self._watch(member), *self._accept(line, member, route, now)]
        if line.state is LineState.UP:
            return self._on_hello_again(line, route, now)
        if self.member.peer < peer and not line.gave_up:
            return [Count("hello_crossed")]
        return [Disconnect(peer), *self._accept(line, member, route, now)]

    def _newer(self, peer: Peer) -> Peer | None:
        """Return the connected later incarnation of the same worker, if there is one."""
        for other, line in self._lines.items():
            if other.worker_id == peer.worker_id and other > peer and line.state is LineState.UP:
                return other
        return None

    def _on_hello_again(self, line: Line, route: Route, now: float) -> list[Effect]:
        line.link.heard(now)
        if line.route != route:
            # It dialled before it knew that our dial was accepted.
            return [Count("hello_crossed")]
        line.owe_welcome()
        return [Flush(line)]

    def _accept(self, line: Line, member: Member, route: Route, now: float) -> list[Effect]:
        effects = self._open(line, member, route, now)
        line.owe_welcome()
        return effects

    def _open(self, line: Line, member: Member, route: Route, now: float) -> list[Effect]:
        """Both sides agreed: older incarnations of the name are over, then this one is up."""
        effects: list[Effect] = []
        for other in list(self._lines.values()):
            if other.peer.worker_id == line.peer.worker_id and other.peer < line.peer:
                effects += self._lose(other, f"replaced by {line.peer}")
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
            refusal = self._refusal(
                line.route, line.peer.incarnation, RefusalCode.INCOMPATIBLE, text
            )
            return [Count("hello_incompatible"), refusal, *self._refuse(line, text, now)]
        return self._open(line, member, line.route, now)

    def _on_refused(self, line: Line, body: bytes, now: float) -> list[Effect]:
        try:
            refusal = frames.decode_refusal(body)
        except FrameError as error:
            return [Count(error.reason)]
        if line.state is LineState.UP or refusal.code in (RefusalCode.STALE, RefusalCode.OVER):
            return self._lose(line, refusal.text)
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
        lost = line.slow_down(REFUSED_REDIAL_S, now)
        effects = self._report(line.peer.worker_id, text)
        if lost:
            effects.append(Emit(PeerLost(line.peer, text), line))
        return [*effects, Flush(line)]

    def _report(self, worker_id: str, text: str) -> list[Effect]:
        if (worker_id, text) in self._reported:
            return []
        self._reported[worker_id, text] = None
        _forget_oldest(self._reported)
        return [Emit(PeerRefused(worker_id, text))]

    def _refusal(self, route: Route, target: int, code: RefusalCode, text: str) -> Answer:
        body = frames.encode_refusal(code, text)
        frame = Frame(Kind.REFUSED, self.member.peer.incarnation, target, body=body)
        return Answer(route, frame)

    # --- ends ---

    def on_died(self, peer: Peer) -> list[Effect]:
        """The kernel says that the process of ``peer`` has ended."""
        line = self._lines.get(peer)
        return [] if line is None else self._lose(line, "died")

    def _lose(self, line: Line, reason: str, *, tell: bool = False) -> list[Effect]:
        effects = self._drop(line, reason, tell=tell)
        return [*effects, Emit(PeerLost(line.peer, reason), line)]

    def _drop(self, line: Line, reason: str, *, tell: bool) -> list[Effect]:
        del self._lines[line.peer]
        self._over[line.peer] = reason
        _forget_oldest(self._over)
        line.ended(reason, tell=tell)
        effects: list[Effect] = [Flush(line)] if tell else []
        if isinstance(line.route, Outbound):
            effects.append(Disconnect(line.peer))
        return [*effects, Unwatch(line.peer)]

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
                line.slow_down(self._limits.handshake_ms / 1e3, now)
                effects += [Count("dial_unanswered"), Emit(PeerLost(line.peer, text), line)]
            else:
                effects.append(Flush(line))
        return effects

    def _forget(self, line: Line) -> list[Effect]:
        effects = self._drop(line, "dial forgotten", tell=False)
        del self._over[line.peer]
        return effects

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
            assert peer not in self._over
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


def _forget_oldest(memory: dict[Peer, str] | dict[tuple[str, str], None]) -> None:
    if len(memory) > MEMORY_MAX:
        memory.pop(next(iter(memory)))  # type: ignore[call-overload]
