"""A real Redis-protocol server for tests, with the very configuration `baton up` uses.

``with LedgerServer() as server: RedisLedger(server.url, ...)``. The server can be stopped, killed,
frozen, thawed and started again on the same data; leaving the block ends it and removes its files.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from baton.ledger.embedded import LOG_NAME, server_command, server_url, socket_path

START_S = 10.0


class LedgerServer:
    """One server process and its directories (a short path, so that the socket's name fits)."""

    def __init__(self, run_dir: Path | None = None) -> None:
        self._own_dir = run_dir is None
        self.run_dir = run_dir or Path(tempfile.mkdtemp(prefix="bl-"))
        self.data_dir = self.run_dir / "data"
        self.url = server_url(self.run_dir)
        self.socket_path = socket_path(self.run_dir)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LedgerServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self, *extra: str) -> None:
        """Start the server and wait until it answers PING. ``extra``: options of its own."""
        assert self._process is None, "already started"
        self._process = subprocess.Popen(
            [*server_command(self.run_dir, self.data_dir), *extra],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            umask=0o077,
        )
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_S
        while self._ping() != b"+PONG\r\n":
            assert self._process is not None
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                log = self.run_dir / LOG_NAME
                text = log.read_text() if log.exists() else "(no log)"
                self.kill()
                raise RuntimeError(f"the ledger server did not start (exit code {code}):\n{text}")
            # Nothing announces a Unix socket; this is the bounded wait for it.
            time.sleep(0.005)

    def _ping(self) -> bytes:
        try:
            return self.command("PING")
        except OSError:
            return b""

    def command(self, *words: str | bytes) -> bytes:
        """Send one command on a connection of its own; return the first bytes of the answer."""
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        wire = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(START_S)
            connection.connect(str(self.socket_path))
            connection.sendall(wire)
            return connection.recv(1 << 16)

    def stop(self) -> None:
        """End the server in good order; its data stays."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the server; its data stays."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(timeout=START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the process (SIGSTOP) for the length of the block."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def freeze(self) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server and remove its files."""
        self.kill()
        if self._own_dir:
            shutil.rmtree(self.run_dir, ignore_errors=True)
