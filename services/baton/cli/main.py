"""The command `baton`: reads the command line and calls one function.

Decides names, options and help of the commands; each command's work stands in its own module. The
settings are read once, here, and options override them like environment variables do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from baton.cli import bench
from baton.cli.numbers import at_least_zero, count, whole
from baton.cli.terminal import CommandError, ExitCode, say, warn
from baton.core.ids import WorkerRole
from baton.runtime.config import ConfigError, config_path, load
from baton.runtime.settings import Config

Command = Callable[[Config, argparse.Namespace], int]

_CONFIG_HELP = "settings (TOML) instead of ./baton.toml"

_TEACHING = """\
a first session:
  baton up                  start a cluster in the background
  baton status              see its processes, leases, blocks and queues
  baton chat                talk to it; Ctrl-C stops the answer, /exit ends
  baton down                stop it and prove that nothing is left

settings come from defaults < baton.toml (or --config, $BATON_CONFIG) < the environment:
  BATON_GATEWAY_PORT=8001 BATON_CLUSTER_DECODE=2 baton up
  baton config show         every setting, its value and where it came from

exit codes: 0 done, 1 not so (nothing runs, not taken, something is left), 2 wrong command line,
  75 not now (port taken, not ready in time), 78 wrong setting or model, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    options = _options(arguments)
    try:
        config = _settings(options)
        command: Command = options.command
        return command(config, options)
    except ConfigError as error:
        warn(f"baton: {_as_typed(str(error), options)}")
        return ExitCode.CONFIG
    except CommandError as error:
        warn(f"baton: {error}")
        return error.code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; a word too many is an error of the command it was said to."""
    parser = _parser()
    try:
        options, unknown = parser.parse_known_args(arguments)
    except SystemExit:
        say(end="")  # `baton --help | head`: argparse leaves its text in the buffer
        raise
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _settings(options: argparse.Namespace) -> Config:
    environ, typed = dict(os.environ), {}
    for name, variable in _OVERRIDES.items():
        value = getattr(options, name, None)
        if value is not None:
            environ[variable] = str(value)
            typed[f"env:{variable}"] = f"--{name}"
    config = load(config_path(options.config, environ), environ)
    sources = {key: typed.get(source, source) for key, source in config.sources.items()}
    return replace(config, sources=sources)


def _as_typed(text: str, options: argparse.Namespace) -> str:
    """Name the option where the user gave one, not the variable it stands for."""
    for name, variable in _OVERRIDES.items():
        if getattr(options, name, None) is not None:
            text = text.replace(f"environment variable {variable}", f"--{name}")
            text = text.replace(f"env:{variable}", f"--{name}")
    return text


_OVERRIDES = {
    "mode": "BATON_CLUSTER_MODE",
    "prefill": "BATON_CLUSTER_PREFILL",
    "decode": "BATON_CLUSTER_DECODE",
    "model": "BATON_MODEL_PATH",
    "port": "BATON_GATEWAY_PORT",
}


class _Parser(argparse.ArgumentParser):
    """A word without the command that belongs to it is answered with what there is."""

    def error(self, message: str) -> NoReturn:
        if message.endswith(": COMMAND"):
            self.print_help(sys.stderr)
            self.exit(ExitCode.USAGE)
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="baton",
        description="Serves a language model with prefill and decode in separate processes.",
        epilog=_TEACHING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serving(commands)
    _add_single(commands)
    _add_asking(commands)
    bench.add(commands, _add)
    return parser


def _add(commands, name: str, run: Command, text: str, more: str = "") -> argparse.ArgumentParser:  # type: ignore[no-untyped-def]
    added: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        # Of both only `help` is a format.
        description=f"{text[:1].upper()}{text[1:]}.".replace("%%", "%"),
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Also after the command: that is where people put it.
    added.add_argument(
        "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS, help=_CONFIG_HELP
    )
    added.set_defaults(command=run, parser=added)
    return added


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode", choices=("split", "adaptive", "colocated"), help="who computes prompts"
    )
    parser.add_argument("--prefill", type=whole, metavar="N", help="number of prefill processes")
    parser.add_argument("--decode", type=whole, metavar="N", help="number of decode processes")
    parser.add_argument("--model", metavar="MODEL", help="name, folder or Hugging Face name")
    parser.add_argument("--port", type=whole, metavar="PORT", help="TCP port of the gateway")
    parser.add_argument(
        "--wait",
        type=at_least_zero,
        default=180.0,
        metavar="S",
        help="most seconds until ready (180)",
    )


def _add_serving(commands) -> None:  # type: ignore[no-untyped-def]
    up = _add(commands, "up", _up, "start a cluster in the background, under supervisor", _UP)
    _add_cluster_options(up)
    run = _add(commands, "run", _run, "start a cluster, stream an answer, serve until Ctrl-C")
    _add_cluster_options(run)
    run.add_argument("--oneshot", action="store_true", help="stop after the first answer")
    run.add_argument("--prompt", metavar="TEXT", help="ask this instead of the sample question")
    run.add_argument(
        "--end-with-parent", action="store_true", help="stop when the starting process dies (make)"
    )
    down = _add(commands, "down", _down, "stop the cluster; an error if anything is left behind")
    down.add_argument(
        "--now", action="store_true", help="do not wait for running requests: 4 s, then kill"
    )


def _add_single(commands) -> None:  # type: ignore[no-untyped-def]
    drain = _add(commands, "drain", _drain, "have one process end in order", _DRAIN)
    drain.add_argument("worker", help="decode-0, gateway-1, ...")
    drain.add_argument(
        "--wait", type=at_least_zero, metavar="S", help="most seconds (the drain's limit and 10 s)"
    )
    drain.add_argument("--force", action="store_true", help="also the last one of its kind")
    start = _add(commands, "start", _start, "start one process that is down")
    start.add_argument("worker", help="decode-0, gateway-1, ...")
    _add_wait(start)
    role = _add(commands, "role", _role, "have a worker prefill, decode, or both", _ROLE)
    role.add_argument("worker", help="decode-1, prefill-0, ...")
    role.add_argument("role", choices=[each.value for each in WorkerRole])
    role.add_argument(
        "--wait", type=at_least_zero, metavar="S", help="most seconds (the drain's limit and 10 s)"
    )
    restart = _add(
        commands, "restart", _restart, "replace processes without losing a request", _RESTART
    )
    restart.add_argument("workers", nargs="*", metavar="WORKER", help="decode-0, ledger, ...")
    restart.add_argument("--rolling", action="store_true", help="all of them, one by one")
    _add_wait(restart)


def _add_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait",
        type=at_least_zero,
        default=60.0,
        metavar="S",
        help="most seconds until it is ready (60)",
    )


def _add_asking(commands) -> None:  # type: ignore[no-untyped-def]
    status = _add(commands, "status", _status, "show processes, leases, blocks and queues")
    status.add_argument("--json", action="store_true", help="for machines")
    audit = _add(commands, "audit", _audit, "compare ledger, processes and arenas", _AUDIT)
    audit.add_argument("--json", action="store_true", help="for machines")
    explain = _add(commands, "explain", _explain, "tell what happened to one request", _EXPLAIN)
    explain.add_argument("request_id", help="the id of the answer, such as chatcmpl-...")
    explain.add_argument("--json", action="store_true", help="for machines")
    chat = _add(commands, "chat", _chat, "talk to the running cluster", _CHAT)
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument(
        "--max-tokens", type=count, default=512, metavar="N", help="most tokens of an answer (512)"
    )
    chat.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 to 2; 0: the likeliest token each time (0)",
    )
    logs = _add(commands, "logs", _logs, "print the newest lines of the logs, by time")
    logs.add_argument("worker", nargs="?", help="decode-0, ledger, supervisord, ... (default: all)")
    logs.add_argument("-n", type=whole, default=20, metavar="LINES", help="lines of each (20)")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    model = commands.add_parser("model", help="prepare models").add_subparsers(
        title="commands", required=True, metavar="COMMAND"
    )
    prepare = _add(model, "prepare", _prepare, "fetch, convert and prove a model, once", _PREPARE)
    prepare.add_argument(
        "name", nargs="?", help="name, folder or Hugging Face name (default: the configured one)"
    )
    prepare.add_argument(
        "--again", action="store_true", help="also try kernels that this compiler has refused"
    )
    show = commands.add_parser("config", help="look at the settings").add_subparsers(
        title="commands", required=True, metavar="COMMAND"
    )
    shown = _add(show, "show", _config_show, "every setting, its value and where it came from")
    shown.add_argument(
        "--changed", action="store_true", help="only those that the file or the environment sets"
    )
    shown.add_argument("--json", action="store_true", help="for machines")
    _add(commands, "version", _version, "print the version")


_UP = """\
examples:
  baton up --mode colocated               the same work without separate prefill processes
  baton up --decode 2 --port 8001
It returns when the gateway can serve; workers that still start then are counted and named.
A cluster that already runs here is left alone, with its settings: exit code 0, or 1 when the
command line, the environment or the file says anything else now, which is then named.
"""
_AUDIT = """\
A discrepancy counts when it is seen again after its bound (docs/operations.md has both); the
command takes as long as the bounds of what it has seen, no time to speak of when all is well.
exit codes: 0 clean, 1 discrepancies, 2 something could not be looked at.
"""
_EXPLAIN = """\
Reads the logs and the ledger's record; works after the cluster has ended, from the logs alone.
"""
_DRAIN = """\
It takes nothing new. A decode worker's sequences move to another decode worker of the host; what
cannot move ends by itself, or fails when [limits] drain_ms is over. A drained process stays down
until `baton start`. Under systemd: `systemctl stop baton-decode@0`.
"""
_ROLE = """\
examples:
  baton role decode-1 prefill             it gives its streams to other decode workers first
  baton role decode-1 decode              and back
  baton role decode-0 mixed               it may also compute prompts (--mode adaptive)
The worker takes nothing new, gives away or ends what runs ([limits] drain_ms at most), and comes
back as what it was told to be, with its cores, name and loaded model, until the cluster's next
start. The last worker that decodes stays one; in split mode the last prefill worker does as well.
"""
_RESTART = """\
examples:
  baton restart decode-0                  its successor takes its memory over
  baton restart --rolling                 everything, one process after the other
The next process follows when the last one is ready and the others have met it. Streams go on: those
of decode pause until its successor has taken over; a gateway ends when its clients have their
answers, while others take new connections. Settings stay those of the cluster's start. Processes
of different versions refuse each other: after an update use `baton down` and `baton up`.
"""
_CHAT = """\
Ctrl-C cancels the answer, not the program. /reset forgets the conversation, /exit ends.
Without a terminal every line of standard input is one question.
"""
_PREPARE = """\
A model is served only after this proof: every layer calls Baton's attention, and packed, chunked
sequences give what transformers' own forward gives. The result is kept under the model's digest.
"""


# Imports stand inside: `baton --help` must not load what only one command needs.


def _up(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.serving import up

    return up(config, options.wait)


def _run(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.foreground import run

    return run(
        config,
        options.wait,
        prompt=options.prompt,
        oneshot=options.oneshot,
        with_parent=options.end_with_parent,
    )


def _down(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.serving import down

    return down(config, now=options.now)


def _drain(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.restart import drain

    return drain(config, options.worker, wait_s=options.wait, force=options.force)


def _start(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.restart import start

    return start(config, options.worker, options.wait)


def _role(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.role import role

    return role(config, options.worker, WorkerRole(options.role), wait_s=options.wait)


def _restart(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.restart import restart

    return restart(config, options.workers, rolling=options.rolling, wait_s=options.wait)


def _status(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.status import status

    return status(config, as_json=options.json)


def _audit(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.audit import audit

    return audit(config, as_json=options.json)


def _explain(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.explain import explain

    return explain(config, options.request_id, as_json=options.json)


def _chat(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.chat import chat

    return chat(
        config,
        system=options.system,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
    )


def _logs(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.logs import logs

    return logs(config, options.worker, options.n, follow=options.follow)


def _prepare(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.models import prepare

    return prepare(config, options.name, again=options.again)


def _config_show(config: Config, options: argparse.Namespace) -> int:
    from baton.cli.show import config_show

    return config_show(config, changed=options.changed, as_json=options.json)


def _version(_: Config, __: argparse.Namespace) -> int:
    from baton.cli.show import version

    return version()


if __name__ == "__main__":
    sys.exit(main())
