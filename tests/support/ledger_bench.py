"""Ledgers under test: the real adapter on a real server, and the simulator's, behind one face."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any, Protocol, TypeVar

import redis

from baton.core.ids import Member, Peer, Role
from baton.core.limits import Limits
from baton.core.outcomes import Ending, FinishReason, Outcome
from baton.core.sampling import SamplingParams
from baton.ledger.keys import Keys
from baton.ledger.redis_ledger import RedisLedger
from baton.ports.ledger import AnyOp, Ledger, Reply, Unavailable
from baton.sim.ledger import SimLedger
from baton.wire.messages import RequestSpec
from support.ledger_server import LedgerServer

T = TypeVar("T")

#: Short, so that tests on the real server's clock take fractions of a second.
LIMITS = Limits(lease_ttl_ms=300, lease_renew_ms=75, terminal_ttl_ms=500)
TTL = LIMITS.lease_ttl_ms
WAIT_S = 10.0

ROUTER, ROUTER_2 = Peer("router-0", 11), Peer("router-1", 12)
GATEWAY, GATEWAY_2 = Peer("gateway-0", 21), Peer("gateway-1", 22)
PREFILL, PREFILL_2 = Peer("prefill-0", 31), Peer("prefill-1", 32)
DECODE, DECODE_2 = Peer("decode-0", 2**61 + 1), Peer("decode-1", 2**61 + 3)
COMPLETED = Outcome(Ending.COMPLETED, FinishReason.STOP, completion_tokens=3)
CANCELLED = Outcome(Ending.CANCELLED)


def member(peer: Peer) -> Member:
    return Member(peer, Role(peer.worker_id.split("-")[0]), f"ipc://{peer.worker_id}", 1, "boot")


def spec(request_id: str = "r1", *, deadline_ms: int = 600_000, resume_ms: int = 0) -> RequestSpec:
    # Every value of a byte, in 256 ids below 2**31.
    prompt = b"".join(bytes((byte, 255 - byte, 10, 0)) for byte in range(256))
    return RequestSpec(
        request_id, GATEWAY, prompt, SamplingParams(seed=1), 16, deadline_ms, resume_ms=resume_ms
    )


class LedgerBench(Protocol):
    """What the conformance tests need beside the port itself."""

    def ask(self, op: AnyOp) -> Reply | Unavailable:
        """Call and wait for the answer."""
        ...

    def ask_all(self, ops: list[AnyOp]) -> list[tuple[int, Reply | Unavailable]]:
        """Call all at once; return (place of the op, answer) in the order of the answers."""
        ...

    def pass_time(self, seconds: float) -> None:
        """Let the ledger's clock go on."""
        ...

    def owned(self, peer: Peer) -> set[str]:
        """The live requests in the index of ``peer``."""
        ...

    def wipe(self) -> None: ...

    def called_back_inside(self, op: AnyOp) -> bool:
        """Whether ``done`` ran before ``call`` returned."""
        ...


class _Asking(ABC):
    """The part that both benches share, over their ``ledger`` and ``wait``."""

    ledger: Ledger

    @abstractmethod
    def wait(self, finished: Callable[[], bool]) -> None:
        """Let the ledger work until ``finished``."""

    def ask_all(self, ops: list[AnyOp]) -> list[tuple[int, Reply | Unavailable]]:
        answers: list[tuple[int, Reply | Unavailable]] = []

        def note(place: int, reply: Reply | Unavailable) -> None:
            answers.append((place, reply))

        def call_all() -> None:
            for place, op in enumerate(ops):
                self.ledger.call(op, partial(note, place))

        self.on_loop(call_all)
        self.wait(lambda: len(answers) == len(ops))
        return answers

    def on_loop(self, function: Callable[[], None]) -> None:
        function()

    def ask(self, op: AnyOp) -> Reply | Unavailable:
        return self.ask_all([op])[0][1]

    def called_back_inside(self, op: AnyOp) -> bool:
        answers: list[object] = []
        seen: list[bool] = []

        def call() -> None:
            self.ledger.call(op, answers.append)
            seen.append(bool(answers))

        self.on_loop(call)
        self.wait(lambda: bool(answers))
        return seen[0]


class RealBench(_Asking):
    """The Redis adapter on the embedded server. One event loop, run while something is awaited."""

    def __init__(self, server: LedgerServer, pool: str = "test", limits: Limits = LIMITS) -> None:
        self.server = server
        self.keys = Keys(pool)
        self.bugs: list[BaseException] = []
        self._runner = asyncio.Runner()
        self._limits = limits
        self._pool = pool
        self.redis = redis.Redis(unix_socket_path=str(server.socket_path))
        self.ledger: RedisLedger = self.run(self._open(server.url))

    async def _open(self, url: str) -> RedisLedger:
        ledger = RedisLedger(url, self._pool, self._limits, self.bugs.append)
        await ledger.start()
        return ledger

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def on_loop(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        self.run(call())

    def wait(self, finished: Callable[[], bool]) -> None:
        async def until() -> None:
            async with asyncio.timeout(WAIT_S):
                while not finished():  # noqa: ASYNC110 - it ends by the server's clock, too
                    await asyncio.sleep(0.0005)

        self.run(until())

    def pass_time(self, seconds: float) -> None:
        """Wait until the server's own clock has moved that far."""
        began = self._server_time()
        self.wait(lambda: self._server_time() >= began + seconds)

    def _server_time(self) -> float:
        whole, micro = self.redis.time()
        return float(whole) + float(micro) / 1e6

    def owned(self, peer: Peer) -> set[str]:
        found = self.redis.zscan_iter(self.keys.owners, match=f"{peer} *")
        return {entry.decode().split(" ", 1)[1] for entry, _ in found}

    def wipe(self) -> None:
        self.redis.flushall()

    def close(self) -> None:
        self.run(self.ledger.close())
        self._runner.close()
        self.redis.close()
        assert not self.bugs, self.bugs


class VirtualTime:
    """A clock and the functions due on it, in order of time and then of scheduling."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def schedule(self, delay_s: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._numbers), function))

    def step(self, until: float) -> bool:
        """Run the next function due by ``until``; say whether there was one."""
        if not self._due or self._due[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, function = heapq.heappop(self._due)
        function()
        return True


class SimBench(_Asking):
    """The simulator's ledger under virtual time."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.time = VirtualTime()
        self.server = SimLedger(lambda: self.time.now, self.time.schedule, limits, Random(1))
        self.client = self.server.connect()
        self.ledger = self.client

    def wait(self, finished: Callable[[], bool]) -> None:
        gives_up_at = self.time.now + WAIT_S
        while not finished():
            assert self.time.step(gives_up_at), "nothing is left to happen"

    def pass_time(self, seconds: float) -> None:
        until = self.time.now + seconds
        while self.time.step(until):
            pass

    def owned(self, peer: Peer) -> set[str]:
        return self.server.model.owned(peer)

    def wipe(self) -> None:
        self.server.wipe()

    def close(self) -> None:
        """Nothing to end."""
