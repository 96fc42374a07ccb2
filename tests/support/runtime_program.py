"""A whole Baton process around a small scripted machine: what tests of the shell start and kill.

``python -m support.runtime_program ROLE --worker-id ID --config FILE``; ``$TEST_BEHAVIOUR`` says
what it does wrong. With ``$TEST_ALONE`` it is a worker without a guard: nobody starts it again, and
its exit code is the process's.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.core.ids import Role
from baton.runtime.process import live, main
from baton.wire.holdings import Holdings

if TYPE_CHECKING:
    from baton.runtime.logs import FilteringBoundLogger
    from baton.runtime.service import Context, Service, ServiceCode
    from baton.runtime.settings import Config

BEHAVIOUR = os.environ.get("TEST_BEHAVIOUR", "")
ONCE = os.environ.get("TEST_ONCE", "")
"""A file that is removed by the first incarnation that misbehaves."""


def _spin_once() -> None:
    Path(ONCE).unlink()
    while True:
        pass


class Machine:
    """Knows its peers; drains at once, unless told to hang."""

    def __init__(self) -> None:
        from baton.runtime.clock import BootClock

        self.made = BootClock().now()
        self.peers: list[str] = []
        self.draining = False

    def handle(self, event: object, now: float) -> Sequence[object]:
        from baton.core.events import DrainRequested, RestartRequested, TimePassed
        from baton.ports.driving import Exit
        from baton.ports.transport import PeerLost, PeerUp

        match event:
            case DrainRequested():
                self.draining = True
                return [] if BEHAVIOUR == "never_drained" else [Exit(0, "drained")]
            case RestartRequested():
                return [Exit(75, "restart")]
            case TimePassed():
                _spin_once()
            case PeerUp(member):
                if BEHAVIOUR == "bug":
                    raise KeyError("a bug in the machine")
                self.peers.append(str(member.peer))
            case PeerLost(peer, _):
                self.peers.remove(str(peer))
        return []

    def deadline(self) -> float | None:
        # Not before it is ready: until then a loop may stand still.
        return self.made + 1.0 if BEHAVIOUR == "spin" and Path(ONCE).exists() else None

    def check(self) -> None:
        assert len(set(self.peers)) == len(self.peers)

    def status(self) -> Mapping[str, object]:
        return {"peers": self.peers, "draining": self.draining}

    def holdings(self) -> Holdings:
        return Holdings()

    def gauges(self) -> Mapping[str, float]:
        return {"num_requests_running": float(len(self.peers))}


def preload(config: Config, log: FilteringBoundLogger) -> int:
    """Return what a worker can tell its guard by."""
    if BEHAVIOUR == "slow_preload":
        log.info("preloading")
        time.sleep(60)
    log.info("preloaded")
    return os.getpid()


def build(context: Context) -> Service:
    """Make the service, or fail in the way that was asked for."""
    from baton.runtime.service import Service, StartFailed

    match BEHAVIOUR:
        case "no_model":
            raise StartFailed("model folder /m: no such folder", permanent=True)
        case "not_yet":
            raise StartFailed("the arena is in use", permanent=False)
        case "build_bug":
            raise KeyError("a bug in the wiring")
        case "slow":
            sys.stderr.write("building\n")
            sys.stderr.flush()
            time.sleep(60)

    async def stop() -> None:
        if BEHAVIOUR == "stop_bug":
            raise KeyError("a bug at the end")
        if BEHAVIOUR == "stop_hangs":
            await asyncio.Event().wait()

    return Service(
        Machine(), model_name="tiny", on_stop=stop, facts=lambda: {"guard": context.preloaded}
    )


def _code() -> ServiceCode:
    return sys.modules[__name__]  # type: ignore[return-value]


def _alone(role: str, _: str, worker_id: str, __: str, config_path: str) -> int:
    from baton.runtime.config import load
    from baton.runtime.cores import plan_cores
    from baton.runtime.pulse import Pulse

    config = load(Path(config_path), os.environ)
    return live(Role(role), worker_id, config, build, plan=plan_cores(config), pulse=Pulse())


if __name__ == "__main__":
    if os.environ.get("TEST_ALONE"):
        os._exit(_alone(*sys.argv[1:]))
    main({Role(sys.argv[1]): _code}, sys.argv[2:])
