"""A network of simulated processes: the Transport port under a virtual clock, with faults.

Decides what happens to a frame on its way. Handshake, links, refusals and the order of events are
the production switchboard and shell; only sockets, timers and pidfds are replaced. Everything is
drawn from the clock's ``random``: the same seed gives the same run.

A frame on its way is what a ZeroMQ pair of sockets would hold. Per pair of workers, both ways or
one way: delay, loss, duplication, reordering, frames cut short, a cut. Per process: freeze and thaw
(its frames wait in a bounded inbox, its timers do not run), kill (its peers are told after a moment
where they can see its pid, else they notice the silence).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from baton.core.ids import Member, Peer
from baton.core.limits import Limits
from baton.ports.transport import EndpointInUse, TransportEvent
from baton.sim.clock import Handle, VirtualClock
from baton.transport.effects import Inbound, Outbound, Route
from baton.transport.shell import Shell
from baton.wire import frames
from baton.wire.frames import Frame

#: How soon the death of a process on the same host is seen (pidfd), in seconds.
DEATH_SEEN_S = (0.000_2, 0.005)
#: A process that closed in good order ends a little later: what it said arrives first.
EXIT_SEEN_S = (0.1, 0.3)


@dataclass(frozen=True, slots=True)
class Faults:
    """What the way from one worker to another does to each frame. Probabilities and seconds."""

    delay_s: tuple[float, float] = (0.000_05, 0.000_5)
    """Least and most; without ``reorder`` no frame overtakes another."""
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    """This share of the frames may overtake, by up to ``reorder_s``."""
    reorder_s: float = 0.02
    truncate: float = 0.0
    """This share of the frames arrives without its end: only a part of the header is left."""
    cut: bool = False
    """Nothing arrives. Cut in one direction only, the pair is half open."""


#: One host, unix sockets, nothing wrong.
CALM = Faults()


class SimNetwork:
    """All transports of one simulation, by endpoint; the faults between them."""

    def __init__(self, clock: VirtualClock, faults: Faults = CALM) -> None:
        self.clock = clock
        self.faults = faults
        """For every way without its own."""
        self._ways: dict[tuple[str, str], Faults] = {}
        self._last_arrival: dict[tuple[Peer, Peer], float] = {}
        self._bound: dict[str, SimTransport] = {}
        self._alive: dict[Peer, SimTransport] = {}
        self._dead: set[Peer] = set()

    def transport(
        self, member: Member, limits: Limits, on_count: Callable[[str], None]
    ) -> SimTransport:
        """Return the transport of a new process."""
        return SimTransport(self, member, limits, on_count)

    # --- faults ---

    def set_faults(self, source: str, target: str, faults: Faults | None) -> None:
        """Set what happens from worker ``source`` to ``target``; ``None``: as everywhere."""
        if faults is None:
            self._ways.pop((source, target), None)
        else:
            self._ways[source, target] = faults

    def cut(self, source: str, target: str, *, both_ways: bool = True) -> None:
        """Let nothing through any more, ``both_ways`` or half open."""
        self.set_faults(source, target, Faults(cut=True))
        if both_ways:
            self.set_faults(target, source, Faults(cut=True))

    def heal(self, source: str, target: str) -> None:
        """Undo ``cut`` and ``set_faults`` between the two, both ways."""
        self.set_faults(source, target, None)
        self.set_faults(target, source, None)

    def kill(self, peer: Peer, *, seen: bool = True) -> None:
        """End a process at once. Not ``seen``: nobody is told, as on another host."""
        self._end(peer, DEATH_SEEN_S if seen else None)

    def _end(self, peer: Peer, seen_s: tuple[float, float] | None) -> None:
        dead = self._alive.pop(peer)
        self._dead.add(peer)
        dead.die()
        for endpoint in [name for name, owner in self._bound.items() if owner is dead]:
            del self._bound[endpoint]
        if seen_s is not None:
            for other in self._alive.values():
                delay = self.clock.random.uniform(*seen_s)
                self.clock.call_later(delay, partial(other.see_death, peer))

    def freeze(self, peer: Peer) -> None:
        """Stop a process (SIGSTOP)."""
        self._alive[peer].freeze()

    def thaw(self, peer: Peer) -> None:
        """Let a frozen process go on (SIGCONT)."""
        self._alive[peer].thaw()

    # --- what transports call ---

    def bind(self, transport: SimTransport) -> None:
        """Take the endpoint of ``transport`` and make it known.

        Raises:
            EndpointInUse: another live process has it.
        """
        endpoint = transport.member.endpoint
        if endpoint in self._bound:
            holder = self._bound[endpoint].member.pid
            raise EndpointInUse(f"{endpoint}: held by the living process with pid {holder}")
        if endpoint:
            self._bound[endpoint] = transport
        self._alive[transport.member.peer] = transport

    def unbind(self, transport: SimTransport) -> None:
        """The process has closed its transport in good order: its pid goes away as well."""
        if self._alive.get(transport.member.peer) is transport:
            self._end(transport.member.peer, EXIT_SEEN_S)

    def is_dead(self, peer: Peer) -> bool:
        """Whether that incarnation ran and ended; one that never ran is not dead."""
        return peer in self._dead

    def carry(self, source: SimTransport, route: Route, parts: list[bytes]) -> bool:
        """Take a frame at its source; return False where a socket would have refused it."""
        me = source.member.peer
        if isinstance(route, Outbound):
            target = self._bound.get(source.dials.get(route.peer, ""))
            arrives: Route = Inbound(frames.identity_of(me))
        else:
            peer = frames.peer_of(route.identity)
            target = self._alive.get(peer) if peer else None
            # Whoever binds an endpoint now gets the sockets that an earlier owner's peers opened.
            dials = target.dials.items() if target else ()
            dialled = [key for key, name in dials if name == source.member.endpoint]
            if not dialled:
                return False
            arrives = Outbound(dialled[-1])
        if target is None or target.full:
            return False
        self._send_off(me, target, arrives, parts)
        return True

    def _send_off(self, me: Peer, target: SimTransport, route: Route, parts: list[bytes]) -> None:
        random = self.clock.random
        peer = target.member.peer
        way = self._ways.get((me.worker_id, peer.worker_id), self.faults)
        if way.cut or random.random() < way.loss:
            return
        if way.truncate and random.random() < way.truncate:
            parts = [parts[0][: random.randrange(len(parts[0]))], b""]
        for _ in range(2 if random.random() < way.duplicate else 1):
            at = self.clock.now() + random.uniform(*way.delay_s)
            if random.random() < way.reorder:
                at += random.uniform(0, way.reorder_s)
            else:
                at = max(at, self._last_arrival.get((me, peer), 0.0))
                self._last_arrival[me, peer] = at
            self.clock.call_at(at, partial(target.arrive, route, parts))


class SimTransport(Shell):
    """The Transport port of one simulated process.

    ``start`` and ``close`` never wait; ``start_now`` and ``close_now`` are the same without a loop.
    An exception from ``on_event`` goes up through the clock: it ends the simulation.
    """

    def __init__(
        self,
        network: SimNetwork,
        member: Member,
        limits: Limits,
        on_count: Callable[[str], None],
    ) -> None:
        super().__init__(member, limits, on_count)
        self.dials: dict[Peer, str] = {}
        """Endpoints of the dialled peers."""
        self.frozen = False
        self._network = network
        self._clock = network.clock
        self._inbox: deque[tuple[Route, list[bytes]]] = deque()
        self._watched: set[Peer] = set()
        self._seen_dead: list[Peer] = []
        self._when_awake: list[Callable[[], None]] = []
        self._timer: Handle | None = None
        self._pump_due: Handle | None = None
        self._dead = False

    # --- the port ---

    async def start(self, on_event: Callable[[TransportEvent], None]) -> None:
        """Bind the inbox and begin delivering events."""
        self.start_now(on_event)

    async def close(self) -> None:
        """Say goodbye to all and unbind."""
        self.close_now()

    def start_now(self, on_event: Callable[[TransportEvent], None]) -> None:
        """See :meth:`start`.

        Raises:
            EndpointInUse: another live process has the endpoint.
        """
        assert not self._started, "a transport is started once"
        self._network.bind(self)
        self._started = True
        self._on_event = on_event

    def close_now(self) -> None:
        """See :meth:`close`."""
        if self._dead or not self._started:
            return
        self._on_event = None
        self._execute(self._board.close())
        self.die()
        self._network.unbind(self)

    # --- what the network does to it ---

    @property
    def full(self) -> bool:
        """Whether its socket refuses more."""
        return len(self._inbox) >= self._limits.link_hwm

    def arrive(self, route: Route, parts: list[bytes]) -> None:
        """Take a frame from the network."""
        if self._dead:
            return
        if self.frozen:
            if not self.full:
                self._inbox.append((route, parts))
            return
        if isinstance(route, Outbound) and route.peer not in self.dials:
            return
        self._execute(self._board.on_frame(route, parts, self._now()))
        self._pump()

    def see_death(self, peer: Peer) -> None:
        """The kernel says that the process of ``peer`` has ended."""
        if self.frozen:
            self._seen_dead.append(peer)
        elif peer in self._watched and not self._dead:
            self._execute(self._board.on_died(peer))
            self._pump()

    def when_awake(self, fn: Callable[[], None]) -> None:
        """Run ``fn`` now, or at the thaw: for what else belongs to this process."""
        if self._dead:
            return
        if self.frozen:
            self._when_awake.append(fn)
        else:
            fn()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        """Go on: first what waits in the sockets, then what was due meanwhile."""
        self.frozen = False
        inbox, self._inbox = self._inbox, deque()
        for route, parts in inbox:
            self.arrive(route, parts)
        dead, self._seen_dead = self._seen_dead, []
        for peer in dead:
            self.see_death(peer)
        due, self._when_awake = self._when_awake, []
        for fn in due:
            self.when_awake(fn)

    def die(self) -> None:
        """End without a word."""
        self._dead = True
        self._on_event = None
        self._events.clear()
        self._inbox.clear()
        self._when_awake.clear()
        for handle in (self._timer, self._pump_due):
            if handle is not None:
                handle.cancel()

    # --- the rest of the shell ---

    def _now(self) -> float:
        return self._clock.now()

    def _arm(self, due: float) -> None:
        if self._dead:
            return
        if self._timer is not None and self._timer.pending:
            if due >= self._timer.due:
                return
            self._timer.cancel()
        self._timer = self._clock.call_at(due, partial(self.when_awake, self._on_timer))

    def _on_timer(self) -> None:
        self._tick()
        self._pump()

    def _pump_soon(self) -> None:
        if self._pump_due is None or not self._pump_due.pending:
            self._pump_due = self._clock.call_soon(partial(self.when_awake, self._pump))

    def _put(self, route: Route, frame: Frame) -> bool:
        return self._network.carry(self, route, [frames.pack(frame), frame.body])

    def _connect(self, peer: Peer, endpoint: str) -> None:
        self.dials[peer] = endpoint

    def _disconnect(self, peer: Peer) -> None:
        self.dials.pop(peer, None)

    def _watch(self, peer: Peer, pid: int) -> None:
        self._watched.add(peer)
        if self._network.is_dead(peer):
            self._clock.call_soon(partial(self.see_death, peer))

    def _unwatch(self, peer: Peer) -> None:
        self._watched.discard(peer)
