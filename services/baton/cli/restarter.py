"""The supervisor's event listener that starts ended processes again.

Decides nothing (`baton.cli.restarts` does): it reads events from supervisor on standard input,
looks at all states over supervisor's own interface, starts what is due and logs what ended.
Supervisor's own restarts are switched off, because they know two ways only: five tries and then
never again, or without end and without regard to the exit code.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from xmlrpc.client import Fault

from supervisor import childutils

from baton.cli.restarts import Ended, ProcessState, RestartPolicy

_STDIN = 0
#: A host's supervisor may have other programs, whose restarts are none of our business.
_OURS = re.compile(r"ledger|keeper|(router|prefill|decode|gateway)-[0-9]+")
#: Without any event states are looked at this often.
_LOOK_S = 5.0


class _Gone(Exception):
    """Supervisor closed our standard input: the end."""


def main() -> None:
    """Serve until supervisor goes."""
    rpc = childutils.getRPCInterface(os.environ)
    policy = RestartPolicy()
    try:
        _write(b"READY\n")
        _start_missing(rpc)
        while True:
            _look(rpc, policy)
            due = policy.deadline()
            wait = _LOOK_S if due is None else min(_LOOK_S, max(0.0, due - time.monotonic()))
            if select.select([_STDIN], [], [], wait)[0]:
                _take_event()
                _write(b"RESULT 2\nOKREADY\n")
    except (_Gone, BrokenPipeError, ConnectionRefusedError, FileNotFoundError):
        return


def _look(rpc: childutils.xmlrpclib.ServerProxy, policy: RestartPolicy) -> None:
    states = [
        ProcessState(
            name=f"{info['group']}:{info['name']}",
            state=str(info["statename"]),
            exit_code=int(info["exitstatus"]),
            started=int(info["start"]),
            stopped=int(info["stop"]),
        )
        for info in rpc.supervisor.getAllProcessInfo()
        if _OURS.fullmatch(info["name"])
    ]
    for ended in policy.observe(states, time.monotonic()):
        _tell(ended)
    for name in policy.take_due(time.monotonic()):
        try:
            rpc.supervisor.startProcess(name, False)
        except Fault as fault:
            _log(f"{name} was not started: {fault.faultString}")


def _start_missing(rpc: childutils.xmlrpclib.ServerProxy) -> None:
    """Start what supervisor left to us at its own start, and nothing that was ever stopped."""
    wanted = os.environ.get("SV_START", "").split()
    for info in rpc.supervisor.getAllProcessInfo():
        name = f"{info['group']}:{info['name']}"
        if name in wanted and not info["start"]:
            rpc.supervisor.startProcess(name, False)


def _take_event() -> None:
    """Read one event whole and forget it: it only means that something changed."""
    header = b""
    while not header.endswith(b"\n"):
        header += _read(1)
    fields = dict(pair.split(b":", 1) for pair in header.split())
    left = int(fields[b"len"])
    while left:
        left -= len(_read(left))


def _read(size: int) -> bytes:
    data = os.read(_STDIN, size)
    if not data:
        raise _Gone
    return data


def _write(data: bytes) -> None:
    os.write(1, data)


def _tell(ended: Ended) -> None:
    what = f"exit code {ended.exit_code}" if ended.exit_code >= 0 else "a signal"
    if ended.restart_in_s is None:
        _log(f"{ended.name} ended with {what}; it stays down")
    else:
        _log(
            f"{ended.name} ended with {what} (failure {ended.failures} in a row); "
            f"restart in {ended.restart_in_s:g} s"
        )


def _log(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} restarter: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
