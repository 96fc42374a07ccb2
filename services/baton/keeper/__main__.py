"""``python -m baton.keeper [--config FILE]``: keeps a host's arenas on a device."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from baton.keeper.server import KeeperInUse, KeeperServer
from baton.runtime import config as configuration
from baton.runtime import dirs, logs
from baton.runtime.prctl import set_name
from baton.runtime.service import EX_AGAIN, EX_CONFIG, EX_OK


class _Stopped(Exception):
    """A signal asked for the end."""


def main() -> int:
    """Serve until a signal; return the exit code."""
    parser = argparse.ArgumentParser(description="Keeps arenas on a device (see `baton up`).")
    parser.add_argument("--config", type=Path, default=None, help="the cluster's TOML file")
    arguments = parser.parse_args()
    os.umask(0o077)
    set_name("keeper")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        path = configuration.config_path(arguments.config, os.environ)
        config = configuration.load(path, os.environ)
        log = logs.configure(config.cluster.log_level, bound={"worker": "keeper", "role": "keeper"})
        server = KeeperServer(dirs.run_dir(config), log)
    except configuration.ConfigError as error:
        sys.stderr.write(f"baton keeper: {error}\n")
        return EX_CONFIG
    except KeeperInUse as error:
        sys.stderr.write(f"baton keeper: {error}\n")
        return EX_AGAIN
    log.info("keeper_ready")
    try:
        while True:
            server.serve_one()
    except _Stopped:
        server.close()
    return EX_OK


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped


if __name__ == "__main__":
    sys.exit(main())
