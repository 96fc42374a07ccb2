"""`baton run`: a cluster in the foreground, for a first look and for development.

Decides who gets Ctrl-C: this process alone, so that it can stop the workers in order. Started by
make it takes the terminal for itself, because make, once it saw the signal too, would report an
interrupt where everything ended as it should; and it ends when make dies, however make dies.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from baton.cli.client import Answer, Delta
from baton.cli.cluster import Cluster, Patience
from baton.cli.leftovers import LOGS
from baton.cli.record import ClusterRecord
from baton.cli.serving import give_up, say_addresses, say_late
from baton.cli.terminal import CommandError, ExitCode, say
from baton.runtime.prctl import die_with_parent
from baton.runtime.settings import Config

SAMPLE = "What is the capital of France, and what is it known for?"
_SAMPLE_TOKENS = 96
#: When make or the terminal is gone nobody waits for an answer any more: the workers must end.
_ORPHANED_S = 2.0


class _Stop:
    """Signals, counted: the first stops in order, the second at once."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._asked = threading.Event()
        self._parent = os.getppid()
        self.interrupts = False
        """Whether a signal also breaks off what the main thread waits for."""

    def take(self, number: int, _: FrameType | None) -> None:
        if self._asked.is_set():
            self._patience.limit(0.0)
        self._asked.set()
        if number == signal.SIGHUP or os.getppid() != self._parent:
            self._patience.limit(_ORPHANED_S)
        if self.interrupts:
            raise KeyboardInterrupt

    def is_asked(self) -> bool:
        return self._asked.is_set()

    def wait(self, seconds: float) -> bool:
        return self._asked.wait(seconds)


def run(
    config: Config, wait_s: float, *, prompt: str | None, oneshot: bool, with_parent: bool
) -> int:
    """Start a cluster, stream one answer, serve until a signal; stop it all; return 0."""
    patience = Patience()
    stop = _Stop(patience)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop.take)
    if with_parent:
        die_with_parent(signal.SIGTERM, os.getppid())
    cluster = Cluster(config, os.environ, say)
    with _own_terminal(with_parent):
        found = cluster.start(in_foreground=True)
        try:
            if cluster.wait_ready(found, wait_s, stop.is_asked):
                _serve(cluster, found, stop, prompt=prompt or SAMPLE, oneshot=oneshot)
        except BaseException:
            give_up(cluster)
            raise
        again = "" if oneshot else "; again Ctrl-C: at once"
        say(f"\nstopping ({cluster.drain_words()}{again})")
        left = cluster.stop(patience)
    if left:
        raise CommandError("stopped, but left behind: " + "; ".join(left))
    say("stopped; nothing is left behind")
    return ExitCode.OK


def _serve(
    cluster: Cluster, found: ClusterRecord, stop: _Stop, *, prompt: str, oneshot: bool
) -> None:
    # A signal may come at any of these lines.
    try:
        try:
            stop.interrupts = True
            if not stop.is_asked():
                _ask(cluster, found, prompt)
        finally:
            stop.interrupts = False
    except KeyboardInterrupt:
        stop.interrupts = False
    if oneshot or stop.is_asked():
        return
    say()
    say_late(cluster, found)
    say_addresses(found)
    say("ready; Ctrl-C stops everything")
    pids = cluster.pids()
    while not stop.wait(1.0):
        if not found.supervisor.is_alive():
            raise CommandError(
                f"supervisor (pid {found.supervisor_pid}) was killed, and everything with it; "
                "start again"
            )
        now = cluster.pids()
        for line in restarts(pids, now):
            say(f"{line}; logs: {cluster.run_dir / LOGS}")
        pids |= now


def restarts(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return, in words, which processes are others than before."""
    return [
        f"{name} (pid {before[name]}) was started again (pid {pid})"
        for name, pid in now.items()
        if before.get(name, pid) != pid
    ]


def _ask(cluster: Cluster, found: ClusterRecord, prompt: str) -> None:
    client = cluster.client(found)
    model = client.models()[0]
    say(f"\n{model} is asked: {prompt}\n")
    stream = client.stream_chat(
        [{"role": "user", "content": prompt}],
        model=model,
        max_tokens=_SAMPLE_TOKENS,
        temperature=0.0,
    )
    for piece in stream:
        if isinstance(piece, Delta):
            say(piece.text, end="")
        elif isinstance(piece, Answer):
            say(f"\n\n{piece.summary()}")


@contextmanager
def _own_terminal(wanted: bool) -> Iterator[None]:
    """Be the terminal's foreground process group, alone, if we were part of it."""
    if not wanted or not _in_foreground() or os.getpgrp() == os.getpid():
        yield
        return
    terminal, before = sys.stdin.fileno(), os.getpgrp()
    # A background group that sets the terminal's group is stopped by this signal.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    # The shell waits for make, not for us: nobody would ever continue us.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.tcsetpgrp(terminal, os.getpid())
    try:
        yield
    finally:
        try:
            os.tcsetpgrp(terminal, before)
        except OSError:
            pass  # The terminal is gone; so is the question whose it is.


def _in_foreground() -> bool:
    try:
        return os.isatty(sys.stdin.fileno()) and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False
