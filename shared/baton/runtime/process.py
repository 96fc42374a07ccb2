"""Where a Baton process begins: ``python -m baton.<package> --worker-id ID [--config FILE]``.

Decides what comes before everything else: the parent is watched, threads are set, and only then is
anything heavy imported. So this module imports next to nothing, and a service's ``__main__`` hands
over functions that import the service when they are called. The process becomes the guard of its
worker (``baton.runtime.guard``); :func:`live` is the worker's life.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from baton.core.ids import Role, WorkerRole
from baton.runtime.parent import Parent, watch_parent
from baton.runtime.prctl import set_name

if TYPE_CHECKING:
    from baton.runtime.cores import CorePlan
    from baton.runtime.pulse import Pulse
    from baton.runtime.service import Build, ServiceCode
    from baton.runtime.settings import Config

_STOPS = (signal.SIGTERM, signal.SIGINT)
_WORKER_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")


Load = Callable[[], "ServiceCode"]
"""Imports the code of a service."""


def main(loads: Mapping[Role, Load], argv: Sequence[str] | None = None) -> NoReturn:
    """Run the guard of a process that does the work of one of these roles, and of another one when
    it is told so; exit with the guard's code."""
    arguments = _arguments(loads, argv)
    if not arguments.adopt:
        # Until a worker runs there is nothing to put in order.
        for number in _STOPS:
            signal.signal(number, _leave)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)  # a former guard here had them blocked
    parent = watch_parent(arguments.worker_id)
    set_name(f"guard {arguments.worker_id}")
    faulthandler.enable()
    os.umask(0o077)
    code = _guard(arguments, parent, loads)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _guard(arguments: argparse.Namespace, parent: Parent, loads: Mapping[Role, Load]) -> int:
    """Read the settings, load what is heavy, guard; return the exit code."""
    from baton.runtime import config as configuration
    from baton.runtime import cores, dirs, roles
    from baton.runtime.guarding import YIELD_S, GuardMachine
    from baton.runtime.yielding import Yielding

    worker_id: str = arguments.worker_id
    role = Role(arguments.role)
    usable = os.sched_getaffinity(0)
    try:
        path = configuration.config_path(arguments.config, os.environ)
        config = configuration.load(path, os.environ)
        plan = cores.plan_cores(config)
    except configuration.ConfigError as error:
        return _refuse(worker_id, error)
    placement = plan.workers.get(worker_id, plan.rest)
    cores.set_threads(placement)
    start = Yielding(plan.rest)
    alone = parent.is_young()
    if not alone:
        start.end_after(YIELD_S)
        start.begin()

    import uvloop  # noqa: F401 - every worker needs it

    from baton.runtime import logs
    from baton.runtime.clock import BootClock
    from baton.runtime.guard import Adopted, Guard
    from baton.runtime.notify import Notifier
    from baton.runtime.service import EX_AGAIN, EX_CONFIG
    from baton.runtime.shell import LOADING_S, stop_s

    notifier = Notifier()
    notifier.loading(LOADING_S, "loading")
    log = logs.configure(
        config.cluster.log_level, bound={"worker": worker_id, "role": role.value, "part": "guard"}
    )
    services = {role: load() for role, load in loads.items()}
    try:
        # All that one process can be is made of the same.
        preloaded = services[role].preload(config, log)
        kept_in = dirs.run_dir(config)
    except configuration.ConfigError as error:
        return _refuse(worker_id, error)

    def work(pulse: Pulse, yields: bool) -> int:
        duty = roles.first_role(config.cluster.mode, role)
        if duty is not None:
            duty = roles.kept_role(kept_in, worker_id) or duty
        now = role if duty is None else duty.process
        code = live(
            now,
            worker_id,
            config,
            services[now].build,
            plan=plan,
            pulse=pulse,
            worker_role=duty,
            preloaded=preloaded,
            yields=yields,
        )
        if code == EX_CONFIG and now is not role:
            # It cannot be that here (no room for an arena): rather what it was than nothing.
            roles.forget_role(kept_in, worker_id)
            return EX_AGAIN
        return code

    guard = Guard(
        worker_id,
        GuardMachine(config.limits, kill=config.fence.kill),
        work,
        parent=parent,
        placement=placement,
        rest=plan.rest,
        start=start,
        notifier=notifier,
        stop_s=stop_s(config.limits),
        log=log,
        clock=BootClock(),
        usable=usable,
        adopted=Adopted.parse(arguments.adopt) if arguments.adopt else None,
        alone=alone,
    )
    return guard.run()


def _refuse(worker_id: str, error: Exception) -> int:
    from baton.runtime.service import EX_CONFIG

    sys.stderr.write(f"baton {worker_id}: {error}\n")
    return EX_CONFIG


def live(
    role: Role,
    worker_id: str,
    config: Config,
    build: Build,
    *,
    plan: CorePlan,
    pulse: Pulse,
    worker_role: WorkerRole | None = None,
    preloaded: Any = None,
    yields: bool = False,
) -> int:
    """Be the worker; return its exit code."""
    import uvloop

    from baton.runtime.shell import Shell

    shell = Shell(
        role,
        worker_id,
        config,
        build=build,
        plan=plan,
        pulse=pulse,
        worker_role=worker_role,
        preloaded=preloaded,
        yields=yields,
    )
    try:
        return uvloop.run(shell.run())
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(0)


def _arguments(loads: Mapping[Role, Load], argv: Sequence[str] | None) -> argparse.Namespace:
    names = [role.value for role in loads]
    parser = argparse.ArgumentParser(
        description=f"One {' or '.join(names)} process of a Baton cluster (usually started by "
        "`baton up`).",
    )
    parser.add_argument("--worker-id", required=True, type=_worker_id, help="such as decode-0")
    if names[1:]:
        what = "what it is first; it can be told another role while it serves"
        parser.add_argument("--role", required=True, choices=names, help=what)
    else:
        parser.set_defaults(role=names[0])
    parser.add_argument("--config", type=Path, default=None, help="the cluster's TOML file")
    # One guard tells the next, see baton.runtime.guard.
    parser.add_argument("--adopt", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _worker_id(text: str) -> str:
    if not _WORKER_ID.fullmatch(text):
        raise argparse.ArgumentTypeError("small letters, digits and dashes, at most 48")
    return text
