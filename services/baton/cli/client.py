"""Asks a gateway over HTTP, as any client would, with nothing but the standard library.

Decides how the address in the cluster's record is reached (TCP or a Unix socket), how an SSE stream
is read, and that one which breaks is resumed. Closing a stream in the middle cancels the request.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from baton.cli.terminal import CommandError, ExitCode, counted
from baton.runtime.dirs import run_dir_path
from baton.runtime.settings import Config

UNIX_SCHEME = "http+unix"
#: How long a request waits for this client when its connection breaks.
RESUME_S = 60
RESUME_PAUSE_S = 0.3


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer."""

    text: str
    since_start_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known when a stream ended."""

    finish: str | None
    tokens: int
    ttft_s: float
    seconds: float

    def summary(self) -> str:
        """Return the figures in words."""
        rate = (self.tokens - 1) / (self.seconds - self.ttft_s) if self.tokens > 1 else 0.0
        return (
            f"{counted(self.tokens, 'token')}, first after {self.ttft_s * 1000:.0f} ms, then "
            f"{rate:.1f} tokens/s ({self.finish or 'no finish reason'})"
        )


Pieces = Generator[Delta | Answer, None, None]


class GatewayClient:
    """One gateway; every call opens a connection of its own."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def health(self) -> tuple[bool, str]:
        """Return whether the gateway can serve now, and its own words if not."""
        try:
            status, body = self._get("/health", timeout=2.0)
        except (OSError, http.client.HTTPException) as error:
            return False, f"gateway does not answer yet ({error})"
        return status == http.client.OK, _health_words(body)

    def models(self) -> list[str]:
        """Return the names of the served models."""
        status, body = self._get("/v1/models", timeout=5.0)
        if status != http.client.OK:
            raise CommandError(f"{self._url}: {_error_text(status, body)}")
        return [str(model["id"]) for model in json.loads(body)["data"]]

    def stream_chat(
        self, messages: list[dict[str, str]], *, model: str, max_tokens: int, temperature: float
    ) -> Pieces:
        """Yield the pieces of the answer as they come, and an :class:`Answer` at the end.

        A connection that breaks is followed by another one, as long as the request is kept. Closing
        the iterator early cancels the request.
        """
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        stream = _Stream(time.monotonic())
        try:
            headers = {**self._headers, "X-Baton-Resume": str(RESUME_S)}
            path, text = "/v1/chat/completions", json.dumps(body)
            yield from self._read(stream, "POST", path, text, headers)
            while not stream.done:
                self._wait_to_resume(stream)
                path = f"/v1/requests/{stream.token}/events"
                headers = {**self._headers, "Last-Event-ID": stream.last_id}
                yield from self._read(stream, "GET", path, None, headers)
        finally:
            if stream.token and not stream.done:
                self._cancel(stream.token)

    def _read(
        self,
        stream: _Stream,
        method: str,
        path: str,
        body: str | None,
        headers: dict[str, str],
    ) -> Pieces:
        """Yield what one connection brings; one that breaks may be followed by another."""
        connection = self._connect(timeout=None)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            if response.status == http.client.SERVICE_UNAVAILABLE and stream.token:
                return
            if response.status != http.client.OK:
                raise CommandError(_error_text(response.status, response.read()))
            stream.token = response.headers.get("X-Baton-Resume-Token") or stream.token
            for piece in stream.read(response):
                stream.broken_at = None
                yield piece
        except (OSError, http.client.HTTPException) as error:
            stream.trouble = str(error)
        finally:
            connection.close()

    def _wait_to_resume(self, stream: _Stream) -> None:
        """Wait a moment before the next try; raise when there is nothing to resume any more."""
        now = time.monotonic()
        stream.broken_at = stream.broken_at or now
        if not stream.token or now - stream.broken_at > RESUME_S:
            raise CommandError(f"the stream from {self._url} broke: {stream.trouble}")
        time.sleep(RESUME_PAUSE_S)

    def _cancel(self, token: str) -> None:
        """Nobody wants the rest. Without an answer it ends with its window."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = self._connect(timeout=2.0)
            try:
                connection.request("DELETE", f"/v1/requests/{token}", headers=self._headers)
                connection.getresponse().read()
            finally:
                connection.close()

    def _get(self, path: str, timeout: float) -> tuple[int, bytes]:
        connection = self._connect(timeout)
        try:
            connection.request("GET", path, headers=self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _connect(self, timeout: float | None) -> http.client.HTTPConnection:
        parts = urlsplit(self._url)
        if parts.scheme == UNIX_SCHEME:
            return _UnixConnection(parts.path, timeout)
        return http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _Stream:
    """What is known of an answer, over all the connections that brought it."""

    def __init__(self, started: float) -> None:
        self.token = ""
        self.last_id = ""
        self.done = False
        self.trouble = "it ended without its end mark: the gateway went away"
        self.broken_at: float | None = None
        self._started = started
        self._first: float | None = None
        self._finish: str | None = None
        self._pieces = self._tokens = 0

    def read(self, lines: Iterable[bytes]) -> Pieces:
        """Yield the pieces of one connection's lines.

        Raises:
            CommandError: the request failed.
        """
        event_id = ""
        for line in lines:
            if line.startswith(b"id:"):
                event_id = line[3:].strip().decode()
            if not line.startswith(b"data:"):
                continue  # A comment that keeps the connection alive, or an event's end.
            data = line[5:].strip()
            if data == b"[DONE]":
                self.done = True
                yield self._answer()
                return
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                if event["error"].get("code") == "draining" and self.token:
                    return  # another gateway goes on
                self.done = True
                raise CommandError(f"the request failed: {event['error'].get('message')}")
            yield from self._pieces_of(event)
            self.last_id, event_id = event_id or self.last_id, ""

    def _pieces_of(self, event: dict[str, Any]) -> Pieces:
        if event.get("usage"):
            self._tokens = int(event["usage"]["completion_tokens"])
        for choice in event.get("choices", ()):
            self._finish = choice.get("finish_reason") or self._finish
            text = choice.get("delta", {}).get("content") or ""
            if text:
                now = time.monotonic() - self._started
                self._first = self._first or now
                self._pieces += 1
                yield Delta(text, now)

    def _answer(self) -> Answer:
        seconds = time.monotonic() - self._started
        return Answer(self._finish, self._tokens or self._pieces, self._first or seconds, seconds)


def _health_words(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]


def _error_text(status: int, body: bytes) -> str:
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {status})"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"


def reach(url: str) -> str:
    """Return the address as a person would type it, for messages."""
    parts = urlsplit(url)
    return f"Unix socket {Path(parts.path)}" if parts.scheme == UNIX_SCHEME else url


def no_cluster(config: Config, code: int = ExitCode.FAILED) -> CommandError:
    """Return the error of every command that needs a running cluster."""
    return CommandError(
        f"no cluster of {config.path or Path.cwd()} runs (looked into {run_dir_path(config)}): "
        "start one with `make up` or `baton up`, or ask from its folder or with its --config FILE",
        code,
    )
