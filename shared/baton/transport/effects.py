"""What the switchboard wants done: executed in order by a shell (``baton.transport.shell``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.ids import Peer
from baton.ports.transport import TransportEvent
from baton.wire.frames import Frame

if TYPE_CHECKING:
    from baton.transport.line import Line


@dataclass(frozen=True, slots=True)
class Inbound:
    """The way to a peer that dialled us: our inbox, with its socket identity."""

    identity: bytes


@dataclass(frozen=True, slots=True)
class Outbound:
    """The way to a peer we dialled: the socket opened for it."""

    peer: Peer


Route = Inbound | Outbound


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a socket to ``endpoint``, to be known as ``Outbound(peer)``."""

    peer: Peer
    endpoint: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the socket ``Outbound(peer)``, after what it has already taken."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Watch:
    """Call ``on_died`` when the process ends."""

    peer: Peer
    pid: int


@dataclass(frozen=True, slots=True)
class Unwatch:
    """The process is of no interest any more."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Answer:
    """Put one frame, if the socket takes it; it is not repeated."""

    route: Route
    frame: Frame


@dataclass(frozen=True, slots=True)
class Flush:
    """Put what the line has to put, then mind its deadline."""

    line: Line


@dataclass(frozen=True, slots=True)
class Emit:
    """Give ``event`` to the process, in turn, then say ``handled`` if ``seq`` is not 0.

    ``event`` is ``None`` for a message nobody can read: its number is used up all the same.
    """

    event: TransportEvent | None
    line: Line | None = None
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Count:
    """Something was dropped or refused."""

    reason: str


Effect = Connect | Disconnect | Watch | Unwatch | Answer | Flush | Emit | Count
