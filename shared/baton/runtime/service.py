"""What a service gives to the process shell, and what it gets.

Decides the shape of that bargain only; ``baton.runtime.shell`` keeps it.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import orjson

if TYPE_CHECKING:
    # A service's __main__ imports this module before anything else is allowed to be loaded.
    import asyncio
    from pathlib import Path

    from baton.core.ids import Compat, Member, Peer, Role, WorkerRole
    from baton.ports.clock import Clock
    from baton.ports.ledger import Ledger
    from baton.ports.transport import Transport
    from baton.runtime.cores import Placement
    from baton.runtime.driver import Crash, Executor
    from baton.runtime.logs import FilteringBoundLogger
    from baton.runtime.metrics import Metrics
    from baton.runtime.settings import Config
    from baton.wire.holdings import Holdings

EX_OK = 0
EX_BUG = 70
EX_AGAIN = 75
EX_CONFIG = 78
#: Of a frame, for all that is not the report's body.
REPORT_MARGIN = 1_024


class StartFailed(Exception):
    """The process cannot start; the text is for people.

    ``permanent``: a restart cannot mend it (exit code 78, the supervisor leaves it down);
    otherwise it is tried again (75).
    """

    def __init__(self, text: str, *, permanent: bool) -> None:
        super().__init__(text)
        self.permanent = permanent


class ServiceMachine(Protocol):
    """A machine that can also be looked into."""

    def handle(self, event: Any, now: float) -> Any: ...

    def deadline(self) -> float | None: ...

    def check(self) -> None: ...

    def status(self) -> Mapping[str, object]:
        """Return what ``baton status`` shows: JSON-ready, never prompts or ids."""
        ...

    def holdings(self) -> Holdings:
        """Return everything held for requests, which ``baton audit`` compares."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """Return gauges of the catalogue, as ``Metrics.gauges`` takes them."""
        ...


@dataclass
class Context:
    """What a service is built with. The second half is there from ``on_start`` on."""

    config: Config
    role: Role
    me: Peer
    run_dir: Path
    placement: Placement
    """Cores (already pinned) and compute threads of this process."""
    clock: Clock
    loop: asyncio.AbstractEventLoop
    log: FilteringBoundLogger
    feed: Callable[[object], None]
    """Give the machine an event; on the loop's thread, from ``on_start`` on."""
    crash: Crash
    """Log an error that is a bug, and end the process with status 70."""
    end: Callable[[int, str], None]
    """End the process in good order, with that code."""
    worker_role: WorkerRole | None = None
    """What a prefill or decode worker is there for."""
    preloaded: Any = None
    """What the service's ``preload`` returned in the guard."""
    member: Member = field(init=False)
    metrics: Metrics = field(init=False)
    transport: Transport = field(init=False)
    ledger: Ledger = field(init=False)


async def _nothing() -> None:
    return


@dataclass(frozen=True)
class Service:
    """What a service is made of."""

    machine: ServiceMachine
    executors: Mapping[type, Executor] = field(default_factory=dict)
    """For the service's own commands; called on the loop's thread, must not block. Called as soon
    as links are open, which is before ``on_start``."""
    compat: Compat | None = None
    """What peers must agree on; goes into this process's :class:`Member`."""
    model_name: str = ""
    """Label of all metrics."""
    on_start: Callable[[], Awaitable[None]] = _nothing
    """The transport is up and the lease held: open for business. Ready when it returns."""
    on_stop: Callable[[], Awaitable[None]] = _nothing
    """The lease is given back, links are still open; at most ``STOP_S``."""
    gauges: Mapping[str, float] = field(default_factory=dict)
    """Those that the machine cannot know and that stay as they are from the start."""
    facts: Callable[[], Mapping[str, object]] = dict
    """More for ``baton status``: arena, addresses."""


Build = Callable[[Context], Service]


class ServiceCode(Protocol):
    """What a service's package offers the process: its module ``service``."""

    def preload(self, config: Config, log: FilteringBoundLogger, /) -> Any:
        """Load, in the guard, what every incarnation needs and none changes.

        It starts no thread and opens nothing that two incarnations must not share. What it returns
        is ``Context.preloaded``; a failure of which people must hear is returned as well, and
        raised by ``build``: the worker is who tells.
        """
        ...

    def build(self, context: Context, /) -> Service:
        """Make the service, on the loop's thread, before anybody knows of this process; may block.

        Raises:
            StartFailed, ConfigError: with a text for people.
        """
        ...


def status_report(context: Context, service: Service, *, ready: bool, uptime_s: float) -> bytes:
    """Return the JSON body of a ``status`` report: the process's facts, then its machine's."""
    me, placement = context.me, context.placement
    return orjson.dumps(
        {
            "worker_id": me.worker_id,
            "role": context.role,
            "incarnation": str(me.incarnation),
            "pid": os.getpid(),
            "ready": ready,
            "uptime_s": round(uptime_s, 3),
            "cores": list(placement.cores),
            "threads": placement.threads,
            **service.facts(),
            **service.machine.status(),
        },
        default=str,
        option=orjson.OPT_NON_STR_KEYS,
    )


def fitting(body: bytes, kind: str, frame_bytes_max: int) -> bytes:
    """Return a report as it is sent: one that is too large for a message says so, for nobody's
    question may end a process."""
    if len(body) <= frame_bytes_max - REPORT_MARGIN:
        return body
    text = f"its {kind} report has {len(body)} bytes: raise limits.frame_bytes_max"
    return orjson.dumps({"error": text})
