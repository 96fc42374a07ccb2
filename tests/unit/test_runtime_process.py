"""The process shell with real processes, a real ledger server and real sockets."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time

import orjson
import pytest

from baton.core.ids import Member, Peer, Role
from baton.core.limits import Limits
from baton.ports.transport import PeerUp, Received, TransportEvent
from baton.transport import host
from baton.transport.zmq_transport import ZmqTransport
from baton.wire.messages import ReadReport, Report
from support.runtime_rig import PATIENCE_S, Process, Rig


async def reports(rig: Rig, worker_id: str, *kinds: str) -> dict[str, bytes]:
    """Ask a process for its reports, as the command line does."""
    me = Peer("cli-0", host.new_incarnation())
    member = Member(me, Role.CLI, "", os.getpid(), host.boot_id())
    bugs: list[BaseException] = []
    transport = ZmqTransport(member, Limits(), lambda _: None, bugs.append)
    bodies: dict[str, bytes] = {}
    complete = asyncio.Event()

    def on_event(event: TransportEvent) -> None:
        match event:
            case PeerUp(peer_member):
                for token, kind in enumerate(kinds):
                    transport.send(peer_member.peer, ReadReport(kind, token))
            case Received(_, Report(kind=kind, body=body)):
                bodies[kind] = body
                if bodies.keys() == set(kinds):
                    complete.set()

    incarnation = int(str(rig.started[-1].until("process_starting")["incarnation"]))
    await transport.start(on_event)
    target = Peer(worker_id, incarnation)
    endpoint = f"ipc://{rig.run_dir / worker_id}.sock"
    transport.dial(Member(target, Role.ROUTER, endpoint, 0, "elsewhere"))
    try:
        await asyncio.wait_for(complete.wait(), PATIENCE_S)
    finally:
        await transport.close()
    assert not bugs
    return bodies


def test_life_of_a_process(rig: Rig) -> None:
    """It tells systemd when it is ready, answers reports, and ends with 0 and without traces."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(rig.run_dir / "notify"))
        ear.settimeout(PATIENCE_S)
        process = rig.start("router-0", NOTIFY_SOCKET=str(rig.run_dir / "notify"))
        assert ear.recv(1000).startswith(b"EXTEND_TIMEOUT_USEC=")
        heard = b""
        while not heard.startswith(b"READY=1"):
            heard = ear.recv(1000)
        while heard != b"WATCHDOG=1":
            heard = ear.recv(1000)
        process.until("process_ready")
        assert (rig.run_dir / "router-0.sock").stat().st_mode & 0o777 == 0o600
        bodies = asyncio.run(reports(rig, "router-0", "status", "metrics", "riddle"))
        status = orjson.loads(bodies["status"])
        assert (status["worker_id"], status["ready"], status["draining"]) == (
            "router-0",
            True,
            False,
        )
        assert status["guard"] == process.popen.pid
        assert status["pid"] == process.worker
        assert (
            b'baton_lease_state{model_name="tiny",role="router",state="held"' in bodies["metrics"]
        )
        assert "unknown report" in orjson.loads(bodies["riddle"])["error"]
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        while not heard.startswith(b"STOPPING=1"):
            heard = ear.recv(1000)
    assert process.until("process_ending")["reason"] == "drained"
    assert not list(rig.run_dir.glob("router-0.sock*"))
    assert b"router-0" not in rig.server.command("KEYS", "*")


def test_a_gateway_dials_the_router(rig: Rig) -> None:
    """Processes find each other through the ledger and link by the dial rule."""
    router = rig.start("router-0")
    gateway = rig.start("gateway-0", "gateway")
    assert str(gateway.until("peer_up")["peer"]).startswith("router-0/")
    assert str(router.until("peer_up")["peer"]).startswith("gateway-0/")
    gateway.popen.kill()
    assert router.until("peer_lost")["reason"] == "died"


def test_a_newcomer_is_linked_before_anybody_asks_the_ledger_again(rig: Rig) -> None:
    """A router that comes back does not wait for the gateway's next renewal to be dialled."""
    seldom = {"BATON_LIMITS_LEASE_TTL_MS": "40000", "BATON_LIMITS_LEASE_RENEW_MS": "15000"}
    router = rig.start("router-0", **seldom)
    gateway = rig.start("gateway-0", "gateway", **seldom)
    gateway.until("peer_up")
    os.kill(router.worker, signal.SIGKILL)
    gateway.until("peer_lost")
    began = time.monotonic()
    gateway.until_links(2)
    assert time.monotonic() - began < 10.0


def test_a_second_start_is_refused(rig: Rig) -> None:
    """A second process with a living one's name ends with 75 and says who is there."""
    rig.start("router-0").until("process_ready")
    second = rig.start("router-0", TEST_ALONE="1")
    assert second.wait() == 75
    assert str(rig.started[0].worker) in str(second.until("start_failed")["reason"])


@pytest.mark.parametrize(
    ("behaviour", "code", "event", "words"),
    [
        ("no_model", 78, "start_failed", "no such folder"),
        ("not_yet", 75, "start_failed", "in use"),
        ("build_bug", 70, "process_crashed", "a bug in the wiring"),
    ],
)
def test_exit_codes_of_the_start(
    rig: Rig, behaviour: str, code: int, event: str, words: str
) -> None:
    """Permanent, passing and unknown failures of the start have three exit codes."""
    process = rig.start("router-0", TEST_BEHAVIOUR=behaviour, TEST_ALONE="1")
    assert process.wait() == code
    assert words in orjson.dumps(process.until(event)).decode()


def test_wrong_settings(rig: Rig) -> None:
    """A wrong setting ends with 78 and one line that names it."""
    process = rig.start("router-0", BATON_GATEWAY_PORT="eight")
    assert process.wait() == 78
    assert b"BATON_GATEWAY_PORT" in process.raw
    assert process.raw.count(b"\n") == 1


def test_a_bug_while_running(rig: Rig) -> None:
    """A machine that raises ends its process with 70, never with 0, and logs the trace."""
    router = rig.start("router-0", TEST_BEHAVIOUR="bug", TEST_ALONE="1")
    router.until("process_ready")
    rig.start("gateway-0", "gateway")
    assert router.wait() == 70
    line = router.until("process_crashed")
    assert line["during"] == "PeerUp"
    assert "a bug in the machine" in str(line["exception"])


def test_a_bug_ends_a_process_whose_log_is_gone(rig: Rig) -> None:
    """Nothing can be said any more: it ends with 70 all the same."""
    router = rig.start("router-0", TEST_BEHAVIOUR="bug", TEST_ALONE="1")
    router.until("process_ready")
    assert router.popen.stderr is not None
    router.popen.stderr.close()
    rig.start("gateway-0", "gateway")
    assert router.popen.wait(PATIENCE_S) == 70


def test_drain_has_an_end(rig: Rig) -> None:
    """A machine that never drains is ended soon after drain_ms, with 0: somebody asked for it."""
    process = rig.start("router-0", TEST_BEHAVIOUR="never_drained")
    process.until("process_ready")
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert process.until("process_ending")["reason"] == "the drain took too long"


@pytest.mark.parametrize(
    ("behaviour", "code", "event"),
    [("stop_bug", 70, "process_crashed"), ("stop_hangs", 0, "stop_incomplete")],
)
def test_troubles_at_the_end(rig: Rig, behaviour: str, code: int, event: str) -> None:
    """A part that hangs at the end is left behind; one that raises is a bug like any other."""
    process = rig.start("router-0", TEST_BEHAVIOUR=behaviour)
    process.until("process_ready")
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == code
    process.until(event)


def test_a_second_signal_ends_at_once(rig: Rig) -> None:
    """The same signal again does not wait for the drain."""
    process = rig.start("router-0", TEST_BEHAVIOUR="never_drained", BATON_LIMITS_DRAIN_MS="600000")
    process.until("process_ready")
    process.popen.send_signal(signal.SIGTERM)
    process.until("drain_requested")
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert process.until("process_ending")["reason"] == "SIGTERM again"


def test_a_signal_while_loading(rig: Rig) -> None:
    """A signal during a long load ends the process with 0, at once."""
    process = rig.start("router-0", TEST_BEHAVIOUR="slow")
    process.until("process_starting")
    started = time.monotonic()
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert time.monotonic() - started < 5.0


def test_a_signal_while_waiting_for_the_ledger(rig: Rig) -> None:
    """A process whose ledger is not there yet can be ended like any other."""
    rig.server.stop()
    process = rig.start("router-0")
    process.until("process_starting")
    process.popen.send_signal(signal.SIGINT)
    assert process.wait() == 0


@pytest.mark.parametrize("behaviour", ["", "slow"])
def test_ends_with_its_parent(rig: Rig, behaviour: str) -> None:
    """A worker whose parent is killed ends within five seconds, also while it loads."""
    script = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    command = [sys.executable, "-c", script, *rig.command("router-0")]
    parent = Process(command, rig.environ(TEST_BEHAVIOUR=behaviour))
    rig.started.append(parent)
    line = parent.until("process_starting" if behaviour else "process_ready")
    worker = int(str(parent.until("process_starting")["pid"]))
    assert line
    pidfd = os.pidfd_open(worker)
    try:
        parent.popen.kill()
        assert select.select([pidfd], [], [], 5.0)[0], "the worker outlives its parent"
    finally:
        os.close(pidfd)


def test_no_moment_is_unwatched(rig: Rig) -> None:
    """Whenever in its first moments a supervisor is killed, its worker ends within five seconds."""
    supervisor = rig.run_dir / "supervisor.py"
    supervisor.write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(sys.argv[1:], stderr=subprocess.DEVNULL)\n"
        "os.write(1, b'%d\\n' % child.pid)\n"
        "child.wait()\n"
    )
    environ = rig.environ(SUPERVISOR_PROCESS_NAME="router-0", TEST_BEHAVIOUR="slow")
    pidfds = []
    for moment_s in (0.0, 0.01, 0.03, 0.1, 0.2, 0.4):
        parent = subprocess.Popen(
            [sys.executable, str(supervisor), *rig.command("router-0")],
            stdout=subprocess.PIPE,
            env=environ,
        )
        assert parent.stdout is not None
        pidfds.append(os.pidfd_open(int(parent.stdout.readline())))
        select.select([], [], [], moment_s)
        parent.kill()
        parent.wait()
        parent.stdout.close()
    ended = time.monotonic() + 5.0
    for pidfd in pidfds:
        left = max(0.0, ended - time.monotonic())
        assert select.select([pidfd], [], [], left)[0], "a worker outlives its supervisor"
        os.close(pidfd)


@pytest.mark.slow
def test_a_ledger_that_never_comes(rig: Rig) -> None:
    """A process without a ledger gives up with 75 after a while, and says which one it wanted."""
    rig.server.stop()
    process = rig.start("router-0", TEST_ALONE="1")
    assert process.wait() == 75
    assert "ledger.sock" in str(process.until("start_failed")["reason"])


def test_an_adopted_worker_does_not_start(rig: Rig) -> None:
    """A worker that supervisor started and somebody else has adopted already exits with 75."""
    process = rig.start("router-0", SUPERVISOR_PROCESS_NAME="router-0")
    assert process.wait() == 75
    assert not process.lines


def test_a_thawed_process_comes_back(rig: Rig) -> None:
    """Frozen until its peers gave it up, a process has links again, or starts anew (75)."""
    router = rig.start("router-0")
    decode = rig.start("decode-0", "decode")
    gateway = rig.start("gateway-0", "gateway", TEST_ALONE="1")
    for process in (router, decode, gateway):
        process.until_links(2)
    gateway.until("process_ready")
    gateway.popen.send_signal(signal.SIGSTOP)
    router.until("peer_lost")
    decode.until("peer_lost")
    gateway.popen.send_signal(signal.SIGCONT)
    gateway.until_links(4, or_event="process_ending")
    if gateway.seen("process_ending"):
        assert gateway.wait() == 75
    else:
        router.until_links(3)
        decode.until_links(3)
    assert router.popen.poll() is None
    assert decode.popen.poll() is None
