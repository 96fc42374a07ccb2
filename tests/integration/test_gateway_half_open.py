"""A client whose network is gone without a word, and one behind a proxy with default settings."""

from __future__ import annotations

import itertools
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.runtime.settings import GatewayConfig
from support.gateway_cluster import GatewayCluster, Script
from support.ops_cluster import wait_until

#: A namespace goes a moment after it was deleted: the next one has another network.
_NET = f"10.213.{os.getpid() % 250}"
HERE, THERE = f"{_NET}.1", f"{_NET}.2"
STALL_MS = 4_000
_CLIENT = """
import socket, sys, time
raw = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
body = (
    b'{"model":"fake","messages":[{"role":"user","content":"hi"}],'
    b'"stream":true,"max_tokens":8000}'
)
raw.sendall(
    b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-type: application/json\\r\\n"
    b"content-length: %d\\r\\n\\r\\n%s" % (len(body), body)
)
data = b""
while data.count(b'"content":"') < 4:
    data += raw.recv(65536)
sys.stdout.write("reading\\n")
sys.stdout.flush()
time.sleep(120)
"""


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@contextmanager
def network() -> Iterator[str]:
    """A network namespace with one cable to ours; yields its name."""
    name = f"baton-{os.getpid()}"
    if not shutil.which("ip") or _ip("netns", "add", name, check=False).returncode != 0:
        pytest.skip("network namespaces cannot be made here")
    mine, theirs = f"bt{os.getpid() % 10**6}a", f"bt{os.getpid() % 10**6}b"
    try:
        _ip("link", "add", mine, "type", "veth", "peer", "name", theirs, "netns", name)
        _ip("addr", "add", f"{HERE}/30", "dev", mine)
        _ip("link", "set", mine, "up")
        _ip("-n", name, "addr", "add", f"{THERE}/30", "dev", theirs)
        _ip("-n", name, "link", "set", theirs, "up")
        yield name
    finally:
        _ip("link", "del", mine, check=False)
        _ip("netns", "del", name)


def test_a_client_whose_cable_is_out_is_cut_in_time(tmp_path: Path) -> None:
    """(75) No FIN ever comes: small writes fill the kernel's buffer, and the work is cancelled."""
    script = Script(ids=tuple(b"token "), endless=True, step_s=0.02)
    config = GatewayConfig(host=HERE, port=0)
    limits = Limits(write_stall_ms=STALL_MS)
    with (
        network() as name,
        GatewayCluster(tmp_path, limits=limits, config=config, script=script) as cluster,
    ):
        command = ["ip", "netns", "exec", name, sys.executable, "-c", _CLIENT]
        client = subprocess.Popen(
            [*command, HERE, str(cluster.port)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert client.stdout is not None
            assert select.select([client.stdout], [], [], 20)[0], "the client hears nothing"
            assert client.stdout.readline() == "reading\n"
            (work,) = cluster.works.values()
            (link,) = [
                line for line in _ip("-n", name, "-br", "link").stdout.split() if "@" in line
            ]
            _ip("-n", name, "link", "set", link.partition("@")[0], "down")
            out = time.monotonic()
            wait_until(lambda: work.ended is not None, 4 * STALL_MS / 1000, "the request's end")
            seconds = time.monotonic() - out
        finally:
            client.kill()
            client.wait()
            client.stdout.close()
        assert work.ended is not None
        assert work.ended.reason in (Reason.CLIENT_DISCONNECTED, Reason.SLOW_READER)
        assert STALL_MS / 2000 < seconds < 2 * STALL_MS / 1000, seconds
        wait_until(lambda: not cluster.serving.connections, 5, "the connection's end")


_NGINX = """\
daemon off;
worker_processes 1;
error_log {folder}/error.log;
pid {folder}/nginx.pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://127.0.0.1:{upstream}; }}
    }}
}}
"""


@contextmanager
def nginx(upstream: int) -> Iterator[int]:
    """Run nginx with its default settings before the gateway; yields its port."""
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if binary is None:
        pytest.skip("nginx is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="baton-nginx-", dir="/tmp") as name:
        folder = Path(name)
        # Workers of an nginx that root starts are another user's.
        folder.chmod(0o777)
        settings = folder / "nginx.conf"
        settings.write_text(_NGINX.format(folder=folder, port=port, upstream=upstream))
        process = subprocess.Popen([binary, "-c", str(settings), "-e", str(folder / "early.log")])
        try:
            wait_until(lambda: _listens(port), 10, "nginx listens")
            yield port
        finally:
            process.terminate()
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_proxy_with_default_settings_passes_chunks_on(tmp_path: Path) -> None:
    """(85) Twenty tokens 100 ms apart arrive so behind nginx: it is told not to buffer."""
    script = Script(ids=tuple(b"abcdefghijklmnopqrst"), step_s=0.1)
    with (
        GatewayCluster(tmp_path, script=script) as cluster,
        nginx(cluster.port) as port,
    ):
        for attempt in range(3):
            gaps = _gaps(port)
            if len(gaps) >= 18 and min(gaps[1:]) > 0.04 and max(gaps[1:]) < 0.16:
                return
            assert attempt < 2, gaps


def _gaps(port: int) -> list[float]:
    """Return the times between two chunks of one answer, as the client's socket sees them."""
    body = b'{"model":"fake","messages":[{"role":"user","content":"hi"}],"stream":true}'
    times, data = [], b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        while b"[DONE]" not in data:
            data = raw.recv(65536)
            assert data, "the stream ended without its end mark"
            if b'"content":"' in data:
                times.append(time.monotonic())
    return [after - before for before, after in itertools.pairwise(times)]
