"""The whole cluster under one seeded virtual clock: production machines, faults, checkers.

A run has two phases. First requests come while faults are injected; what must hold then: no wrong
token, one outcome per request, every bound, blocks conserved (each machine's own ``check``), no
effect of a lower epoch, no store without permission (``oracles.py``). Then the faults stop; what
must hold then: everything ends in bounded virtual time, nothing is left behind, and a new request
gets its right answer.

Run one seed again: ``python -m sim.run --seed N``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from baton.core.ids import Role
from baton.core.lifecycles import BlockState
from baton.core.limits import Limits
from baton.core.outcomes import Ending
from baton.core.slo import Slo
from baton.engine.fake_model import fake_info
from baton.engine.info import KERNELS, compat_of, layout_of
from baton.ports.engine import Row
from baton.ports.transport import Received
from baton.sim.channel import SimHost
from baton.sim.clock import VirtualClock
from baton.sim.ledger import LedgerModel, SimLedger
from baton.sim.network import CALM, Faults, SimNetwork, SimTransport
from baton.wire.messages import LastStep, TokensWanted
from sim import oracles
from sim.clients import Clients
from sim.process import Process

STORY_LINES = 2_000
#: Output lengths of most runs.
USUAL = (1, 2, 8, 30, 60)
#: Seeds that are kept because of what they found before all was drawn that is drawn now.
AS_BEFORE = frozenset({935})
#: Of a step's two milliseconds: one that is always kept, one that is not, one that refuses too.
SLOS = (Slo(2.0, 0.1), Slo(0.05, 0.003), Slo(0.02, 0.02, refuse=True))


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a run is made of; :func:`draw` makes one from a seed."""

    prefills: int = 1
    decodes: int = 1
    routers: int = 1
    blocks: int = 64
    requests: int = 25
    max_tokens: tuple[int, ...] = USUAL
    """What requests ask for, each as often as the others."""
    spread_s: float = 6.0
    """Requests come within this time, and so do the faults."""
    kills: int = 0
    victims: tuple[str, ...] = ()
    """Who is killed; empty: anybody but gateways."""
    freezes: int = 0
    cancels: int = 0
    ledger_faults: int = 0
    fail_overs: int = 0
    """Times the ledger goes on with what it had a moment before."""
    gateway_kills: int = 0
    poisons: int = 0
    """Requests that end whatever process computes a certain token of them."""
    router_kills: int = 0
    router_freezes: int = 0
    flips: int = 0
    """Bits inverted between the storing of a chunk and its verification."""
    rots: int = 0
    """Named blocks of decode workers' arenas in which a bit is inverted after their owner's death,
    before anybody else reads them."""
    mixups: int = 0
    """Records in dead decode workers' arenas that have another block's name afterwards."""
    tears: int = 0
    """Decode workers killed while they store a block's record."""
    drains: int = 0
    """Decode workers that are asked to shut down (SIGTERM) and started again."""
    prefill_drains: int = 0
    router_drains: int = 0
    gateway_drains: int = 0
    stalls: int = 0
    """Prefill frozen after its look at the fence and before its stores, for longer than decode
    waits: it stores when it wakes, into whatever the blocks are by then."""
    cuts: int = 0
    """Links between two processes cut for a while, one way or both, while all others hold."""
    echoes: int = 0
    """Decode workers are asked once more for tokens that they have sent, as a gateway does that has
    seen a gap or was linked anew."""
    cut_pair: tuple[str, str] | None = None
    """Whose link is cut; ``None``: anybody's."""
    isolations: int = 0
    """Processes cut off from all others for a while: they run, and reach nobody but the ledger."""
    isolated: str = ""
    """Who that is; empty: anybody."""
    faults: Faults = CALM
    gateways: int = 1
    resumable: float = 0.0
    """Share of requests whose clients come back when their connection breaks."""
    breaks: int = 0
    """Connections of resumable requests that break, noticed by their gateway or not."""
    gateway_freezes: int = 0
    abandons: int = 0
    """Resumable requests whose clients never come back."""
    news_lost: float = 0.0
    """Share of the messages about blocks, between decode workers and routers, that get lost, and as
    many that come late, behind others; the link itself loses and turns round nothing."""
    names_max: int = 4_096
    """Names of blocks in such a message (``block_names_max``)."""
    slo: Slo | None = None
    """The way of each request is chosen by it (adaptive mode); ``None``: split or colocated."""
    every_rule: float = 0.0
    """Share of the sampled requests that ask for all at once that a request may ask for."""


def draw(seed: int) -> Scenario:
    """Return the scenario of ``seed``: about one run in five is calm."""
    random = VirtualClock(seed).random
    calm = random.random() < 0.2
    if calm:
        noisy = CALM
    else:
        noisy = Faults(
            delay_s=(0.00005, random.choice((0.0005, 0.005, 0.03))),
            loss=random.choice((0.0, 0.0, 0.02, 0.1)),
            duplicate=random.choice((0.0, 0.05)),
            reorder=random.choice((0.0, 0.1)),
        )
    scenario = Scenario(
        prefills=random.choice((0, 1, 1, 2)),
        decodes=random.choice((1, 1, 2)),
        routers=random.choice((1, 1, 2)),
        blocks=random.choice((20, 32, 64, 200)),
        requests=random.choice((10, 25, 40)),
        max_tokens=random.choice((USUAL, USUAL, (1, 30, 200))),
        kills=0 if calm else random.choice((0, 1, 3, 6)),
        freezes=0 if calm else random.choice((0, 0, 1, 3)),
        cancels=random.choice((0, 3, 8)),
        ledger_faults=0 if calm else random.choice((0, 0, 1, 2)),
        gateway_kills=0 if calm else random.choice((0, 0, 0, 1)),
        flips=random.choice((0, 0, 1, 3)),
        stalls=0 if calm else random.choice((0, 0, 1, 2)),
        cuts=0 if calm else random.choice((0, 0, 1, 3)),
        faults=noisy,
        rots=random.choice((0, 0, 2, 6)),
        drains=random.choice((0, 0, 1, 2)),
        mixups=random.choice((0, 0, 2, 6)),
        tears=0 if calm else random.choice((0, 0, 1, 2)),
        echoes=random.choice((0, 0, 3, 12)),
        poisons=0 if calm else random.choice((0, 0, 0, 1)),
        isolations=0 if calm else random.choice((0, 0, 0, 1)),
        gateways=random.choice((1, 1, 2)),
        resumable=random.choice((0.0, 0.5, 1.0)),
        breaks=random.choice((0, 4, 12)),
        gateway_freezes=0 if calm else random.choice((0, 0, 0, 2)),
        abandons=random.choice((0, 0, 2)),
        slo=random.choice((None, None, None, *SLOS)),
        fail_overs=0 if calm else random.choice((0, 0, 0, 1, 2)),
        news_lost=0.0 if calm else random.choice((0.0, 0.05, 0.3)),
        names_max=random.choice((4_096, 16, 5)),
    )
    if seed in AS_BEFORE:
        return scenario
    truncate = 0.0 if calm else random.choice((0.0, 0.0, 0.02))
    return replace(
        scenario,
        every_rule=random.choice((0.0, 0.5)),
        prefill_drains=random.choice((0, 0, 1)),
        router_drains=random.choice((0, 0, 1)),
        gateway_drains=random.choice((0, 0, 1)),
        faults=replace(noisy, truncate=truncate),
    )


class Cluster:
    """One run."""

    def __init__(self, seed: int, scenario: Scenario | None = None) -> None:
        self.seed = seed
        self.scenario = scenario if scenario is not None else draw(seed)
        self.prefills = self.scenario.prefills
        self.blocks = self.scenario.blocks
        self.clock = VirtualClock(seed)
        self.limits = Limits(block_names_max=self.scenario.names_max)
        # One layer and one head keep the bytes few; every rule is the same for more.
        self.info = fake_info(layers=1, kv_heads=1)
        self.layout = layout_of(self.info, "float32", 16)
        self.compat = compat_of(self.info, self.layout, KERNELS["fake"])
        self.host = SimHost(self.clock.now)
        self.network = SimNetwork(self.clock)
        self.ledger = SimLedger(
            self.clock.now,
            self._schedule,
            self.limits,
            self.clock.random,
        )
        self.story: deque[str] = deque(maxlen=STORY_LINES)
        self.counts: Counter[str] = Counter()
        self.incarnations = 0
        self.calm = False
        self.flips = self.stalls = self.rots = self.mixups = self.tears = 0
        self.poison: dict[str, int] = {}
        """Request -> index of the output token whose computation is fatal."""
        self.step_records: dict[str, LastStep] = {}
        """What each worker's file says of its step in flight: it outlives the process."""
        self.wiped = False
        """The ledger has lost something at some time."""
        self.clients = Clients(self)
        names = [(Role.GATEWAY, f"gateway-{n}") for n in range(self.scenario.gateways)]
        names += [(Role.ROUTER, f"router-{n}") for n in range(self.scenario.routers)]
        names += [(Role.PREFILL, f"prefill-{n}") for n in range(self.scenario.prefills)]
        names += [(Role.DECODE, f"decode-{n}") for n in range(self.scenario.decodes)]
        self.processes = {name: Process(self, role, name) for role, name in names}

    def _schedule(self, delay: float, fn: Callable[[], None]) -> None:
        self.clock.call_later(delay, fn)

    def gateways(self) -> list[Process]:
        return [each for each in self.processes.values() if each.role is Role.GATEWAY]

    # --- what processes need ------------------------------------------------------------------

    def next_incarnation(self) -> int:
        self.incarnations += 1
        return self.incarnations

    def join(self, process: Process) -> SimTransport:
        transport = self.network.transport(process.member, self.limits, self._count_frame)
        transport.start_now(process.on_transport)
        return transport

    def leave(self, process: Process) -> None:
        self.network.kill(process.me)

    def hold(self, process: Process) -> None:
        self.network.freeze(process.me)

    def let_go(self, process: Process) -> None:
        self.network.thaw(process.me)

    def _count_frame(self, reason: str) -> None:
        self.counts[f"dropped:{reason}"] += 1

    def tell(self, worker_id: str, event: str, fields: Mapping[str, object]) -> None:
        """Add a line to the story of this run."""
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        self.story.append(f"{self.clock.now():10.4f} {worker_id:10} {event} {words}")

    def stalls_now(self) -> bool:
        """Whether prefill freezes just here, its fence looked at and nothing stored yet."""
        if self.calm or self.stalls >= self.scenario.stalls or self.clock.random.random() > 0.1:
            return False
        self.stalls += 1
        return True

    def rots_now(self) -> bool:
        """Whether a bit turns over in the arena of a decode worker that was just killed."""
        if self.rots >= self.scenario.rots:
            return False
        self.rots += 1
        return True

    def mixes_up_now(self) -> bool:
        """Whether a record of a decode worker that was just killed gets another name."""
        if self.mixups >= self.scenario.mixups:
            return False
        self.mixups += 1
        return True

    def tears_now(self) -> bool:
        """Whether decode is killed in the middle of the record that it stores just now."""
        if self.calm or self.tears >= self.scenario.tears or self.clock.random.random() > 0.01:
            return False
        self.tears += 1
        return True

    def is_fatal(self, rows: Iterable[Row]) -> bool:
        """Whether one of ``rows`` ends the process that computes it."""
        return any(
            row.sample is not None and self.poison.get(row.request_id, 1 << 30) <= row.sample.index
            for row in rows
        )

    def news_go(self, send: Callable[[], None]) -> None:
        """Let a message about blocks go its way, lost, late or at once."""
        random, share = self.clock.random, self.scenario.news_lost
        fate = random.random() if share and not self.calm else 1.0
        if fate < share:
            self.counts["news_lost"] += 1
        elif fate < 2 * share:
            self.counts["news_late"] += 1
            self.clock.call_later(random.uniform(0.0, 0.2), send)
        else:
            send()

    def flips_now(self) -> bool:
        """Whether a bit of what was just stored turns over."""
        if self.calm or self.flips >= self.scenario.flips or self.clock.random.random() > 0.2:
            return False
        self.flips += 1
        return True

    # --- a run --------------------------------------------------------------------------------

    def run(self) -> None:
        """Both phases; an assertion that fails is a bug in a machine (or in its model)."""
        self.start()
        self.disturb()
        self.clock.run_for(self.scenario.spread_s)
        self.calm_down()
        oracles.Nobodys(self).look()
        self.settle()

    def start(self) -> None:
        """Start everything and wait until the gateway would say that it is ready."""
        for process in self.processes.values():
            process.start()
        ready = self.clock.run_while(self._unready, 10.0)
        assert ready, "the cluster never became ready"
        self.network.faults = self.scenario.faults

    def _unready(self) -> bool:
        for gateway in self.gateways():
            if not gateway.alive or gateway.frozen or gateway.machine.unready() is not None:
                return True
        return not any(
            process.alive
            and process.role is Role.DECODE
            and process.machine.worker_status(self.clock.now()).accepting
            for process in self.processes.values()
        )

    def disturb(self) -> None:
        """Schedule requests and faults over the spread."""
        scenario, clock = self.scenario, self.clock
        workers = [p for p in self.processes.values() if p.role is not Role.GATEWAY]
        for _ in range(scenario.requests):
            clock.call_later(clock.random.uniform(0, scenario.spread_s), self._ask)
        victims = [p for p in workers if not scenario.victims or p.worker_id in scenario.victims]
        for _ in range(scenario.kills):
            victim = clock.random.choice(victims)
            clock.call_later(clock.random.uniform(0, scenario.spread_s), victim.kill)
        routers = [p for p in workers if p.role is Role.ROUTER]
        for _ in range(scenario.router_kills):
            victim = clock.random.choice(routers)
            clock.call_later(clock.random.uniform(0, scenario.spread_s), victim.kill)
        for _ in range(scenario.freezes):
            self._freeze(clock.random.choice(workers))
        for _ in range(scenario.router_freezes):
            self._freeze(clock.random.choice(routers))
        for role, drains in (
            (Role.DECODE, scenario.drains),
            (Role.PREFILL, scenario.prefill_drains),
            (Role.ROUTER, scenario.router_drains),
            (Role.GATEWAY, scenario.gateway_drains),
        ):
            theirs = [p for p in self.processes.values() if p.role is role]
            for _ in range(drains if theirs else 0):
                victim = clock.random.choice(theirs)
                clock.call_later(clock.random.uniform(0, scenario.spread_s), victim.drain)
        for _ in range(scenario.echoes):
            clock.call_later(clock.random.uniform(0, scenario.spread_s), self._echo)
        for _ in range(scenario.cuts):
            self._cut_a_link(clock.random.uniform(0, scenario.spread_s))
        for _ in range(scenario.isolations):
            self._isolate(clock.random.uniform(0, scenario.spread_s))
        for _ in range(scenario.ledger_faults):
            self._disturb_ledger(clock.random.uniform(0, scenario.spread_s))
        for _ in range(scenario.fail_overs):
            self._fail_over(clock.random.uniform(0, scenario.spread_s))
        for _ in range(scenario.gateway_kills):
            clock.call_later(clock.random.uniform(0, scenario.spread_s), self._kill_gateway)
        for _ in range(scenario.gateway_freezes):
            self._freeze(clock.random.choice(self.gateways()))
        for _ in range(scenario.breaks):
            clock.call_later(clock.random.uniform(0, scenario.spread_s), self._break_one)

    def _freeze(self, victim: Process) -> None:
        at = self.clock.random.uniform(0, self.scenario.spread_s)
        self.clock.call_later(at, victim.freeze)
        self.clock.call_later(at + self.clock.random.choice((0.3, 1.0, 3.0)), victim.thaw)

    def _echo(self) -> None:
        """One sequence that decodes is asked for everything from somewhere before its end."""
        speaking = [
            (process, seq)
            for process in self.processes.values()
            if process.role is Role.DECODE and process.alive and not process.frozen
            for seq in process.machine.state.sequences.values()
            if seq.sent_first
        ]
        if speaking:
            process, seq = self.clock.random.choice(speaking)
            index = self.clock.random.randrange(len(seq.output))
            wanted = TokensWanted(seq.spec.request_id, seq.epoch, index)
            process.feed(Received(seq.gateway, wanted))

    def _ask(self) -> None:
        there = [each for each in self.gateways() if each.takes_clients and not each.frozen]
        if not there:
            return
        gateway = there[0] if len(there) == 1 else self.clock.random.choice(there)
        share = self.scenario.resumable
        resumable = bool(share) and self.clock.random.random() < share
        answer = self.clients.ask(resumable=resumable, gateway=gateway)
        if len(self.poison) < self.scenario.poisons:
            fatal = self.clock.random.choice((0, 1, 5))
            self.poison[answer.spec.request_id] = fatal
            self.tell("client", "poison", {"request_id": answer.spec.request_id, "at": fatal})
        if resumable and self.clock.random.random() < self.scenario.abandons / 10:
            answer.abandoned = True
            self.clock.call_later(
                self.clock.random.choice((0.05, 0.5)),
                lambda: self.clients.comebacks.lose(answer, noticed=True),
            )
        if self.clock.random.random() < self.scenario.cancels / self.scenario.requests:
            wait = self.clock.random.choice((0.0005, 0.01, 0.05, 0.3, 1.0))
            self.clock.call_later(wait, lambda: self.clients.cancel(answer))

    def _kill_gateway(self) -> None:
        victim = self.clock.random.choice(self.gateways())
        if victim.alive:
            self.clients.gateway_dies(victim)
            victim.kill()

    def _break_one(self) -> None:
        """The network of one client breaks."""
        reading = [
            answer
            for answer in self.clients.answers.values()
            if answer.resumable and answer.known and answer.outcome is None and answer.reader
        ]
        if reading:
            noticed = self.clock.random.random() < 0.5
            self.clients.comebacks.lose(self.clock.random.choice(reading), noticed=noticed)

    def _cut_a_link(self, at: float) -> None:
        clock, network = self.clock, self.network
        one, other = self.scenario.cut_pair or clock.random.sample(sorted(self.processes), 2)
        both_ways = clock.random.random() < 0.5
        seconds = clock.random.choice((0.5, 3.0, 6.0))

        def cut() -> None:
            if self.calm:
                return
            self.tell(one, "cut_off", {"other": other, "both_ways": both_ways})
            network.cut(one, other, both_ways=both_ways)

        def heal() -> None:
            self.tell(one, "healed", {"other": other})
            network.heal(one, other)

        clock.call_later(at, cut)
        clock.call_later(at + seconds, heal)

    def _isolate(self, at: float) -> None:
        clock, network = self.clock, self.network
        one = self.scenario.isolated or clock.random.choice(sorted(self.processes))
        seconds = clock.random.choice((1.0, 3.0, 6.0))

        def cut() -> None:
            if self.calm:
                return
            self.tell(one, "isolated", {"seconds": seconds})
            for other in self.processes:
                network.cut(one, other)

        def heal() -> None:
            self.tell(one, "joined_again", {})
            for other in self.processes:
                network.heal(one, other)

        clock.call_later(at, cut)
        clock.call_later(at + seconds, heal)

    def _disturb_ledger(self, at: float) -> None:
        clock, ledger = self.clock, self.ledger
        kind = clock.random.choice(("down", "freeze", "lose", "wipe"))
        seconds = clock.random.choice((0.5, 1.5, 4.0))
        if kind == "down":
            clock.call_later(at, ledger.go_down)
            clock.call_later(at + seconds, ledger.come_up)
        elif kind == "freeze":
            clock.call_later(at, ledger.freeze)
            clock.call_later(at + seconds, ledger.thaw)
        elif kind == "wipe":
            clock.call_later(at, self._wipe)
        else:
            clock.call_later(at, lambda: ledger.lose_replies(5))

    def _wipe(self) -> None:
        self.wiped = True
        self.ledger.wipe()

    def _fail_over(self, at: float) -> None:
        """The ledger's last writes are lost with its primary."""
        clock, ledger = self.clock, self.ledger

        def part() -> None:
            replica = ledger.replica()
            clock.call_later(lag, lambda: fail_over(replica))

        def fail_over(replica: LedgerModel) -> None:
            self.tell("ledger", "failed_over", {"lost_s": lag})
            self.wiped = True
            ledger.fail_over(replica)

        lag = clock.random.choice((0.02, 0.2, 1.0))
        clock.call_later(max(0.0, at - lag), part)

    def calm_down(self) -> None:
        """The faults stop."""
        self.calm = True
        for one in self.processes:
            for other in self.processes:
                self.network.heal(one, other)
        self.network.faults = CALM
        self.ledger.thaw()
        self.ledger.come_up()
        self.ledger.lose_replies(0)
        for process in self.processes.values():
            process.thaw()

    def settle(self) -> None:
        """Everything ends, nothing is left, and the cluster serves."""
        ended = self.clock.run_while(lambda: bool(self.clients.open()), 90.0)
        names = [answer.spec.request_id for answer in self.clients.open()]
        assert ended, f"no outcome in bounded time for {names}"
        ready = self.clock.run_while(self._unready, 15.0)
        assert ready, f"not ready again: {[g.machine.unready() for g in self.gateways()]}"
        self.clients.judge()
        self.clock.run_for(5.0)
        last = self.clients.ask(tokens=40, max_tokens=8)
        self.clock.run_while(lambda: last.outcome is None, 20.0)
        assert last.outcome is not None, "silence after the faults"
        assert last.outcome.ending is Ending.COMPLETED, f"after the faults: {last.outcome}"
        self.clients.judge()
        # A frozen process that woke as somebody's past may need a lease to be told so.
        clean = self.clock.run_while(lambda: bool(self.leftovers()), 70.0)
        assert clean, f"left behind: {self.leftovers()}"
        for process in self.processes.values():
            if process.role is Role.PREFILL and self.flips:
                continue  # its next chunk reads what was stored before decode has verified it
            assert process.kv_errors == 0, f"{process.worker_id} read wrong KV"

    def leftovers(self) -> list[str]:
        """Name everything that should not be there when nothing runs."""
        records = self.ledger.model.records
        live = [name for name, record in records.items() if record.outcome is None]
        found = [f"ledger: {live}"] if live else []
        for process in self.processes.values():
            if not process.alive:
                found.append(f"{process.worker_id} is not up")
                continue
            machine, name = process.machine, process.worker_id
            if process.role is Role.DECODE:
                counts = machine.state.pool.counts()
                busy = {
                    state.name: count
                    for state, count in counts.items()
                    if count and state not in (BlockState.FREE, BlockState.CACHED)
                }
                if busy or machine.state.sequences or machine.handover.tickets:
                    found.append(f"{name}: {busy} {list(machine.state.sequences)}")
            elif process.role is Role.PREFILL:
                held = machine.state
                if held.jobs or held.early or held.flying:
                    found.append(f"{name}: {list(held.jobs)} {list(held.early)}")
            elif process.role is Role.ROUTER:
                if machine.state.entries:
                    found.append(f"{name}: {list(machine.state.entries)}")
                found += oracles.wrong_index(self, process)
            elif machine.state.sessions or machine.state.kept:
                found.append(f"{name}: {list(machine.state.sessions)} {list(machine.state.kept)}")
        return found
