"""A gateway as it is, in front of a scripted cluster.

The machine, the driver, the HTTP layer and uvicorn on a loopback port are the real ones; router,
prefill and decode are a script that speaks the real messages. It runs on its own event loop in a
thread, so that tests may use any client, asynchronous or not.
"""

from __future__ import annotations

import asyncio
import io
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvloop

from baton.core.events import DrainRequested, LeaseChanged, RestartRequested
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.core.stopping import finish_of
from baton.engine.fake_model import write_fake_model
from baton.gateway.exchange import Exchange
from baton.gateway.links import Mode
from baton.gateway.machine import GatewayMachine
from baton.gateway.server import GatewayServer
from baton.gateway.serving import Serving
from baton.gateway.tokens import load_model_text
from baton.gateway.vocabulary import (
    ClientsLeft,
    Deliver,
    End,
    LeaveClients,
    NotResumed,
    Ready,
    ReportsReady,
)
from baton.ports.ledger import (
    AnyOp,
    Done,
    Reply,
    Unavailable,
)
from baton.ports.transport import PeerLost, PeerUp, Received
from baton.runtime import logs
from baton.runtime.clock import BootClock
from baton.runtime.driver import Driver
from baton.runtime.metrics import Metrics
from baton.runtime.settings import GatewayConfig
from baton.sim.resumables import ResumableModel, ResumableOp
from baton.wire import codec
from baton.wire.fields import TokenLogprob
from baton.wire.messages import (
    AnyMessage,
    FenceRequest,
    PoolStatus,
    ReadReport,
    Report,
    RequestEnded,
    RequestFailed,
    RequestPlaced,
    RequestRefused,
    RequestSpec,
    SubmitRequest,
    TokenChunk,
    TokenRun,
)

T = TypeVar("T")

ME = Peer("gateway-0", 11)
ROUTER = Peer("router-0", 21)
PREFILL = Peer("prefill-0", 31)
DECODE = Peer("decode-0", 41)
DEADLINE_S = 10.0
#: The smallest request of a chat.
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


def member(peer: Peer, role: Role) -> Member:
    """Return a member on this host."""
    return Member(peer=peer, role=role, endpoint=f"ipc:///{peer.worker_id}", pid=1, boot_id="b")


@dataclass
class Script:
    """How the scripted cluster answers every request, until it is changed."""

    ids: Sequence[int] | Callable[[RequestSpec], Sequence[int]] = tuple(b"Hello from Baton!")
    """Output ids; the fake model's ids below 256 are bytes."""
    endless: bool = False
    """Repeat the ids until ``max_tokens``."""
    eos: bool = True
    """End with the model's own end id when the ids are used up, as a model does."""
    first_s: float = 0.0
    step_s: float = 0.0
    per_step: int = 1
    """Ids in one message."""
    refuse: Reason | None = None
    fail_after: int | None = None
    """Give the request up after that many ids, a turn of the loop later."""
    fail_with_ids: bool = False
    """In the same turn as the last of them instead."""
    stall_after: int | None = None
    """Send nothing more after that many ids."""
    silent: bool = False
    """The router does not answer at all."""
    cached_tokens: int = 0


@dataclass
class Work:
    """What the scripted cluster knows of one request."""

    spec: RequestSpec
    ids: list[int]
    epoch: int = 1
    sent: int = 0
    ended: Outcome | None = None
    steps_after_end: int = 0
    timer: asyncio.TimerHandle | None = None


class _Ledger:
    """Answers every transition at once, or not at all while ``away``."""

    def __init__(self, cluster: GatewayCluster) -> None:
        self._cluster = cluster
        self.ops: list[AnyOp] = []
        self.away = False

    def call(self, op: AnyOp, done: Callable[[Reply | Unavailable], None]) -> None:
        self.ops.append(op)
        answer: Reply | Unavailable = Done(epoch=1, state=RequestState.COMPLETED)
        if self.away:
            answer = Unavailable("away")
        elif isinstance(op, ResumableOp):
            answer = self._cluster.resumables.execute(op, int(BootClock().now() * 1000))
        asyncio.get_running_loop().call_soon(done, answer)
        self._cluster.changed()

    async def close(self) -> None:
        return


class _Transport:
    """Hands the gateway's messages to the script."""

    def __init__(self, cluster: GatewayCluster) -> None:
        self._cluster = cluster

    def send(self, peer: Peer, message: AnyMessage) -> None:
        # As it arrives: what the wire refuses must not pass here either.
        arrived = codec.decode(codec.encode(message))
        asyncio.get_running_loop().call_soon(self._cluster.on_message, peer, arrived)

    async def start(self, on_event: Callable[[Any], None]) -> None:
        return

    def dial(self, member: Member) -> None:
        return

    def hang_up(self, peer: Peer) -> None:
        return

    async def close(self) -> None:
        return


@dataclass
class GatewayCluster:
    """A running gateway and its scripted cluster."""

    folder: Path
    limits: Limits = field(default_factory=Limits)
    config: GatewayConfig = field(default_factory=lambda: GatewayConfig(port=0))
    mode: Mode = "split"
    script: Script = field(default_factory=Script)
    workers: tuple[tuple[Peer, Role], ...] = (
        (ROUTER, Role.ROUTER),
        (PREFILL, Role.PREFILL),
        (DECODE, Role.DECODE),
    )
    model_folder: Path | None = None
    """A prepared model; the fake one otherwise."""
    resumables: ResumableModel = field(default_factory=ResumableModel)
    """The ledger's; two gateways that share it are two of one cluster."""
    me: Peer = ME
    compat: str = "fake"

    def __post_init__(self) -> None:
        self.works: dict[str, Work] = {}
        self.log = io.BytesIO()
        self._condition = threading.Condition()
        self._failure: BaseException | None = None
        self.exits: list[tuple[int, str]] = []

    # --- life -----------------------------------------------------------------------------------

    def __enter__(self) -> GatewayCluster:
        folder = self.model_folder
        if folder is None:
            folder = self.folder / "model"
            write_fake_model(folder)
        self._text = load_model_text(folder)
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()
        self.call(self._start)
        if not self.config.uds:
            self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not self.config.uds:
                self.http.close()
            self.call(self._stop)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(DEADLINE_S)
            self.loop.close()
        assert not self._thread.is_alive()
        assert self._failure is None, self._failure

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _start(self) -> None:
        self.machine = GatewayMachine(self.me, self.limits, self.mode)
        self.metrics = Metrics(Role.GATEWAY, self.me.worker_id, "fake")
        log = logs.configure("info", stream=self.log)
        self.ledger = _Ledger(self)
        feed = lambda event: self.driver.feed(event)  # noqa: E731, PLW0108 - made below
        self.exchange = Exchange(feed, self._buffer(), self.limits.resume_bytes_max)
        self.driver = Driver(
            self.machine,
            transport=_Transport(self),
            ledger=self.ledger,
            metrics=self.metrics,
            log=log,
            clock=BootClock(),
            executors={
                **dict.fromkeys(
                    (Deliver, End, Ready, NotResumed, ReportsReady), self.exchange.execute
                ),
                LeaveClients: lambda _: self.server.leave(lambda: feed(ClientsLeft())),
            },
            end=lambda code, reason: self.exits.append((code, reason)),
            crash=self._crashed,
            check=True,
        )
        self.serving = Serving(
            me=self.me,
            compat=self.compat,
            text=self._text,
            model_name=self._text.info.name,
            config=self.config,
            limits=self.limits,
            machine=self.machine,
            exchange=self.exchange,
            metrics=self.metrics,
            log=log,
        )
        if hasattr(self.driver, "begin"):
            self.driver.begin()
        self.driver.feed(LeaseChanged(LeaseState.HELD))
        for peer, role in self.workers:
            self.driver.feed(PeerUp(member(peer, role)))
        self.driver.feed(Received(ROUTER, PoolStatus(serving=True)))
        self.server = GatewayServer(self.serving, self._crashed)
        await self.server.start()

    def _buffer(self) -> int:
        return self.limits.session_buffer_bytes_max

    async def _stop(self) -> None:
        for work in self.works.values():
            if work.timer is not None:
                work.timer.cancel()
        await self.server.close()
        self.driver.stop()

    def _crashed(self, error: BaseException, during: str) -> None:
        self._failure = error
        self.changed()

    # --- for tests, from their own thread -------------------------------------------------------

    def call(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` on the gateway's loop and return what it (or its coroutine) gives."""
        result: Future[Any] = Future()

        def run() -> None:
            try:
                value = function()
                if asyncio.iscoroutine(value):
                    task = self.loop.create_task(value)
                    task.add_done_callback(
                        lambda t: (
                            result.set_exception(t.exception())  # type: ignore[arg-type]
                            if t.exception()
                            else result.set_result(t.result())
                        )
                    )
                else:
                    result.set_result(value)
            except BaseException as error:
                result.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return result.result(DEADLINE_S)

    def wait(self, condition: Callable[[], T], timeout_s: float = DEADLINE_S) -> T:
        """Wait until ``condition`` holds; it is looked at whenever something happened."""
        with self._condition:
            value = self._condition.wait_for(condition, timeout_s)
        assert self._failure is None, self._failure
        assert value, "the awaited condition did not come about"
        return value

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
        """Wait for what nothing announces (a task's end, a socket's), turn by turn of the loop."""
        turn = threading.Event()
        until = self.loop.time() + timeout_s
        while not condition():
            assert self.loop.time() < until, "the awaited condition did not come about"
            turn.clear()
            self.loop.call_soon_threadsafe(self.loop.call_later, 0.01, turn.set)
            turn.wait(1)

    def feed(self, event: object) -> None:
        """Give the machine an event."""
        self.call(lambda: self.driver.feed(event))

    def lose(self, peer: Peer) -> None:
        """End the link to a peer."""
        self.feed(PeerLost(peer, "died"))

    def drain(self) -> None:
        """What SIGTERM does."""
        self.feed(DrainRequested())

    def restart(self) -> None:
        """What SIGUSR2 does."""
        self.feed(RestartRequested())

    @property
    def url(self) -> str:
        return self.server.address

    @property
    def port(self) -> int:
        assert self.server.socket is not None
        return int(self.server.socket.getsockname()[1])

    def tasks(self) -> int:
        """Number of tasks on the gateway's loop."""
        return int(self.call(lambda: len(asyncio.all_tasks(self.loop))))

    def only_work(self) -> Work:
        """The one request there was."""
        (work,) = self.works.values()
        return work

    def changed(self) -> None:
        with self._condition:
            self._condition.notify_all()

    # --- the script -----------------------------------------------------------------------------

    def receive(self, peer: Peer, message: AnyMessage) -> None:
        """Let the gateway receive a message."""
        self.driver.feed(Received(peer, message))

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case SubmitRequest():
                self._submitted(message.spec)
            case RequestEnded():
                work = self.works.get(message.request_id)
                if work is not None and work.ended is None:
                    work.ended = message.outcome
                    if work.timer is not None:
                        work.timer.cancel()
            case ReadReport():
                if peer != ROUTER or not self.script.silent:
                    body = Metrics(Role.DECODE, peer.worker_id, "fake").render()
                    self.receive(peer, Report(kind=message.kind, token=message.token, body=body))
            case _:
                pass
        self.changed()

    def _submitted(self, spec: RequestSpec) -> None:
        script = self.script
        ids = script.ids(spec) if callable(script.ids) else script.ids
        ids = list(ids)
        if script.endless and ids:
            ids = (ids * (spec.max_tokens // len(ids) + 1))[: spec.max_tokens]
        elif script.eos:
            ids.append(self._text.info.eos_ids[0])
        self.works[spec.request_id] = work = Work(spec, ids)
        if script.silent:
            return
        if script.refuse is not None:
            self.receive(
                ROUTER,
                RequestRefused(
                    request_id=spec.request_id,
                    reason=script.refuse,
                    message="refused by the script",
                    retry_after_ms=1500,
                ),
            )
            return
        self.receive(
            ROUTER,
            RequestPlaced(
                request_id=spec.request_id,
                epoch=1,
                decode=DECODE,
                prefill=PREFILL if self.mode == "split" else None,
            ),
        )
        work.timer = self.loop.call_later(script.first_s, self.step, work)

    def step(self, work: Work) -> None:
        """Send the next ids of a request, and plan the step after."""
        script, spec = self.script, work.spec
        if work.ended is not None:
            return
        if script.fail_after is not None and work.sent >= script.fail_after:
            outcome = Outcome(
                Ending.FAILED, reason=Reason.WORKER_LOST, message="the script gave it up"
            )
            self.receive(
                ROUTER, RequestFailed(request_id=spec.request_id, epoch=1, outcome=outcome)
            )
            return
        if script.stall_after is not None and work.sent >= script.stall_after:
            return
        count = script.per_step
        if script.fail_after is not None:
            count = min(count, script.fail_after - work.sent)
        ids = work.ids[work.sent : work.sent + count]
        if not ids:
            return
        run, finish = self._run_of(work, ids)
        self.receive(DECODE, TokenChunk(runs=(run,)))
        work.sent += len(run.ids)
        self.changed()
        if finish is None and script.fail_with_ids and work.sent == script.fail_after:
            self.step(work)
        elif finish is None:
            work.timer = self.loop.call_later(script.step_s, self.step, work)

    def _run_of(self, work: Work, ids: list[int]) -> tuple[TokenRun, FinishReason | None]:
        spec = work.spec
        taken: list[int] = []
        finish: FinishReason | None = None
        for token_id in ids:
            taken.append(token_id)
            index = work.sent + len(taken) - 1
            finish = finish_of(spec.sampling, spec.max_tokens, index, token_id)
            if finish is not None:
                break
        logprobs: tuple[TokenLogprob, ...] = ()
        if (count := spec.sampling.logprobs) >= 0:
            logprobs = tuple(
                TokenLogprob(
                    token_id=i,
                    logprob=-0.5,
                    top=tuple(((i + k) % 256, -0.5 - k) for k in range(count)),
                )
                for i in taken
            )
        run = TokenRun(
            request_id=spec.request_id,
            epoch=work.epoch,
            index=work.sent,
            ids=tuple(taken),
            logprobs=logprobs,
            finish=finish,
            cached_tokens=self.script.cached_tokens if work.sent == 0 else 0,
        )
        return run, finish

    def fence(self, request_id: str, epoch: int) -> None:
        """Let the router fence a request."""
        self.call(lambda: self.receive(ROUTER, FenceRequest(request_id=request_id, epoch=epoch)))


def prompt_ids(spec: RequestSpec) -> list[int]:
    """Return the prompt's ids."""
    return array("I", spec.prompt).tolist()
