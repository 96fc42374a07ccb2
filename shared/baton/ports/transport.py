"""Messages between processes.

The contract (held by ``tests/conformance/test_transport.py`` for ZeroMQ and for the simulator):

- A *link* joins two incarnations. The dialling side opens a DEALER to the other's ROUTER inbox; the
  first frame each way is a hello with the protocol version, the :class:`Member` and its
  compatibility digest. A pair that differs is refused with a text that names both sides, reported
  once as :class:`PeerRefused`, and dialled again only at a slow pace.
- On a link, messages are delivered in order, exactly once, as long as both incarnations live: each
  carries a sequence number, is acknowledged after it was *handled*, and is sent again after a
  timeout, a refused send or a reconnect. Nothing is dropped silently.
- A link ends once, with :class:`PeerLost`: the other process died (pidfd), was silent too long,
  left too much unacknowledged, said goodbye, or a new incarnation announced itself under its
  worker_id. Messages not yet acknowledged are then lost, and the machines re-derive them. What
  still arrives on a link that is over is dropped and counted.
- Unless the other process is *gone* (died, goodbye, replaced), the same two incarnations may be
  joined again, by another link: :class:`PeerUp` follows :class:`PeerLost` on both sides, never a
  message of the first link. A process that was frozen comes back that way.
- ``send`` never blocks and never raises for a peer's sake. To a peer without a link it reports
  :class:`PeerLost` (again), on a later turn of the loop.
- Both directions of a link may carry messages of any type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.core.ids import Member, Peer
from baton.wire.messages import AnyMessage


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A link is open; ``member`` is what the other side said of itself."""

    member: Member


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A link is over; what was not acknowledged on it is lost."""

    peer: Peer
    reason: str
    gone: bool = False
    """This incarnation will not come back: it died, said goodbye, or was replaced."""
    lives: bool = False
    """The other side ended the link or opened it anew: it was us that it could not hear."""


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The pair does not fit; ``text`` names both sides and each difference."""

    worker_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message, in order, from an open link."""

    peer: Peer
    message: AnyMessage


TransportEvent = PeerUp | PeerLost | PeerRefused | Received


class Transport(Protocol):
    """One per process. All methods are called on the event loop's thread."""

    async def start(self, on_event: Callable[[TransportEvent], None]) -> None:
        """Bind the inbox and begin delivering events.

        Raises:
            EndpointInUse: another live process holds the endpoint's lock.
        """
        ...

    def dial(self, member: Member) -> None:
        """Open (and keep, until lost) a link to that incarnation. Idempotent, and asked for again
        with every list of members, so that a lost link to one who is still there is opened anew."""
        ...

    def send(self, peer: Peer, message: AnyMessage) -> None:
        """Queue ``message`` on the link to ``peer``."""
        ...

    def hang_up(self, peer: Peer) -> None:
        """Say goodbye and drop the link without a :class:`PeerLost` on this side."""
        ...

    async def close(self) -> None:
        """Say goodbye to all, flush for at most 200 ms, unlink the endpoint."""
        ...


class EndpointInUse(OSError):
    """Another live process has bound this endpoint."""
