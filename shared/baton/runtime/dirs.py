"""Where a cluster keeps its sockets, logs and prepared models.

Decides paths, and that nobody else can write there: a run directory that is a symbolic link,
belongs to somebody else or is open to others is refused, never repaired.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from baton.runtime.config import DEFAULT_FILE, ConfigError, worker_ids
from baton.runtime.settings import Config

#: A Unix socket's name ends at 107 bytes; supervisor binds ``<path>.<pid>`` first, up to 8 more.
SOCKET_PATH_MAX = 99

LEDGER_SOCKET = "ledger.sock"
SUPERVISOR_SOCKET = "supervisor.sock"


def run_dir_path(config: Config, environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the run directory is, without touching the disk beyond looking.

    Two checkouts side by side, or two configuration files, get two directories. A ``baton.toml``
    stands for its folder: who writes one while a cluster runs there must still find the cluster.

    Raises:
        ConfigError: a socket in it would have too long a name.
    """
    if config.cluster.run_dir:
        path = Path(config.cluster.run_dir)
        _check_length(config, path)
        return path
    anchor = config.path or Path.cwd()
    if config.path is not None and config.path.name == DEFAULT_FILE:
        anchor = config.path.parent
    digest = hashlib.sha256(f"{anchor.resolve()}\0{config.cluster.name}".encode()).hexdigest()[:8]
    runtime = Path(environ.get("XDG_RUNTIME_DIR", ""))
    path = runtime / f"baton-{digest}"
    if (
        not runtime.is_absolute()
        or not _is_private(runtime)
        or _longest(config, path) > SOCKET_PATH_MAX
    ):
        path = Path(f"/tmp/baton-{os.geteuid()}-{digest}")
    return path


def run_dir(config: Config, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the run directory, made if need be (0700).

    Raises:
        ConfigError: it cannot be made, or others could write to it.
    """
    path = run_dir_path(config, environ)
    try:
        path.mkdir(mode=0o700, parents=False, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run directory {path}: cannot be made: {error.strerror}") from None
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"run directory {path}: is not a directory (a symbolic link is refused)")
    if found.st_uid != os.geteuid():
        raise ConfigError(f"run directory {path}: belongs to uid {found.st_uid}, not to this user")
    if found.st_mode & 0o077:
        raise ConfigError(
            f"run directory {path}: mode {stat.S_IMODE(found.st_mode):04o} lets others in; "
            f"chmod 700 it or name another one in [cluster] run_dir"
        )
    return path


def arenas_name(cluster: str, run_dir: Path) -> str:
    """Return what tells the arena files of this cluster from those of every other one on the host,
    whatever both are called: its name and its place."""
    digest = hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest()[:8]
    return f"{cluster}.{digest}"


def inbox_path(directory: Path, worker_id: str) -> Path:
    """Return the socket at which ``worker_id`` receives messages."""
    return directory / f"{worker_id}.sock"


def endpoint(directory: Path, worker_id: str) -> str:
    """Return the ZeroMQ address of ``worker_id``'s inbox."""
    return f"ipc://{inbox_path(directory, worker_id)}"


def ledger_url(config: Config, directory: Path) -> str:
    """Return the ledger's URL: the configured one, or the socket of the cluster's own server."""
    return config.ledger.url or f"unix://{directory / LEDGER_SOCKET}"


def cache_dir(config: Config, environ: Mapping[str, str] = os.environ) -> Path:
    """Return where prepared models are kept (not made here)."""
    if config.model.cache_dir:
        return Path(config.model.cache_dir)
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "baton"


def _longest(config: Config, path: Path) -> int:
    names = [f"{worker_id}.sock" for _, worker_id in worker_ids(config)]
    return max(len(os.fsencode(path / name)) for name in (*names, SUPERVISOR_SOCKET, LEDGER_SOCKET))


def _check_length(config: Config, path: Path) -> None:
    length = _longest(config, path)
    if length > SOCKET_PATH_MAX:
        raise ConfigError(
            f"[cluster] run_dir = {str(path)!r} is not allowed: socket names in it would have "
            f"{length} bytes, {SOCKET_PATH_MAX} is the most; leave it empty or use a shorter path"
        )


def _is_private(path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not (found.st_mode & 0o022)
    )
