"""One simulated process: a production machine, its lease keeper, and its threads in virtual time.

Nothing here decides for a machine. It executes commands as the real shell does, with durations from
the run's one source of chance, and can be killed, frozen and started again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from baton.channel.layout import RECORD_BYTES
from baton.core.events import DrainRequested, LeaseChanged, RoleLeft, TimePassed
from baton.core.ids import Member, Peer, Role
from baton.core.outcomes import Reason
from baton.core.prefix import chain_root
from baton.decode.io import ImportBlocks, MarkBlocks, ProbeWriter, RunStep, VerifyBlocks
from baton.decode.machine import DecodeMachine
from baton.decode.takeover import take_stock
from baton.decode.work import Turns, bring, probe, run_step, verify
from baton.engine.fake import FakeEngine
from baton.gateway.links import Mode
from baton.gateway.machine import GatewayMachine
from baton.gateway.vocabulary import (
    ClientsLeft,
    Deliver,
    End,
    LeaveClients,
    NotResumed,
    Ready,
    ReportsReady,
)
from baton.ports.channel import ArenaInUse, BlockMark
from baton.ports.driving import (
    EXIT_ROLE,
    CallLedger,
    Exit,
    LedgerAnswered,
    Measure,
    Note,
    RecordStep,
    Send,
)
from baton.ports.lease import LeaseKeeper, MembersChanged, Replaced
from baton.ports.ledger import AnyOp, Reply, Unavailable
from baton.ports.transport import PeerLost, PeerUp, TransportEvent
from baton.prefill.io import ChunkRow, ChunkStored, MapArena, RunChunk, UnmapArena
from baton.prefill.machine import PrefillMachine
from baton.prefill.work import ChunkWorker
from baton.router.machine import RouterMachine
from baton.router.placement import BlockNaming
from baton.runtime.members import to_dial
from baton.sim.clock import Handle
from baton.wire.messages import BlocksChanged, BlocksListed, BlocksWanted, LastStep
from sim import oracles
from support.held import holdings

if TYPE_CHECKING:
    from sim.cluster import Cluster

RESTART_S = 0.5
#: From the start of a process until it would say that it is ready.
READY_S = 0.3
#: A stalled writer sleeps longer than its peers wait for a sign of it.
STALL_S = 3.0
#: How often a gateway that leaves its clients looks whether they are gone.
LEAVING_LOOK_S = 0.02
#: In the whole-arena check of decode lies a third of a run's time.
DECODE_CHECK_EVERY = 7


def _wrong_kv(role: Role, fields: Mapping[str, object]) -> bool:
    """Whether a note tells that this process's engine met KV that is not what it must be.

    Decode repeats what prefill said of an attempt: that was prefill's reading, not its own.
    """
    if role not in (Role.DECODE, Role.PREFILL):
        return False
    if role is Role.DECODE and fields.get("reason") is Reason.PREFILL_ERROR:
        return False
    return "wrong KV" in str(fields) or "KV of another" in str(fields)


class Process:
    """One worker_id; :meth:`start` makes a new incarnation of it."""

    def __init__(self, cluster: Cluster, role: Role, worker_id: str) -> None:
        self.cluster = cluster
        self.role = role
        self.becomes = role
        """What it is from its next start on: the word that is kept."""
        self.worker_id = worker_id
        self.alive = False
        self.frozen = False
        self.starts = 0
        self.exits: list[tuple[int, str]] = []
        self.kv_errors = 0

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a new incarnation, as the supervisor would."""
        cluster = self.cluster
        self.starts += 1
        self.role = self.becomes
        self.me = Peer(self.worker_id, cluster.next_incarnation())
        self.member = Member(
            peer=self.me,
            role=self.role,
            endpoint=f"sim://{self.worker_id}",
            pid=self.me.incarnation,
            boot_id="sim",
            compat=cluster.compat,
        )
        self.alive, self.frozen, self.drained = True, False, False
        self.leaving = False
        """It takes no connection any more, and closes each when its answer is complete."""
        self._pending: list[Callable[[], None]] = []
        self._queue: list[object] = []
        self._handling = False
        self._handled = 0
        self._timer: Handle | None = None
        self.known = False
        """Whether the ledger has said who is there."""
        self._lease_timer: Handle | None = None
        self._work: list[Callable[[], None]] = []
        self.peers: dict[Peer, Member] = {}
        try:
            self.machine = self._build()
        except ArenaInUse:
            self.alive = False
            cluster.clock.call_later(RESTART_S, self.start)
            return
        self.ledger = cluster.ledger.connect()
        self.keeper = LeaseKeeper(self.member, cluster.limits, cluster.clock.now())
        self.transport = cluster.join(self)
        self._keep(TimePassed())
        self._arm()

    def _build(self) -> Any:
        cluster = self.cluster
        limits, size = cluster.limits, cluster.layout.block_size
        slo = cluster.scenario.slo
        root = chain_root(repr(cluster.compat))
        if self.role is Role.ROUTER:
            split = bool(cluster.prefills) and slo is None
            naming = BlockNaming(root, size)
            return RouterMachine(self.me, limits, split=split, slo=slo, naming=naming)
        if self.role is Role.GATEWAY:
            mode: Mode = "split" if cluster.prefills else "colocated"
            others = cluster.scenario.gateways > 1
            return GatewayMachine(self.me, limits, "adaptive" if slo else mode, others=others)
        left = cluster.step_records.get(self.worker_id)
        cluster.step_records[self.worker_id] = LastStep(self.me, ())
        self.engine = FakeEngine(cluster.info, cluster.layout, sleep=lambda seconds: None)
        if self.role is Role.PREFILL:
            cluster.host.remove_unowned("sim", self.worker_id)
            channel = cluster.host.channel(cluster.layout, cluster.compat)
            self.chunks = ChunkWorker(self.engine, channel, self.me, cluster.clock)
            return PrefillMachine(self.me, limits, block_size=size, root=root, left=left)
        arena = cluster.host.open(
            "sim", self.me, cluster.layout, cluster.compat, blocks=cluster.blocks
        )
        self.arena = arena
        self.turns = Turns(self._import_piece)
        self.engine.attach(arena.ref.file_id, arena.memory)
        found = None
        if arena.former is not None:
            found = take_stock(arena, size, cluster.layout.block_bytes, limits.takeover_verify_mb)
            cluster.tell(self.worker_id, "arena_taken_over", found.describe())
            cluster.counts["taken_over"] += 1
            self.later(READY_S, arena.complete)
        return DecodeMachine(
            self.me,
            limits,
            self.arena.ref,
            blocks_total=cluster.blocks,
            block_size=size,
            block_bytes=cluster.layout.block_bytes,
            root=root,
            slo=slo,
            found=found,
            left=left,
            mixed=slo is not None,
        )

    def kill(self) -> None:
        """SIGKILL; the supervisor starts it again."""
        if not self.alive:
            return
        self.alive = False
        self.cluster.tell(self.worker_id, "killed", {})
        self.cluster.host.kill(self.me.incarnation)
        if self.role is Role.DECODE and not self.drained:
            self._rot()
            self._mix_up()
        self.cluster.leave(self)
        self.ledger.crash()
        for timer in (self._timer, self._lease_timer):
            if timer is not None:
                timer.cancel()
        self.cluster.clock.call_later(RESTART_S, self.start)

    def _rot(self) -> None:
        """Turn bits over in what this one leaves behind."""
        random, layout, arena = self.cluster.clock.random, self.cluster.layout, self.arena
        named = [n for n in range(arena.blocks_total) if arena.marked(n).chain]
        while named and self.cluster.rots_now():
            block = named.pop(random.randrange(len(named)))
            byte = random.randrange(layout.block_bytes)
            self.cluster.host.flip(arena.ref, block, byte, 1 << random.randrange(8))
            self.cluster.tell(self.worker_id, "rotten", {"block": block})

    def _mix_up(self) -> None:
        """Give a record another one's name: its checksum and its bytes are its own."""
        random, arena = self.cluster.clock.random, self.arena
        marks = [arena.marked(number) for number in range(arena.blocks_total)]
        named = [mark for mark in marks if mark.chain]
        while len(named) > 1 and self.cluster.mixes_up_now():
            mark = named.pop(random.randrange(len(named)))
            other = random.choice(named)
            arena.mark([replace(mark, chain=other.chain)])
            self.cluster.tell(self.worker_id, "mixed_up", {"block": mark.block})

    def _mark(self, marks: tuple[BlockMark, ...]) -> None:
        """Store records; be killed in the middle of one, with new fields under the old word."""
        if not self.cluster.tears_now():
            self.arena.mark(marks)
            return
        random = self.cluster.clock.random
        last = random.randrange(len(marks))
        self.arena.mark(marks[:last])
        self.arena.tear(marks[last], random.randrange(8, RECORD_BYTES))
        self.cluster.tell(self.worker_id, "torn", {"block": marks[last].block})
        self.kill()

    def drain(self) -> None:
        """SIGTERM: it finishes or hands over what it has, ends, and is started again."""
        if self.alive:
            self.later(0.0, lambda: self.feed(DrainRequested()))

    def change_role(self, role: Role) -> None:
        """The word is kept; it drains, ends, and is started again as that."""
        self.becomes = role
        self.cluster.tell(self.worker_id, "role_taken", {"role": role})
        self.later(0.0, lambda: self.feed(RoleLeft()))

    @property
    def takes_clients(self) -> bool:
        """Whether it accepts connections."""
        return self.alive and not self.leaving

    def freeze(self) -> None:
        """SIGSTOP: nothing runs, locks stay, what arrives waits."""
        if self.alive and not self.frozen:
            self.frozen = True
            self.cluster.tell(self.worker_id, "frozen", {})
            self.cluster.hold(self)

    def thaw(self) -> None:
        """SIGCONT: everything that was due happens now, late."""
        if not self.alive or not self.frozen:
            return
        self.frozen = False
        self.cluster.tell(self.worker_id, "thawed", {})
        self.cluster.let_go(self)
        pending, self._pending = self._pending, []
        for fn in pending:
            if self.alive:
                fn()

    def later(self, delay: float, fn: Callable[[], None]) -> Handle:
        """Run ``fn`` in this incarnation after ``delay``: never once dead, late if frozen."""
        me = self.me

        def due() -> None:
            if not self.alive or self.me != me:
                return
            if self.frozen:
                self._pending.append(due)
            else:
                fn()

        return self.cluster.clock.call_later(delay, due)

    # --- events -------------------------------------------------------------------------------

    def on_transport(self, event: TransportEvent) -> None:
        """What the network brings."""
        if not self.alive:
            return
        if isinstance(event, PeerUp):
            self.peers[event.member.peer] = event.member
        elif isinstance(event, PeerLost):
            self.peers.pop(event.peer, None)
        self.feed(event)

    def feed(self, event: object) -> None:
        """Handle ``event``; commands are executed before the next event, as the driver does."""
        self._queue.append(event)
        if self._handling:
            return
        self._handling = True
        while self._queue and self.alive:
            event = self._queue.pop(0)
            before = oracles.held(self.role, self.machine, event)
            for command in self.machine.handle(event, self.cluster.clock.now()):
                self._execute(command)
                if not self.alive:
                    return  # killed in the middle of it
            oracles.unchanged(self.role, self.machine, event, before)
            self._check()
        self._handling = False
        if self.alive:
            self._arm()

    def _check(self) -> None:
        """Decode's check walks its whole arena: every few events are enough to find a leak."""
        self._handled += 1
        if self.role is not Role.DECODE or self._handled % DECODE_CHECK_EVERY == 0:
            self.machine.check()
            holdings(self.machine)

    def _arm(self) -> None:
        deadline = self.machine.deadline()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if deadline is not None:
            wait = max(0.0005, deadline - self.cluster.clock.now())
            self._timer = self.later(wait, lambda: self.feed(TimePassed()))

    def _keep(self, event: Any) -> None:
        """Run the lease keeper."""
        for command in self.keeper.handle(event, self.cluster.clock.now()):
            match command:
                case CallLedger(op):
                    self.ledger.call(
                        op, lambda reply, op=op: self._on_lease(LedgerAnswered(op, reply))
                    )
                case LeaseChanged():
                    self.feed(command)
                case MembersChanged(members):
                    # As the shell does: whoever has just come dials everybody, once.
                    newcomer, self.known = not self.known, True
                    for member in to_dial(self.me, self.role, members, newcomer=newcomer):
                        self.transport.dial(member)
                case Replaced():
                    self._exit(1, "replaced")
        self.keeper.check()
        if isinstance(event, LedgerAnswered) and self.alive:
            # As the shell does at every beat: a lost link to one who is there is opened anew.
            for member in to_dial(self.me, self.role, self.keeper.members):
                self.transport.dial(member)
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        deadline = self.keeper.deadline()
        if self.alive and deadline is not None:
            wait = max(0.0005, deadline - self.cluster.clock.now())
            self._lease_timer = self.later(wait, lambda: self._keep(TimePassed()))

    def _on_lease(self, event: LedgerAnswered) -> None:
        self.later(0.0, lambda: self._keep(event))

    # --- commands -----------------------------------------------------------------------------

    def _execute(self, command: object) -> None:
        match command:
            case Send(peer, BlocksChanged() | BlocksWanted() | BlocksListed() as message):
                transport = self.transport
                self.cluster.news_go(lambda: transport.send(peer, message))
            case Send(peer, message):
                self.transport.send(peer, message)
            case CallLedger(op):
                self.ledger.call(op, lambda reply, op=op: self._on_answer(op, reply))
            case Note(event, fields):
                self.cluster.tell(self.worker_id, event, fields)
                if _wrong_kv(self.role, fields):
                    self.kv_errors += 1
            case Measure(name, value, labels):
                self.cluster.counts[name] += value
                for label in labels.values():
                    self.cluster.counts[f"{name}:{label}"] += value
            case Exit(code, reason):
                self._exit(code, reason)
            case MarkBlocks(marks):
                self._mark(marks)
            case VerifyBlocks():
                self.later(self._some(0.002), lambda: self.feed(self._verified(command)))
            case ImportBlocks():
                sources = self.cluster.host.sources("sim", self.cluster.layout, self.cluster.compat)
                self.turns.add(bring(self.arena, sources, command, self.cluster.clock))
            case ProbeWriter():
                self.later(self._some(0.0002), lambda: self.feed(probe(self.arena, command)))
            case RecordStep(attempts):
                self.cluster.step_records[self.worker_id] = LastStep(self.me, attempts)
            case RunStep():
                self._thread(0.02, self._step(command))
            case MapArena():
                self._thread(0.001, lambda: self.chunks.map(command))
            case UnmapArena():
                self._thread(0.001, lambda: self.chunks.unmap(command))
            case RunChunk():
                self._chunk(command)
            case Deliver() | End() | Ready() | NotResumed() | ReportsReady():
                self.cluster.clients.on_command(self, command)
            case LeaveClients():
                self.leaving = True
                self._look_for_clients()
            case _:
                raise AssertionError(f"nobody executes {type(command).__name__}")

    def _look_for_clients(self) -> None:
        """Tell the machine when the last connection is closed, as the server does."""
        if self.cluster.clients.connected(self):
            self.later(LEAVING_LOOK_S, self._look_for_clients)
        else:
            self.feed(ClientsLeft())

    def _on_answer(self, op: AnyOp, reply: Reply | Unavailable) -> None:
        self.later(0.0, lambda: self.feed(LedgerAnswered(op, reply)))

    def _some(self, mean: float) -> float:
        return self.cluster.clock.random.uniform(0.2, 1.8) * mean

    def _verified(self, command: VerifyBlocks) -> object:
        return verify(self.arena, command, self.cluster.clock)

    def _import_piece(self, piece: Callable[[], object]) -> None:
        """Import piece by piece; anything may happen in between."""

        def due() -> None:
            event = piece()
            if event is not None:
                self.feed(event)

        self.later(self._some(0.002), due)

    def _step(self, command: RunStep) -> Callable[[], object]:
        def work() -> object:
            if self.cluster.is_fatal(command.rows):
                self.kill()
                return None
            return run_step(self.engine, self.arena, command, self.cluster.clock)

        return work

    def _thread(self, mean: float, work: Callable[[], object]) -> None:
        """Run ``work`` in the one engine thread: it happens somewhere within its time."""

        def begin() -> None:
            seconds = self._some(mean)
            at = self.cluster.clock.random.random() * seconds
            self.later(at, lambda: self._finish(work(), seconds - at))

        self._submit(begin)

    def _chunk(self, command: RunChunk) -> None:
        """Fence at the start, stores somewhere later: a freeze in between makes them very late."""

        def fence() -> None:
            tokens = sum(len(row.row.token_ids) for row in command.rows)
            seconds = self._some(0.005 + tokens * 0.0005)
            stores = self.cluster.clock.random.random() * seconds
            began = self.cluster.clock.now()
            live = self.chunks.begin(command)
            oracles.may_store(self.cluster, self.me, [command.rows[number] for number in live])
            self.later(stores, lambda: store(live, began, seconds - stores))
            if self.cluster.stalls_now():
                self.freeze()
                self.cluster.clock.call_later(STALL_S, self.thaw)

        def store(live: list[int], began: float, rest: float) -> None:
            if self.cluster.is_fatal(row.row for row in command.rows):
                self.kill()
                return
            stored: list[ChunkStored] = []
            finished = self.chunks.complete(command, live, began, stored.append)
            if live and self.cluster.flips_now():
                self._flip(command.rows[live[0]])
            told = rest * self.cluster.clock.random.random()
            for event in stored:
                self.later(told, partial(self.feed, event))
            self.later(told, lambda: self._finish(finished, rest - told))

        self._submit(fence)

    def _submit(self, begin: Callable[[], None]) -> None:
        """Give the engine thread something to do: one thing begins when the one before is over,
        however long a freeze has made that."""
        self._work.append(begin)
        if len(self._work) == 1:
            self.later(0.0, begin)

    def _finish(self, event: object, rest: float) -> None:
        def over() -> None:
            self._work.pop(0)
            if self._work:
                self.later(0.0, self._work[0])
            if event is not None:
                self.feed(event)

        self.later(rest, over)

    def _flip(self, row: ChunkRow) -> None:
        """Turn over one bit of what ``row`` has stored and announces next."""
        random, layout = self.cluster.clock.random, self.cluster.layout
        if not row.checks:
            return
        check = random.choice(row.checks)
        token = random.randrange(check.tokens) + random.randrange(2) * layout.block_size
        byte = token * layout.token_bytes_per_axis + random.randrange(layout.token_bytes_per_axis)
        memory = self.chunks.arenas[row.row.arena].memory
        memory[check.block * layout.block_bytes + byte] ^= 1 << random.randrange(8)
        self.cluster.tell(self.worker_id, "bit_flipped", {"request_id": row.row.request_id})

    def _exit(self, code: int, reason: str) -> None:
        self.exits.append((code, reason))
        self.cluster.tell(self.worker_id, "exited", {"code": code, "reason": reason})
        self.drained = code in (0, EXIT_ROLE)
        if self.drained and self.role is Role.DECODE:
            self.arena.close(unlink=True)
        if self.role is Role.GATEWAY:
            cut = [each for each in self.cluster.clients.connected(self) if not each.resumable]
            assert not (self.drained and cut), f"{self.worker_id} went away under {cut}"
            self.cluster.clients.gateway_dies(self)
        self.kill()
