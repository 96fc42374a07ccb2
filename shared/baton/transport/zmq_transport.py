"""The Transport port over ZeroMQ and asyncio (or uvloop).

Decides how sockets and the event loop meet; what is said is decided by the switchboard.

Plain sockets, not ``zmq.asyncio``: no task waits for a message, so none can be cancelled with one
in its hands, a send is a plain call that never blocks, and nothing runs between a message and what
the process does about it. The price is care with ZeroMQ's descriptor, which tells of a change
once: every reading empties the socket (in portions, so that timers run in between); a send may use
the change up, so each socket that sent is looked at again on the next turn; and once a second all
are looked at, and what is found then is counted as ``watchdog_rescued``.

Whatever raises in here is a bug, of the transport or of the process's ``on_event``: the transport
stops dead, with nothing more acknowledged or delivered, and gives the exception to ``on_bug``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from baton.core.ids import Member, Peer
from baton.core.limits import Limits
from baton.ports.transport import EndpointInUse, TransportEvent
from baton.transport import host, sockets
from baton.transport.effects import Inbound, Outbound, Route
from baton.transport.endpoint import IPC, EndpointLock
from baton.transport.shell import Shell
from baton.wire import frames
from baton.wire.frames import Frame

#: Messages read from one socket before the loop may do something else.
DRAIN_MAX = 128
WATCHDOG_S = 1.0
#: How long ``close`` waits for acknowledgements before it says goodbye.
FLUSH_S = 0.2

#: Goodbyes are lost now and then (in 3 of 20 ends) where their socket is closed in the very
#: millisecond in which it took them, for all its lingering.
LAST_WORDS_S = 0.01

_Socket = zmq.Socket[bytes]


class ZmqTransport(Shell):
    """One inbox, one DEALER per dialled peer, one timer. All on the loop's thread.

    ``on_count`` gets a stable word for everything dropped, refused or repeated. ``on_bug`` gets
    the exception that stopped the transport: the process is expected to exit.
    """

    def __init__(
        self,
        member: Member,
        limits: Limits,
        on_count: Callable[[str], None],
        on_bug: Callable[[BaseException], None],
    ) -> None:
        super().__init__(member, limits, on_count)
        self._on_bug = on_bug
        self.sent_bytes = 0
        """Put on sockets so far, headers and bodies."""
        self._loop: asyncio.AbstractEventLoop
        self._context: zmq.Context[_Socket]
        self._lock: EndpointLock | None = None
        self._inbox: _Socket | None = None
        self._dials: dict[Peer, _Socket] = {}
        self._routes: dict[_Socket, Route | None] = {}
        """Every open socket that is read; ``None`` is the inbox."""
        self._inbound: dict[bytes, Inbound] = {}
        self._to_read: set[_Socket] = set()
        """Looked at on the next turn, whatever their descriptors say."""
        self._pidfds: dict[Peer, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._armed = 0.0
        self._watchdog: asyncio.TimerHandle | None = None
        self._pump_due = False
        self._flushed: asyncio.Event | None = None
        self._closed = False

    # --- life ---

    async def start(self, on_event: Callable[[TransportEvent], None]) -> None:
        """Bind the inbox and begin delivering events.

        Raises:
            EndpointInUse: another live process holds the endpoint's lock.
            OSError: the endpoint cannot be bound; the text names it.
        """
        assert not self._started, "a transport is started once"
        self._loop = asyncio.get_running_loop()
        endpoint = self.member.endpoint
        self._lock = EndpointLock.take(endpoint) if endpoint else None
        self._context = zmq.Context()
        if endpoint:
            try:
                self._bind(endpoint)
            except BaseException:
                await self._dismantle()
                raise
        self._started = True
        self._on_event = on_event
        self._watchdog = self._loop.call_later(WATCHDOG_S, self._guarded, self._look_after)

    def _bind(self, endpoint: str) -> None:
        inbox = sockets.open_inbox(self._context, self._limits)
        self._inbox = inbox
        try:
            inbox.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                raise EndpointInUse(error.errno, "another process listens on", endpoint) from None
            raise OSError(error.errno, f"cannot bind: {error.strerror}", endpoint) from None
        if endpoint.startswith(IPC):
            Path(endpoint.removeprefix(IPC)).chmod(0o600)
        else:
            # A port of the kernel's choice is announced as what it became.
            bound = inbox.getsockopt_string(zmq.LAST_ENDPOINT)
            self._board.member = msgspec.structs.replace(self.member, endpoint=bound)
        self._listen(inbox, None)

    async def close(self) -> None:
        """Say goodbye to all, flush for at most 200 ms, unlink the endpoint.

        Events end at once: what arrives from now on is not handled, so not acknowledged.
        """
        if self._closed or not self._started:
            return
        self._closed = True
        self._on_event = None
        self._events.clear()
        try:
            await self._flush_all()
        finally:
            await self._dismantle()

    async def _flush_all(self) -> None:
        if not self._routes:
            return
        if not self._board.quiescent:
            self._flushed = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._flushed.wait(), FLUSH_S)
        self._execute(self._board.close())
        await asyncio.sleep(LAST_WORDS_S)

    async def _dismantle(self) -> None:
        self._halt()
        for peer in list(self._dials):
            self._disconnect(peer)
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None
        # Ending the context waits for what lingers, so not on the loop's thread. Only then has
        # ZeroMQ let go of the socket's path, and a successor may have it.
        ending = self._loop.run_in_executor(None, self._context.term)
        try:
            await asyncio.shield(ending)
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _halt(self) -> None:
        """Stop reading, timing and watching."""
        self._on_event = None
        for socket in list(self._routes):
            self._ignore(socket)
        for peer in list(self._pidfds):
            self._unwatch(peer)
        for handle in (self._timer, self._watchdog):
            if handle is not None:
                handle.cancel()
        self._timer = self._watchdog = None

    def _guarded(self, step: Callable[..., None], *arguments: object) -> None:
        """Run a callback of the loop: the transport's part of the process's crash barrier."""
        try:
            step(*arguments)
        except BaseException as error:  # every bug, and nothing may swallow it
            self._halt()
            self._on_bug(error)

    # --- reading ---

    def _listen(self, socket: _Socket, route: Route | None) -> None:
        self._routes[socket] = route
        self._loop.add_reader(sockets.descriptor(socket), self._guarded, self._read, socket)
        # What happened before the reader was there will not be told.
        self._read_soon(socket)

    def _ignore(self, socket: _Socket) -> None:
        if socket in self._routes:
            del self._routes[socket]
            self._loop.remove_reader(sockets.descriptor(socket))

    def _read(self, socket: _Socket) -> None:
        """Empty the socket, or a portion of it, and give out what came."""
        if socket not in self._routes:
            return
        emptied = self._drain(socket)
        self._pump()
        if not emptied:
            self._read_soon(socket)
        if self._flushed is not None and self._board.quiescent:
            self._flushed.set()

    def _read_soon(self, socket: _Socket) -> None:
        if not self._to_read:
            self._loop.call_soon(self._guarded, self._read_all_due)
        self._to_read.add(socket)

    def _read_all_due(self) -> None:
        due, self._to_read = self._to_read, set()
        for socket in due:
            if socket in self._routes and sockets.readable(socket):
                self._read(socket)

    def _drain(self, socket: _Socket) -> bool:
        for _ in range(DRAIN_MAX):
            try:
                parts = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                self._offer_again(socket)
                return True
            route = self._routes[socket]
            if route is None:
                route = self._inbound_route(parts.pop(0))
            self._execute(self._board.on_frame(route, parts, self._now()))
            if socket not in self._routes:
                return True
        return False

    def _inbound_route(self, identity: bytes) -> Inbound:
        # One object per peer that has a line; whoever else knocks gets one that is not kept.
        route = self._inbound.get(identity)
        if route is None:
            route = Inbound(identity)
            peer = frames.peer_of(identity)
            if peer is not None and self._board.line(peer) is not None:
                self._inbound[identity] = route
        return route

    def _offer_again(self, socket: _Socket) -> None:
        """A dialled socket that became writable takes what it refused (or its first hello)."""
        route = self._routes[socket]
        if not isinstance(route, Outbound):
            return
        line = self._board.line(route.peer)
        if line is None or not line.link.blocked_until:
            return
        if sockets.writable(socket):
            line.link.on_writable()
            self._flush(line)

    def _look_after(self) -> None:
        """Once a second: nothing waits in a socket whose descriptor has not told."""
        for socket in list(self._routes):
            will_be_read = socket in self._to_read or sockets.signalled(socket)
            if not will_be_read and sockets.readable(socket):
                self._on_count("watchdog_rescued")
                self._read_soon(socket)
        self._mind_endpoint()
        self._watchdog = self._loop.call_later(WATCHDOG_S, self._guarded, self._look_after)

    def _mind_endpoint(self) -> None:
        """Somebody removed the inbox's path (a cleaner of old files): nobody new would find it.

        Bound once more beside the first time: to unbind would let ZeroMQ's thread remove the new
        path as if it were the old one.
        """
        endpoint = self.member.endpoint
        if self._inbox is None or not endpoint.startswith(IPC):
            return
        path = Path(endpoint.removeprefix(IPC))
        if path.exists():
            return
        # Fails as long as its directory is gone as well.
        with contextlib.suppress(zmq.ZMQError, OSError):
            self._inbox.bind(endpoint)
            path.chmod(0o600)
            self._on_count("endpoint_bound_again")

    # --- writing ---

    def _put(self, route: Route, frame: Frame) -> bool:
        header = frames.pack(frame)
        if isinstance(route, Inbound):
            socket, parts = self._inbox, [route.identity, header, frame.body]
        else:
            socket, parts = self._dials.get(route.peer), [header, frame.body]
        if socket is None:
            return False
        try:
            socket.send_multipart(parts, zmq.DONTWAIT)
            self.sent_bytes += len(header) + len(frame.body)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        finally:
            self._read_soon(socket)
        return True

    # --- the rest of the shell ---

    def _now(self) -> float:
        return host.boottime()

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            if due >= self._armed:
                return
            self._timer.cancel()
        self._armed = due
        delay = max(0.0, due - self._now())
        self._timer = self._loop.call_later(delay, self._guarded, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        # After a time without the CPU, what came meanwhile is heard before anybody is judged.
        for socket in list(self._routes):
            # Reading one may have closed another: a dial that was given up for the other's.
            if socket in self._routes and sockets.readable(socket):
                self._read(socket)
        self._tick()
        self._pump()

    def _pump_soon(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._guarded, self._pump_now)

    def _pump_now(self) -> None:
        self._pump_due = False
        self._pump()

    def _connect(self, peer: Peer, endpoint: str) -> None:
        socket = sockets.open_dial(self._context, self._limits, self.member.peer)
        self._dials[peer] = socket
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            # Not an address at all: the hello stays unanswered, which is told after a while.
            self._on_count("dial_bad_endpoint")
        self._listen(socket, Outbound(peer))

    def _disconnect(self, peer: Peer) -> None:
        socket = self._dials.pop(peer, None)
        if socket is not None:
            self._ignore(socket)
            socket.close()

    def _watch(self, peer: Peer, pid: int) -> None:
        if peer in self._pidfds:
            return
        try:
            pidfd = host.open_pidfd(pid)
        except ProcessLookupError:
            self._loop.call_soon(self._guarded, self._on_died, peer)
            return
        if pidfd is None:
            self._on_count("watch_impossible")
            return
        self._pidfds[peer] = pidfd
        self._loop.add_reader(pidfd, self._guarded, self._on_died, peer)

    def _unwatch(self, peer: Peer) -> None:
        self._inbound.pop(frames.identity_of(peer), None)
        pidfd = self._pidfds.pop(peer, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def _on_died(self, peer: Peer) -> None:
        # What it said before it died may still lie in the sockets.
        for socket in list(self._routes):
            self._read(socket)
        self._execute(self._board.on_died(peer))
        self._pump()
