"""ZeroMQ sockets with the options that links need (ADR 0002), and nothing else.

ROUTER_HANDOVER: a peer that opens a new socket while its old one is still closing (it dialled,
dropped that dial for ours, and dials a later incarnation of this worker) has the same identity on
both; without it the new connection would be ignored without a word. IMMEDIATE on the DEALER: a
frame for a peer that is not connected is refused, not stored. There is no IMMEDIATE for a ROUTER;
MANDATORY does it.
"""

from __future__ import annotations

import select

import zmq

from baton.core.ids import Peer
from baton.core.limits import Limits
from baton.wire.frames import identity_of

#: How long a closed socket may go on sending what it has already taken.
LINGER_MS = 100
#: A single frame this much above the limit is still received, so that it is counted by name;
#: beyond it ZeroMQ closes the connection that brought it.
OVERSIZED_MARGIN = 2**16
RECONNECT_FIRST_MS = 10
RECONNECT_MAX_MS = 200


def open_inbox(context: zmq.Context[zmq.Socket[bytes]], limits: Limits) -> zmq.Socket[bytes]:
    """Return the unbound ROUTER of a process."""
    socket = context.socket(zmq.ROUTER)
    _bound(socket, limits)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return socket


def open_dial(
    context: zmq.Context[zmq.Socket[bytes]], limits: Limits, me: Peer
) -> zmq.Socket[bytes]:
    """Return an unconnected DEALER that speaks for ``me``."""
    socket = context.socket(zmq.DEALER)
    _bound(socket, limits)
    socket.setsockopt(zmq.ROUTING_ID, identity_of(me))
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    return socket


def _bound(socket: zmq.Socket[bytes], limits: Limits) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, limits.link_hwm)
    socket.setsockopt(zmq.RCVHWM, limits.link_hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.frame_bytes_max + OVERSIZED_MARGIN)


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """Return the descriptor that becomes readable when the state of ``socket`` changed."""
    fd = socket.getsockopt(zmq.FD)
    assert isinstance(fd, int)
    return fd


def signalled(socket: zmq.Socket[bytes]) -> bool:
    """Whether the descriptor is readable, so that the event loop is about to tell."""
    poller = select.poll()
    poller.register(descriptor(socket), select.POLLIN)
    return bool(poller.poll(0))


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be read now."""
    return bool(_events(socket) & zmq.POLLIN)


def writable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a DEALER takes a message now."""
    return bool(_events(socket) & zmq.POLLOUT)


def _events(socket: zmq.Socket[bytes]) -> int:
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return events
