"""Where a Baton process begins: ``python -m baton.<role> --worker-id ID [--config FILE]``.

Decides what comes before everything else: the parent is watched, cores and threads are set, and
only then is anything heavy imported. So this module imports next to nothing, and a service's
``__main__`` hands over a function that imports the service when it is called.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from baton.core.ids import Role
from baton.runtime.parent import ParentWatch, watch_parent

if TYPE_CHECKING:
    from baton.runtime.service import Build

_WORKER_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")


def main(role: Role, build: Build, argv: Sequence[str] | None = None) -> NoReturn:
    """Run the process; exit with its code."""
    arguments = _arguments(role, argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Until the shell takes signals over there is nothing to put in order.
        signal.signal(number, _leave)
    watch = watch_parent(arguments.worker_id)
    faulthandler.enable()
    os.umask(0o077)
    code = run(role, arguments.worker_id, arguments.config, build, watch)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: native threads of a numeric library may still be at work, and taking the
    # interpreter apart under them is how a clean end becomes a segmentation fault.
    os._exit(code)


def run(
    role: Role,
    worker_id: str,
    config_path: Path | None,
    build: Build,
    watch: ParentWatch | None = None,
) -> int:
    """Read the settings, take the planned cores, live; return the exit code."""
    from baton.runtime import config as configuration
    from baton.runtime import cores
    from baton.runtime.service import EX_CONFIG

    try:
        path = configuration.config_path(config_path, os.environ)
        config = configuration.load(path, os.environ)
        plan = cores.plan_cores(config)
    except configuration.ConfigError as error:
        sys.stderr.write(f"baton {worker_id}: {error}\n")
        return EX_CONFIG
    placement = plan.workers.get(worker_id, plan.rest)
    cores.apply(placement)

    import uvloop

    from baton.runtime.shell import Shell

    shell = Shell(
        role, worker_id, config, build=build, placement=placement, plan=plan.why, watch=watch
    )
    try:
        return uvloop.run(shell.run())
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(0)


def _arguments(role: Role, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m baton.{role.value}",
        description=f"One {role.value} process of a Baton cluster (usually started by `baton up`).",
    )
    parser.add_argument("--worker-id", required=True, type=_worker_id, help="such as decode-0")
    parser.add_argument("--config", type=Path, default=None, help="the cluster's TOML file")
    return parser.parse_args(argv)


def _worker_id(text: str) -> str:
    if not _WORKER_ID.fullmatch(text):
        raise argparse.ArgumentTypeError("small letters, digits and dashes, at most 48")
    return text
