"""Supervisor as this cluster uses it: its configuration file, and asking it things.

Decides which programs there are, in which order they start and how they are ended. Restarts are
`baton.cli.restarter`'s business; how long a worker drains is the limit `drain_ms`.

Paths reach supervisor through the environment: its configuration language would take ` ;` in a
path for a comment and `%` for an expansion.
"""

from __future__ import annotations

import getpass
import http.client
import math
import os
import resource
import shlex
import sys
import xmlrpc.client
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baton.core.ids import Role
from baton.ledger.embedded import server_command
from baton.runtime.config import worker_ids
from baton.runtime.dirs import SUPERVISOR_SOCKET
from baton.runtime.settings import Config

CONFIG_NAME = "supervisord.conf"
SETTINGS_NAME = "settings.toml"
LEDGER = "ledger"
KEEPER = "keeper"
#: Programs that have neither guard nor lease, and never drain.
SERVERS = (LEDGER, KEEPER)
RESTARTER = "restarter"
#: Lower starts earlier. Everybody waits for the ledger by itself; the order only saves retries.
PRIORITY = {Role.ROUTER: 20, Role.DECODE: 30, Role.PREFILL: 40, Role.GATEWAY: 50}
_LEDGER_PRIORITY, _KEEPER_PRIORITY, _RESTARTER_PRIORITY = 10, 15, 60
#: Beyond the drain: releasing the lease, closing links, unlinking the arena.
_STOP_MARGIN_S = 5
_FILES_MAX = 8_192

_HEADER = """\
; Written by `baton up`; edits are lost. Values come from settings.toml beside this file.
[unix_http_server]
file = %(here)s/{socket}
chmod = 0700

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface

[supervisord]
nodaemon = true
silent = true
logfile = %(here)s/logs/supervisord.log
logfile_maxbytes = 10MB
logfile_backups = 3
pidfile = %(here)s/supervisord.pid
umask = 077
minfds = {minfds}
{user}
[supervisorctl]
serverurl = unix://%(here)s/{socket}
"""

# startsecs 0 and no restarts by supervisor: an early exit counts as an exit, with its exit code.
_PROGRAM = """
[{section}]
command = {command}
priority = {priority}
autostart = true
autorestart = false
startsecs = 0
stopsignal = TERM
stopwaitsecs = {stop_s}
redirect_stderr = true
stdout_logfile = %(here)s/logs/{name}.log
stdout_logfile_maxbytes = 20MB
stdout_logfile_backups = 3
"""

# The one process that supervisor itself restarts, for ever: it is small and holds no state.
_LISTENER = """
[eventlistener:{name}]
command = %(ENV_SV_PYTHON)s -m baton.cli.restarter
events = PROCESS_STATE_EXITED,PROCESS_STATE_FATAL,TICK_5
buffer_size = 100
priority = {priority}
autorestart = true
startsecs = 0
startretries = 1000000
stopwaitsecs = 2
stderr_logfile = %(here)s/logs/{name}.log
stderr_logfile_maxbytes = 5MB
stderr_logfile_backups = 1
stdout_logfile = NONE
"""


def render(config: Config) -> str:
    """Return supervisord's configuration for this cluster."""
    stop_s = math.ceil(config.limits.drain_ms / 1000) + _STOP_MARGIN_S
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else _FILES_MAX
    parts = [
        _HEADER.format(
            socket=SUPERVISOR_SOCKET,
            minfds=max(min(most, _FILES_MAX), min(soft, _FILES_MAX)),
            user=_user_line(),
        )
    ]
    if not config.ledger.url:
        parts.append(_program(LEDGER, "%(ENV_SV_LEDGER)s", _LEDGER_PRIORITY, 10))
    if config.engine.device != "cpu":
        parts.append(_program(KEEPER, "%(ENV_SV_KEEPER)s", _KEEPER_PRIORITY, 10))
    shared = _shares_socket(config)
    for role, worker_id in worker_ids(config):
        if role is not Role.GATEWAY or not shared:
            parts.append(_program(worker_id, _command(role, worker_id), PRIORITY[role], stop_s))
    if shared:
        parts.append(_gateways(config, stop_s))
    parts.append(_LISTENER.format(name=RESTARTER, priority=_RESTARTER_PRIORITY))
    return "".join(parts)


def _command(role: Role, worker_id: str) -> str:
    return (
        f"%(ENV_SV_PYTHON)s -m {program(role)} --worker-id {worker_id} --config %(ENV_SV_SETTINGS)s"
    )


def program(role: Role) -> str:
    """Return the module that a process is started with, and what it needs to know which it is."""
    if role in (Role.PREFILL, Role.DECODE):
        return f"baton.worker --role {role.value}"
    return f"baton.{role.value}"


def _shares_socket(config: Config) -> bool:
    """Whether supervisor listens for the gateways, so that one's end loses no connection."""
    # It knows no IPv6; such gateways share the port among themselves.
    return bool(config.gateway.uds) or ":" not in config.gateway.host


def spare(config: Config) -> str:
    """Return the name of the gateway that runs only while the single one is restarted, if any.

    It takes the new connections while that one still answers its clients.
    """
    single = config.cluster.gateways == 1 and _shares_socket(config)
    return f"{Role.GATEWAY.value}-1" if single else ""


def _gateways(config: Config, stop_s: int) -> str:
    """Return the program whose processes inherit one listening socket as standard input."""
    name, gateway = Role.GATEWAY.value, config.gateway
    command = _command(Role.GATEWAY, f"{name}-%(process_num)d")
    where = f"unix://{gateway.uds}" if gateway.uds else f"tcp://{gateway.host}:{gateway.port}"
    text = _PROGRAM.format(
        section=f"fcgi-program:{name}",
        name=f"{name}-%(process_num)d",
        command=command,
        priority=PRIORITY[Role.GATEWAY],
        stop_s=stop_s,
    )
    if spare(config):
        # All or none of them: the listener starts those that are to run.
        text = text.replace("autostart = true", "autostart = false")
    return (
        f"{text}process_name = {name}-%(process_num)d\n"
        f"numprocs = {config.cluster.gateways + bool(spare(config))}\n"
        f"socket = {where.replace('%', '%%')}\n"
        "socket_backlog = 1024\n" + ("socket_mode = 0600\n" if gateway.uds else "")
    )


def _program(name: str, command: str, priority: int, stop_s: int) -> str:
    return _PROGRAM.format(
        section=f"program:{name}", name=name, command=command, priority=priority, stop_s=stop_s
    )


def _user_line() -> str:
    """Name the user we are: without it supervisor complains to root at every start."""
    try:
        return f"user = {getpass.getuser()}\n" if os.geteuid() == 0 else ""
    except (KeyError, OSError):
        return ""


def environment(config: Config, run_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of supervisor and all its programs.

    Settings from the caller's environment are left out: they stand in ``settings.toml``, and a
    process restarted tomorrow must read what its siblings read today.
    """
    sections = tuple(f"BATON_{section}_".upper() for section in config.__slots__)
    kept = {name: value for name, value in environ.items() if not name.startswith(sections)}
    kept.pop("BATON_CONFIG", None)
    # Neither of these has a watch of its own for a supervisor that was killed.
    guard = [sys.executable, "-m", "baton.cli.pdeath", "TERM", "0", "--"]
    keeper = [sys.executable, "-m", "baton.keeper", "--config", str(run_dir / SETTINGS_NAME)]
    if config.engine.device != "cpu":
        kept["SV_KEEPER"] = shlex.join([*guard, *keeper])
    if not config.ledger.url:
        kept["SV_LEDGER"] = shlex.join([*guard, *server_command(run_dir, run_dir / "ledger")])
    return kept | {
        "SV_PYTHON": shlex.quote(sys.executable),
        "SV_SETTINGS": shlex.quote(str(run_dir / SETTINGS_NAME)),
        "SV_START": " ".join(
            f"{role.value}:{worker_id}"
            for role, worker_id in worker_ids(config)
            if role is Role.GATEWAY and spare(config)
        ),
        # Marks every process of this cluster: `baton down` looks for it in /proc.
        MARK: str(run_dir),
        "PYTHONUNBUFFERED": "1",
        # A crash in native code leaves the Python stack in the log.
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": _absolute_path(environ.get("PYTHONPATH", "")),
    }


#: Environment variable whose value, in /proc/<pid>/environ, tells whose a process is.
MARK = "SV_RUN_DIR"


def _absolute_path(path: str) -> str:
    return os.pathsep.join(str(Path(part).absolute()) for part in path.split(os.pathsep) if part)


def command(run_dir: Path) -> list[str]:
    """Return the command line of supervisord."""
    return [sys.executable, "-m", "supervisor.supervisord", "-c", str(run_dir / CONFIG_NAME)]


class Supervisor:
    """Asks a running supervisord over its Unix socket; OSError when it does not answer."""

    def __init__(self, run_dir: Path) -> None:
        self._address = f"unix://{run_dir / SUPERVISOR_SOCKET}"

    def processes(self) -> list[dict[str, Any]]:
        """Return supervisor's own record of every program that was ever started."""
        found: list[dict[str, Any]] = self._call("getAllProcessInfo")
        return [info for info in found if info["name"] != RESTARTER and info["start"]]

    def stop(self, wanted: Callable[[str], bool]) -> None:
        """Tell the programs whose name is wanted to stop, all at once; does not wait."""
        for info in self._call("getAllProcessInfo"):
            if not wanted(info["name"]):
                continue
            try:
                self._call("stopProcess", f"{info['group']}:{info['name']}", False)
            except xmlrpc.client.Fault:
                continue  # It is not running, which is what is wanted.

    def start(self, name: str) -> None:
        """Start one program; does not wait. One that runs is left alone."""
        try:
            self._call("startProcess", self._full_name(name), False)
        except xmlrpc.client.Fault as fault:
            if "ALREADY_STARTED" not in fault.faultString:
                raise ConnectionError(f"{name} was not started: {fault.faultString}") from None

    def signal(self, name: str, number: str) -> None:
        """Send a signal to one program; one that does not run gets none."""
        try:
            self._call("signalProcess", self._full_name(name), number)
        except xmlrpc.client.Fault:
            return

    def _full_name(self, name: str) -> str:
        groups = {info["name"]: info["group"] for info in self._call("getAllProcessInfo")}
        return f"{groups[name]}:{name}"

    def shutdown(self) -> None:
        """Stop what is left, in order, and then supervisor itself; does not wait."""
        self._call("shutdown")

    def _call(self, method: str, *arguments: object) -> Any:
        from supervisor.xmlrpc import SupervisorTransport

        # A connection of its own for each call: supervisor's transport never recovers from an
        # error on the one it keeps.
        transport = SupervisorTransport(None, None, self._address)
        # The address is a formality: the transport knows the socket.
        proxy = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)
        try:
            return getattr(proxy.supervisor, method)(*arguments)
        except (http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
            raise ConnectionError(f"supervisor does not answer: {error}") from None
        finally:
            transport.close()
