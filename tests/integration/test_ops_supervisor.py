"""Baton under a host's own supervisor, as deploy/supervisor says: its files, its commands."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from baton.cli.settings_file import free_port
from support.ledger_server import LedgerServer
from support.ops_cluster import ROOT, wait_until

DEPLOY = ROOT / "deploy" / "supervisor"
START_S = 60.0


@dataclass
class Host:
    """A folder that stands for the host's, and the supervisor that was started there."""

    folder: Path
    port: int
    popen: subprocess.Popen[bytes]

    def control(self, command: str) -> str:
        """Run one `supervisorctl` command; return what it printed."""
        program, file = _beside_python("supervisorctl"), self.folder / "supervisord.conf"
        done = subprocess.run(
            [program, "-c", str(file), *shlex.split(command)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr

    def healthy(self) -> bool:
        """Whether a request could be served now."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health").status_code == 200
        except httpx.HTTPError:
            return False

    def starts(self, name: str) -> int:
        """How often the worker ``name`` has been ready."""
        return (self.folder / "log" / f"{name}.log").read_text().count("process_ready")


def _cluster_name(folder: Path) -> str:
    """Return a name made of the folder's, whose underscores no cluster's name has."""
    return folder.name.replace("_", "-")


def _beside_python(command: str) -> str:
    return str(Path(sys.executable).parent / command)


def _block(kind: str) -> str:
    """Return the one block of that kind in the steps."""
    (found,) = re.findall(rf"( *)```{kind}\n(.*?)```", (DEPLOY / "README.md").read_text(), re.S)
    return textwrap.dedent(found[1])


@contextmanager
def started() -> Iterator[Host]:
    """Follow the steps in a folder of our own, with the fake engine; end all of it."""
    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as name, LedgerServer() as ledger:
        folder, port = Path(name), free_port("127.0.0.1")
        for each in ("log", "lib"):
            (folder / each).mkdir(mode=0o700)
        places = {
            "/opt/baton/bin/python": sys.executable,
            "/etc/baton/": f"{folder}/",
            "/var/log/baton/": f"{folder}/log/",
            "/var/lib/baton/": f"{folder}/lib/",
            "/var/log/supervisord.log": f"{folder}/log/supervisord.log",
            "/run/supervisor": f"{folder}/supervisor",
            "redis://127.0.0.1:6379/0": ledger.url,
            "user = baton\n": "",
        }

        def write(file: str, text: str) -> None:
            for said, here in places.items():
                text = text.replace(said, here)
            (folder / file).write_text(text)

        write("baton.toml", _block("toml"))
        write("supervisord.conf", _block("ini"))
        write("baton.conf", (DEPLOY / "baton.conf").read_text())
        host = Host(folder, port, _supervisord(folder, port))
        try:
            yield host
        finally:
            if host.popen.poll() is None:
                host.popen.send_signal(signal.SIGTERM)
            host.popen.wait(60)
            for arena in Path("/dev/shm").glob(f"baton-{_cluster_name(folder)}.*.arena"):
                arena.unlink()


def _supervisord(folder: Path, port: int) -> subprocess.Popen[bytes]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
    settings = {
        "BATON_CLUSTER_NAME": _cluster_name(folder),
        "BATON_ENGINE_KIND": "fake",
        "BATON_ARENA_SIZE_MB": "8",
        "BATON_GATEWAY_PORT": str(port),
        "BATON_LIMITS_DRAIN_MS": "2000",
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("shared", "services")),
    }
    return subprocess.Popen(
        [_beside_python("supervisord"), "-n", "-s", "-c", str(folder / "supervisord.conf")],
        env={**kept, **settings},
        stdin=subprocess.DEVNULL,
    )


def test_the_steps_lead_to_a_cluster_and_the_commands_do_what_they_say() -> None:
    """It serves; a guard that dies comes back, a worker is replaced, one that was stopped stays
    down until it is started; at the end nothing is left."""
    with started() as host:
        wait_until(host.healthy, START_S, "the cluster serves")
        table = host.control("status")
        names = ("router-0", "decode-0", "prefill-0", "gateway-0", "baton-restarter")
        assert all(re.search(rf"^{name} +RUNNING", table, re.M) for name in names), table
        asked = {"model": "fake", "prompt": "hi", "max_tokens": 4}
        answer = httpx.post(f"http://127.0.0.1:{host.port}/v1/completions", json=asked, timeout=30)
        assert answer.status_code == 200, answer.text
        assert '"worker":"router-0"' in host.control("tail router-0")

        guard = int(host.control("pid decode-0"))
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: host.starts("decode-0") == 2, START_S, "a killed guard is back")
        assert int(host.control("pid decode-0")) not in (0, guard)

        before = host.starts("prefill-0")
        host.control("signal USR2 prefill-0")
        wait_until(lambda: host.starts("prefill-0") > before, START_S, "its successor serves")

        host.control("stop decode-0")
        wait_until(lambda: not host.healthy(), START_S, "there is no decode worker")
        assert "STOPPED" in host.control("status decode-0")
        host.control("start decode-0")
        wait_until(host.healthy, START_S, "it serves again")

        host.control("shutdown")
        assert host.popen.wait(60) == 0
        arenas = list(Path("/dev/shm").glob(f"baton-{_cluster_name(host.folder)}.*.arena"))
        assert arenas == []
