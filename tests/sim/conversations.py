"""One resumable request at one gateway, and everything that may be said of it, in any order.

Decides, by its seed, who says what when: claims and cancels of clients, readers that come and go,
the ledger's answers (or none), tokens, a router's words, lost links, another gateway that claims
and completes. The gateway's machine and its exchange are real, and so are the ledger's records of
resumables. It is less than a cluster and comes to more of what rarely meets.

What must hold, whatever was said:

- nobody waits for ever: each claim has one answer, each reader an outcome of each choice;
- one outcome each, and nothing after it;
- no gap or duplicate, no ids of another answer, none missing from what is completed;
- nothing is begun twice;
- all entries are gone in the end.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec

from baton.core.events import LeaseChanged, TimePassed
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.core.sampling import SamplingParams
from baton.gateway.exchange import Exchange, Stream
from baton.gateway.kept import Answer
from baton.gateway.machine import GatewayMachine
from baton.gateway.session import TURN_BITS, Session
from baton.gateway.vocabulary import (
    CancelWanted,
    Deliver,
    End,
    NotResumed,
    Ready,
    ResumableWanted,
    ResumeWanted,
)
from baton.ports.driving import CallLedger, LedgerAnswered, Measure, Note
from baton.ports.ledger import (
    AnyOp,
    ClaimResumable,
    CloseResumable,
    Closing,
    Conflict,
    Done,
    EndRequest,
    FindOwned,
    Owned,
    Reply,
    Unavailable,
)
from baton.ports.transport import PeerLost, PeerUp, Received
from baton.sim.resumables import ResumableModel, ResumableOp
from baton.wire.messages import (
    FenceRequest,
    RequestFailed,
    RequestPlaced,
    RequestRefused,
    RequestResumed,
    RequestSpec,
    TokenChunk,
    TokenRun,
)

ME, OTHER = Peer("gateway-0", 1), Peer("gateway-1", 9)
DECODE = Peer("decode-0", 5)
ROLES = {Peer("router-0", 2): Role.ROUTER, Peer("router-1", 3): Role.ROUTER, DECODE: Role.DECODE}
WINDOW_MS, DEADLINE_MS = 20_000, 60_000
IDS_TOTAL = 6
"""How long each answer is."""
STEPS = 120
MOODS = (0.25, 1.0, 4.0)
WAKES_MAX = 10_000
QUIET_S = 400.0
"""Nothing is disturbed any more: by then everything has ended."""

COMPLETE = Outcome(Ending.COMPLETED)
ENDS = (
    Outcome(Ending.FAILED, reason=Reason.WORKER_LOST),
    Outcome(Ending.REFUSED, reason=Reason.SUPERSEDED),
    Outcome(Ending.CANCELLED, reason=Reason.GATEWAY_LOST),
)
REFUSALS = (Reason.OVERLOADED, Reason.DRAINING, Reason.TOO_LONG)


def token(request_id: str, index: int) -> int:
    """Return an id that tells its answer: the choice, and in which turn it was made again."""
    name, _, again = request_id.partition("~")
    return int(again or 0) * 1000 + int(name[-1]) * 100 + index


class Reader:
    """A client that reads: what it is told is looked at as it comes."""

    def __init__(self, number: int, stream: Stream) -> None:
        self.name = f"reader {number}"
        self.stream = stream
        self.seen = 0
        self.again: set[int] = set()
        """Of which making of the answer it has ids."""
        self.told: dict[str, int] = {}
        self.ended: dict[str, Outcome] = {}

    def look(self) -> None:
        """Assert what must hold of what is new."""
        items = self.stream._items
        for item in items[self.seen :]:
            choice, about = item.request_id, f"{self.name}: {item}"
            assert choice not in self.ended, f"told more after its outcome: {about}"
            count = self.told.setdefault(choice, 0)
            if isinstance(item, End):
                self.ended[choice] = item.outcome
                whole = item.outcome.ending is not Ending.COMPLETED or count == IDS_TOTAL
                assert whole, f"completed with {count} ids: {about}"
                continue
            assert item.index == count, f"gap or duplicate: {about} after {count} ids"
            again = item.ids[0] // 1000
            wanted = [token(f"{choice}~{again}", count + n) for n in range(len(item.ids))]
            self.again.add(again)
            same = list(item.ids) == wanted and len(self.again) == 1
            assert same, f"ids of another answer: {about}"
            self.told[choice] += len(item.ids)
        self.seen = len(items)


class Conversation:
    """One request, from its opening until nothing is left of it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 100.0
        self.machine = GatewayMachine(ME, Limits(resume_tokens_max=3))
        self.exchange = Exchange(self.post, 4096, 65536)
        self.model = ResumableModel()
        self.ledger_away = False
        self.choices = tuple(f"c-{n}" for n in range(self.chance.choice((1, 2, 2))))
        self.scenario = f"{len(self.choices)} choices"
        self.calls: list[AnyOp] = []
        """What the ledger has not answered yet."""
        self.ready: list[Ready] = []
        """What clients were given and have not taken yet."""
        self.claims: dict[str, int] = {}
        """How many answers each has."""
        self.readers: list[Reader] = []
        self.begun: dict[tuple[str, int], Session] = {}
        """By request and the claim for which it was begun."""
        self._said: list[tuple[float, object]] = []
        self._events: deque[Any] = deque()
        self._busy = False
        self._acts: dict[Callable[[], None], int] = {
            self._answer: 30,
            self._take: 15,
            self._tokens: 25,
            self._router_says: 12,
            self._claim: 16,
            self._leave: 6,
            self._pass_time: 4,
            self._link: 2,
            self._ledger_goes_or_comes: 2,
            self._another_gateway: 6,
            self._cancel: 1,
        }

    @property
    def story(self) -> list[str]:
        """What happened: each event and, indented, what the machine said to it."""
        return [f"{now:.3f} {said}" if now else f"    {said}" for now, said in self._said]

    def run(self) -> None:
        """Say all that the seed says, let it come to rest, and look at what is left."""
        self.post(LeaseChanged(LeaseState.HELD))
        for peer, role in ROLES.items():
            self.post(PeerUp(_member(peer, role)))
        self.claims["c"] = 0
        self.post(ResumableWanted("c", "t", "k", self.choices, b"recipe", WINDOW_MS))
        acts = list(self._acts)
        # Each seed has a mood: what is rare elsewhere is frequent here, and meets what else is.
        weights = [weight * self.chance.choice(MOODS) for weight in self._acts.values()]
        for act in self.chance.choices(acts, weights, k=STEPS):
            act()
        self._come_to_rest()

    def post(self, event: Any) -> None:
        """Feed ``event`` to the machine, after those that it is about to hear."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        while self._events:
            self._feed(self._events.popleft())
        self._busy = False
        for reader in self.readers:
            reader.look()
        self._look_at_sessions()

    def _feed(self, event: Any) -> None:
        self._said.append((self.now, event))
        for command in self.machine.handle(event, self.now):
            if not isinstance(command, Note | Measure):
                self._said.append((0.0, command))
            match command:
                case CallLedger():
                    self.calls.append(command.op)
                case Deliver() | End():
                    self.exchange.execute(command)
                case Ready() | NotResumed():
                    self.claims[command.claim] += 1
                    if isinstance(command, Ready):
                        self.ready.append(command)
        self.machine.check()

    def _look_at_sessions(self) -> None:
        sessions = self.machine.state.sessions.values()
        names = Counter(session.name for session in sessions)
        assert max(names.values(), default=1) == 1, f"begun twice at once: {names}"
        for session in sessions:
            # Its turn grows with each router; the claim in it stays.
            key = session.request_id, session.turn >> TURN_BITS
            assert self.begun.setdefault(key, session) is session, f"begun twice: {key}"

    # --- what may happen ----------------------------------------------------------------------

    def _answer(self) -> None:
        """The ledger answers its oldest call, or cannot be reached."""
        if self.calls:
            op = self.calls.pop(0)
            self.post(LedgerAnswered(op, self._reply(op)))

    def _reply(self, op: AnyOp) -> Reply:
        if self.ledger_away or self.chance.random() < 0.1:
            return Unavailable("away")
        match op:
            case EndRequest():
                done = Done(op.epoch, RequestState.COMPLETED)
                return done if self.chance.random() < 0.8 else Conflict(0, None)
            case FindOwned():
                return Owned(())
            case _ if isinstance(op, ResumableOp):
                return self.model.execute(op, self._now_ms)
            case _:
                return Unavailable("not played here")

    @property
    def _now_ms(self) -> int:
        return int(self.now * 1000)

    def _take(self) -> None:
        """A client takes what it was given, or has left."""
        if not self.ready:
            return
        ready = self.ready.pop(0)
        if self.chance.random() < 0.15:
            self.exchange.unread(ready.resumable_id)
            return
        if ready.submit:
            stream = self.exchange.open([_spec(each) for each in self.choices], "c")
        else:
            stream = self.exchange.attach("c", self.choices)
        self.readers.append(Reader(len(self.readers), stream))
        self.readers[-1].look()

    def _tokens(self) -> None:
        """Decode sends the next ids of a choice."""
        sessions = list(self.machine.state.sessions.values())
        if not sessions or DECODE not in self.machine.state.links:
            return
        session = self.chance.choice(sessions)
        begin = len(session.ids)
        end = min(IDS_TOTAL, begin + self.chance.randint(1, 2))
        ids = tuple(token(session.request_id, index) for index in range(begin, end))
        finish = FinishReason.LENGTH if end == IDS_TOTAL else None
        run = TokenRun(session.request_id, session.epoch, begin, ids, finish=finish)
        self.post(Received(DECODE, TokenChunk((run,))))

    def _router_says(self) -> None:
        """Whoever has a choice says what became of it."""
        sessions, links = self.machine.state.sessions.values(), self.machine.state.links
        routed = [each for each in sessions if each.router is not None and each.router in links]
        if not routed:
            return
        session = self.chance.choice(routed)
        request_id, epoch = session.request_id, session.epoch
        # Only what had another gateway can be complete without this one.
        ends = (*ENDS, *3 * (COMPLETE,)) if session.from_elsewhere else ENDS
        end, refusal = self.chance.choice(ends), self.chance.choice(REFUSALS)
        placed = RequestPlaced(request_id, epoch, DECODE)
        failed = RequestFailed(request_id, epoch, end)
        says = {
            placed: 5,
            FenceRequest(request_id, epoch + 1): 1,
            failed: 3,
            RequestRefused(request_id, refusal, "no", epoch=epoch * session.fenced): 1,
            RequestResumed(request_id, session.turn + (1 << TURN_BITS)): 1,
        }
        message = self.chance.choices(list(says), list(says.values()))[0]
        self.post(Received(session.router, message))

    def _claim(self) -> None:
        """A client comes back."""
        name = f"n{len(self.claims)}"
        self.claims[name] = 0
        self.post(ResumeWanted(name, "c", "t", "k"))

    def _leave(self) -> None:
        """A client leaves, and may want no more of it."""
        here = [reader.stream for reader in self.readers if reader.stream.left is None]
        if here:
            gone, cancelled = Reason.CLIENT_DISCONNECTED, Reason.CLIENT_CANCELLED
            self.chance.choice(here).leave(cancelled if self.chance.random() < 0.2 else gone)

    def _cancel(self) -> None:
        self.post(CancelWanted("c"))

    def _link(self) -> None:
        """A link breaks, or is there again."""
        peer = self.chance.choice(list(ROLES))
        there = peer in self.machine.state.links
        self.post(PeerLost(peer, "cut") if there else PeerUp(_member(peer, ROLES[peer])))

    def _ledger_goes_or_comes(self) -> None:
        self.ledger_away = not self.ledger_away

    def _another_gateway(self) -> None:
        """It claims the request, or completes what it has claimed."""
        record = self.model.records.get("c")
        if record is None or record.gateway != OTHER or record.closed:
            claim = ClaimResumable("c", OTHER, f"o{self.chance.random()}", "k", token="t")
            self.model.execute(claim, self._now_ms)
            self._said.append((self.now, claim))
            return
        answers = tuple(_complete(f"{each}~{record.again}") for each in self.choices)
        close = CloseResumable(
            "c", record.turn, WINDOW_MS, msgspec.msgpack.encode(answers), Closing.KEPT
        )
        self.model.execute(close, self._now_ms)
        self._said.append((self.now, close))

    def _pass_time(self) -> None:
        self._wait(self.chance.choice((0.01, 0.3, 5.0, 25.0)))

    def _wait(self, seconds: float) -> None:
        """Wake the machine exactly when it asked for it; the ledger answers meanwhile, or not."""
        until = self.now + seconds
        for _ in range(WAKES_MAX):
            due = self.machine.deadline()
            if due is None or due > until:
                self.now = until
                return
            self.now = max(self.now, due)
            self.post(TimePassed())
            if self.chance.random() < 0.5:
                self._answer()
        raise AssertionError("the machine asks to be woken for ever")

    # --- the end ------------------------------------------------------------------------------

    def _come_to_rest(self) -> None:
        """The ledger answers, whoever was given something takes it, and time passes."""
        self.ledger_away = False
        until = self.now + QUIET_S
        while self.ready or self.calls or (self._left_behind() and self.now < until):
            while self.ready:
                self._take()
            while self.calls:
                self._answer()
            self._wait(1.0)
        waiting = [name for name, answers in self.claims.items() if not answers]
        assert not waiting, f"claims wait for ever: {waiting}"
        twice = [name for name, answers in self.claims.items() if answers > 1]
        assert not twice, f"claims have two answers: {twice}"
        for reader in self.readers:
            missing = list(reader.stream.open_ids)
            assert not missing, f"{reader.name} of {len(self.readers)} waits for ever: {missing}"
        left = self._left_behind()
        assert not left, f"left behind: {left}"

    def _left_behind(self) -> dict[str, object]:
        state, resuming = self.machine.state, self.machine.resuming
        entries = {
            "kept": state.kept,
            "sessions": state.sessions,
            "names": state.names,
            "counted": resuming.held,
            "timers": resuming.deadline(),
            "streams": self.exchange.open_streams,
        }
        return {name: each for name, each in entries.items() if each}


def _member(peer: Peer, role: Role) -> Member:
    return Member(peer=peer, role=role, endpoint="", pid=1, boot_id="b")


def _spec(choice: str) -> RequestSpec:
    return RequestSpec(
        request_id=choice,
        gateway=ME,
        prompt=b"\1\0\0\0",
        sampling=SamplingParams(seed=1),
        max_tokens=IDS_TOTAL,
        deadline_ms=DEADLINE_MS,
        resume_ms=WINDOW_MS,
    )


def _complete(request_id: str) -> Answer:
    ids = b"".join(token(request_id, n).to_bytes(4, "little") for n in range(IDS_TOTAL))
    outcome = Outcome(Ending.COMPLETED, finish=FinishReason.LENGTH, completion_tokens=IDS_TOTAL)
    return Answer(ids, (), FinishReason.LENGTH, 0, outcome)
