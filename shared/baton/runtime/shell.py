"""The life of a Baton process around its machine: start, lease, links, reports, signals, end.

Decides the order of starting and stopping, and the exit code: 0 when somebody asked, 75 for what
a restart may mend, 78 for what it cannot, 70 for a bug. What a service does in between is its
machine's business.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from types import FrameType
from typing import Any

import msgspec
import orjson

from baton.core.events import DrainRequested, PromptsTaken, RestartRequested, RoleLeft
from baton.core.ids import Member, Peer, Role, WorkerRole
from baton.core.limits import Limits
from baton.ledger.connection import LedgerUnfit, LedgerUnreachable
from baton.ledger.redis_ledger import RedisLedger
from baton.ports.channel import ArenaInUse, ArenaTooSmall
from baton.ports.driving import EXIT_ROLE
from baton.ports.lease import LeaseGivenUp, LeaseKeeper
from baton.ports.transport import EndpointInUse
from baton.runtime import logs, slices, yielding
from baton.runtime.clock import BootClock
from baton.runtime.config import ConfigError
from baton.runtime.cores import CorePlan
from baton.runtime.dirs import endpoint, ledger_url, run_dir
from baton.runtime.driver import Driver
from baton.runtime.guarding import ORPHANED, TRACE
from baton.runtime.membership import Membership, count_frame
from baton.runtime.metrics import Metrics
from baton.runtime.pulse import Pulse
from baton.runtime.service import (
    EX_AGAIN,
    EX_BUG,
    EX_CONFIG,
    EX_OK,
    Build,
    Context,
    Service,
    StartFailed,
    fitting,
    status_report,
)
from baton.runtime.settings import Config
from baton.transport import host
from baton.transport.zmq_transport import ZmqTransport

#: How long the ledger may take to appear when everything starts at once.
LEDGER_PATIENCE_S = 15.0
#: The start of a process may take this long before systemd gives up on it.
LOADING_S = 600.0
#: A machine's drain ends by itself at ``drain_ms``; this is the backstop.
DRAIN_MARGIN_S = 2.0
#: Each part of an orderly end is given this long.
STOP_S = 2.0
#: How often the event loop shows its guard that it runs.
PULSE_S = 0.1
#: How often it looks whether it is cut off.
LOOK_AROUND_S = 0.5


def stop_s(limits: Limits) -> float:
    """Return how long an orderly end may take, drain included."""
    return limits.drain_ms / 1000 + DRAIN_MARGIN_S + 3 * STOP_S


class Shell:
    """One process."""

    def __init__(
        self,
        role: Role,
        worker_id: str,
        config: Config,
        *,
        build: Build,
        plan: CorePlan,
        pulse: Pulse,
        worker_role: WorkerRole | None,
        preloaded: Any,
        yields: bool,
    ) -> None:
        """``preloaded`` is the guard's; ``yields``: the cores and class of a start until ready."""
        self._config = config
        self._build = build
        self._pulse = pulse
        self._preloaded = preloaded
        self._yields = yields
        self._clock = BootClock()
        self._role = role
        self._worker_role = worker_role
        self._me = Peer(worker_id, host.new_incarnation())
        self._placement = plan.workers.get(worker_id, plan.rest)
        self._plan = plan.why
        self._log = logs.configure(
            config.cluster.log_level,
            bound={
                "worker": worker_id,
                "role": role.value,
                "incarnation": str(self._me.incarnation),
            },
        )
        self._ready = False
        self._signals: set[int] = set()
        self._service: Service
        self._driver: Driver
        self._keeper: Driver
        self._ended: asyncio.Future[int]
        self._held: asyncio.Future[None]

    async def run(self) -> int:
        """Live; return the exit code."""
        self._loop = loop = asyncio.get_running_loop()
        self._started_at = self._clock.now()
        self._ended, self._held = loop.create_future(), loop.create_future()
        loop.set_exception_handler(self._stray_exception)
        # Whoever is about to kill a process that stands still asks first where it stands.
        faulthandler.register(TRACE, all_threads=True)
        try:
            context = self._prepare(loop)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled, number)
            loop.add_signal_handler(signal.SIGUSR2, self._restart_asked)
            loop.add_signal_handler(ORPHANED, self._orphaned)
            await self._start_or_end(context)
            code = await self._ended
        except Exception as error:  # the crash barrier of the start; known errors are told apart
            code = self._start_failed(error)
        finally:
            self._ready = False
        await self._stop()
        return code

    # --- the start ------------------------------------------------------------------------------

    def _prepare(self, loop: asyncio.AbstractEventLoop) -> Context:
        """Build the service; nobody knows of this process yet, so a signal just ends it."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
        self._log.info(
            "process_starting",
            pid=os.getpid(),
            cores=list(self._placement.cores),
            threads=self._placement.threads,
            plan=self._plan,
        )
        self._run_dir = run_dir(self._config)
        context = Context(
            config=self._config,
            role=self._role,
            me=self._me,
            run_dir=self._run_dir,
            placement=self._placement,
            worker_role=self._worker_role,
            clock=self._clock,
            loop=loop,
            log=self._log,
            feed=self._feed,
            crash=self._crash,
            end=self._end,
            preloaded=self._preloaded,
        )
        self._service = self._build(context)
        return context

    async def _start_or_end(self, context: Context) -> None:
        # Kept and looked at: nothing of it is lost.
        start = asyncio.ensure_future(self._start(context))  # noqa: TID251
        both: set[asyncio.Future[Any]] = {start, self._ended}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            return
        start.cancel()
        await asyncio.wait({start})

    async def _start(self, context: Context) -> None:
        service, limits = self._service, self._config.limits
        context.metrics = Metrics(self._role, self._me.worker_id, service.model_name)
        context.metrics.gauges(
            {
                "engine_threads": self._placement.threads,
                "cores": len(self._placement.cores or os.sched_getaffinity(0)),
                **service.gauges,
            }
        )
        self._context = context
        self._membership = Membership(
            context, self._report, self._lease_held, self._busy, self._become
        )
        context.member = Member(
            peer=self._me,
            role=self._role,
            endpoint=endpoint(self._run_dir, self._me.worker_id),
            pid=os.getpid(),
            boot_id=host.boot_id(),
            compat=service.compat,
        )
        bug = lambda error: self._crash(error, "an adapter")  # noqa: E731
        url = ledger_url(self._config, self._run_dir)
        # Before ZeroMQ starts its threads and after the engine has started its own.
        slices.wake_first()
        ledger = RedisLedger(url, self._config.ledger.pool, limits, bug)
        transport = ZmqTransport(
            context.member, limits, lambda word: count_frame(context.metrics, word), bug
        )
        context.ledger, context.transport = ledger, transport
        self._transport, self._sent_told = transport, 0
        self._driver = self._make_driver(service.machine, service.executors)
        await ledger.start(LEDGER_PATIENCE_S)
        await transport.start(self._membership.on_transport)
        self._driver.begin()
        context.member = transport.member
        keeper = LeaseKeeper(context.member, limits, self._clock.now())
        self._keeper = self._make_driver(keeper, self._membership.executors)
        self._keeper.begin()
        await self._first_lease()
        await service.on_start()
        # What a numeric library brought in lives as long as the process: a full collection that
        # looks at all of it stops every stream for a tenth of a second and frees nothing.
        gc.collect()
        gc.freeze()
        self._ready = True
        if self._yields:
            yielding.end(os.getpid(), self._placement)
        self._beat()
        self._look_around()
        self._pulse.ready()
        seconds = round(self._clock.now() - self._started_at, 3)
        self._log.info("process_ready", seconds=seconds)

    def _make_driver(
        self, machine: object, executors: Mapping[type, Callable[..., None]]
    ) -> Driver:
        context = self._context
        return Driver(
            machine,  # type: ignore[arg-type]
            transport=context.transport,
            ledger=context.ledger,
            metrics=context.metrics,
            log=self._log,
            clock=self._clock,
            executors=executors,
            end=self._end,
            crash=self._crash,
        )

    async def _first_lease(self) -> None:
        try:
            await asyncio.wait_for(self._held, LEDGER_PATIENCE_S)
        except TimeoutError:
            text = f"no lease from the ledger within {LEDGER_PATIENCE_S:g} s"
            raise StartFailed(text, permanent=False) from None

    def _start_failed(self, error: Exception) -> int:
        if not isinstance(error, ConfigError | StartFailed | LedgerUnfit | OSError):
            self._crash(error, "start")
        permanent = isinstance(error, ConfigError | LedgerUnfit | ArenaTooSmall) or (
            isinstance(error, StartFailed) and error.permanent
        )
        code = EX_CONFIG if permanent else EX_AGAIN
        known = not isinstance(error, OSError) or isinstance(error, _TOLD)
        self._log.error(
            "start_failed", reason=str(error), code=code, exc_info=None if known else error
        )
        return code

    # --- what happens meanwhile -----------------------------------------------------------------

    def _feed(self, event: object) -> None:
        self._driver.feed(event)

    def _lease_held(self) -> None:
        if not self._held.done():
            self._held.set_result(None)

    def _beat(self) -> None:
        """Show the guard that the loop runs, until the process ends."""
        self._pulse.beat(self._clock.now())
        self._loop.call_later(PULSE_S, self._beat)

    def _look_around(self) -> None:
        if self._ready:
            self._membership.look_around()
            self._loop.call_later(LOOK_AROUND_S, self._look_around)

    def _report(self, kind: str) -> bytes:
        return fitting(self._told(kind), kind, self._config.limits.frame_bytes_max)

    def _told(self, kind: str) -> bytes:
        context, machine = self._context, self._service.machine
        if kind == "metrics":
            context.metrics.gauges(machine.gauges())
            sent = self._transport.sent_bytes
            context.metrics.measure("link_sent_bytes_total", sent - self._sent_told)
            self._sent_told = sent
            return context.metrics.render()
        if kind == "status":
            uptime_s = self._clock.now() - self._started_at
            return status_report(context, self._service, ready=self._ready, uptime_s=uptime_s)
        if kind == "holdings":
            return msgspec.json.encode(machine.holdings())
        return orjson.dumps({"error": f"unknown report {kind[:40]!r}"})

    def _busy(self) -> str:
        """Say why this process can be told nothing new, if it is so."""
        if self._signals or not self._ready:
            return f"{self._me.worker_id} is {'ending' if self._ready else 'starting'}"
        return ""

    def _become(self, event: PromptsTaken | RoleLeft) -> None:
        if isinstance(event, RoleLeft):
            limit_s = self._config.limits.drain_ms / 1000 + DRAIN_MARGIN_S
            self._loop.call_later(limit_s, self._left_too_late)
        # After the answer to whoever asked for it: who has nothing to do ends at once.
        self._loop.call_soon(self._feed, event)

    # --- the end --------------------------------------------------------------------------------

    def _left_too_late(self) -> None:
        self._end(EX_OK if self._signals else EXIT_ROLE, "leaving the role took too long")

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if number in self._signals or not self._ready:
            self._end(EX_OK, f"{name} {'again' if number in self._signals else 'during start'}")
            return
        first = self._signals <= {signal.SIGUSR2}
        self._signals.add(number)
        if first:
            limit_s = self._config.limits.drain_ms / 1000 + DRAIN_MARGIN_S
            self._log.info("drain_requested", signal=name)
            self._loop.call_later(limit_s, self._end, EX_OK, "the drain took too long")
            self._driver.feed(DrainRequested())

    def _restart_asked(self) -> None:
        if not self._ready:
            self._end(EX_AGAIN, "a restart was asked for during the start")
        elif not self._signals and not self._membership.roles.leaving:
            self._signals.add(signal.SIGUSR2)
            limits = self._config.limits
            limit_s = max(limits.request_deadline_ms, limits.restart_ms) / 1000 + DRAIN_MARGIN_S
            self._log.info("restart_requested")
            self._loop.call_later(limit_s, self._end, EX_AGAIN, "the restart took too long")
            self._driver.feed(RestartRequested())

    def _orphaned(self) -> None:
        self._end(EX_AGAIN, "the process that started this one is gone")

    def _end(self, code: int, reason: str) -> None:
        if not self._ended.done():
            self._log.info("process_ending", code=code, reason=reason)
            self._ended.set_result(code)

    async def _stop(self) -> None:
        """Give the lease back, stop the service, say goodbye; each part bounded."""
        if hasattr(self, "_driver"):
            self._driver.stop()
        if hasattr(self, "_keeper"):
            self._keeper.feed(LeaseGivenUp())
            self._keeper.stop()
        if hasattr(self, "_service"):
            await self._bounded(self._service.on_stop(), "service")
        if hasattr(self, "_driver"):
            await self._bounded(self._context.transport.close(), "transport")
            await self._bounded(self._context.ledger.close(), "ledger")

    async def _bounded(self, part: Awaitable[None], name: str) -> None:
        try:
            await asyncio.wait_for(part, STOP_S)
        except TimeoutError:
            self._log.warning("stop_incomplete", part=name)
        except Exception as error:  # the crash barrier of the end
            self._crash(error, f"stopping the {name}")

    # --- the crash barrier ----------------------------------------------------------------------

    def _crash(self, error: BaseException, during: str) -> None:
        """End the process at once: whatever state it holds is not to be trusted. It ends also where
        its log is gone, or the error cannot be written."""
        try:
            self._log.critical("process_crashed", during=during, exc_info=error)
        finally:
            os._exit(EX_BUG)

    def _stray_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Take what nobody awaited. Troubles of sockets are no bugs (out of descriptors)."""
        error = context.get("exception")
        if isinstance(error, BaseException) and not isinstance(error, OSError):
            self._crash(error, str(context.get("message")))
        self._log.warning("loop_trouble", detail=context.get("message"), error=str(error))


#: Their texts say all; other troubles with the system are logged with their trace.
_TOLD = (EndpointInUse, ArenaInUse, ArenaTooSmall, LedgerUnreachable)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EX_OK)
