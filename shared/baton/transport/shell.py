"""Executes the switchboard's effects; what is left to a transport is sockets, timers, descriptors.

Decides the order in which a process hears things: events wait in one queue and are given out by
``_pump``, never inside a call of the process's own, so ``send`` in the middle of handling an event
cannot call the process back. A message counts as handled when ``on_event`` returns; if it raises,
the message stays unacknowledged and the exception goes up to whoever called the shell.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import assert_never

from baton.core.ids import Member, Peer
from baton.core.limits import Limits
from baton.ports.transport import TransportEvent
from baton.transport.effects import (
    Answer,
    Connect,
    Count,
    Disconnect,
    Effect,
    Emit,
    Flush,
    Route,
    Unwatch,
    Watch,
)
from baton.transport.line import Line
from baton.transport.switchboard import Switchboard
from baton.wire.frames import Frame
from baton.wire.messages import AnyMessage


class Shell(ABC):
    """Everything of the Transport port but its life cycle (``start`` and ``close``)."""

    def __init__(self, member: Member, limits: Limits, on_count: Callable[[str], None]) -> None:
        self._board = Switchboard(member, limits)
        self._limits = limits
        self._on_count = on_count
        self._started = False
        self._on_event: Callable[[TransportEvent], None] | None = None
        """``None`` before the start and from the beginning of the end."""
        self._events: deque[Emit] = deque()

    @property
    def member(self) -> Member:
        """This process as it announces itself."""
        return self._board.member

    @property
    def peers(self) -> list[Member]:
        """Who has an open link with this process."""
        return self._board.peers

    # --- the port ---

    def dial(self, member: Member) -> None:
        """Open (and keep, until lost) a link to that incarnation. Idempotent."""
        if self._running():
            self._from_process(self._board.dial(member, self._now()))

    def send(self, peer: Peer, message: AnyMessage) -> None:
        """Queue ``message`` on the link to ``peer``.

        Raises:
            ValueError: the message is larger than ``frame_bytes_max``: a bug of the caller.
        """
        if self._running():
            self._from_process(self._board.send(peer, message))

    def hang_up(self, peer: Peer) -> None:
        """Say goodbye and drop the link without a ``PeerLost`` on this side."""
        if self._running():
            self._from_process(self._board.hang_up(peer))

    def _running(self) -> bool:
        assert self._started, "start() comes first"
        return self._on_event is not None

    def check(self) -> None:
        """Assert every invariant of the lines."""
        self._board.check()

    # --- what a transport calls ---

    def _from_process(self, effects: Iterable[Effect]) -> None:
        """Execute at once, but emit on a later turn."""
        self._execute(effects)
        if self._events:
            self._pump_soon()

    def _execute(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Flush():
                    self._flush(effect.line)
                case Emit():
                    self._events.append(effect)
                case Count():
                    self._on_count(effect.reason)
                case Answer():
                    if not self._put(effect.route, effect.frame):
                        self._on_count("send_refused")
                case Connect():
                    self._connect(effect.peer, effect.endpoint)
                case Disconnect():
                    self._disconnect(effect.peer)
                case Watch():
                    self._watch(effect.peer, effect.pid)
                case Unwatch():
                    self._unwatch(effect.peer)
                case _:
                    assert_never(effect)

    def _flush(self, line: Line) -> None:
        now = self._now()
        while (frame := line.next_frame(now)) is not None:
            if not self._put(line.route, frame):
                self._on_count("send_refused")
                line.refused(frame, now)
                break
        due = line.deadline()
        if due is not None:
            self._arm(due)

    def _pump(self) -> None:
        """Give out the events that wait now; what they cause waits for the next turn."""
        heard: dict[Peer, Line] = {}
        for _ in range(len(self._events)):
            if self._on_event is None:
                break
            emit = self._events.popleft()
            if emit.line is not None and emit.line.muted:
                continue
            if emit.event is not None:
                self._on_event(emit.event)
            if emit.line is not None and emit.seq:
                self._board.handled(emit.line, emit.seq, self._now())
                heard[emit.line.peer] = emit.line
        for line in heard.values():
            self._flush(line)
        if self._events:
            self._pump_soon()

    def _tick(self) -> None:
        """Do what is due, then mind the next deadline."""
        self._execute(self._board.tick(self._now()))
        due = self._board.deadline()
        if due is not None:
            self._arm(due)

    # --- what a transport provides ---

    @abstractmethod
    def _now(self) -> float: ...

    @abstractmethod
    def _arm(self, due: float) -> None:
        """Call ``_tick`` and ``_pump`` at ``due`` at the latest."""

    @abstractmethod
    def _pump_soon(self) -> None:
        """Call ``_pump`` on a later turn."""

    @abstractmethod
    def _put(self, route: Route, frame: Frame) -> bool:
        """Put ``frame`` without waiting; return whether the socket took it."""

    @abstractmethod
    def _connect(self, peer: Peer, endpoint: str) -> None: ...

    @abstractmethod
    def _disconnect(self, peer: Peer) -> None: ...

    @abstractmethod
    def _watch(self, peer: Peer, pid: int) -> None: ...

    @abstractmethod
    def _unwatch(self, peer: Peer) -> None: ...
