"""Asks a gateway over HTTP, as any client would, with nothing but the standard library.

Decides how the address in the cluster's record is reached (TCP or a Unix socket) and how an SSE
stream is read. Closing a stream in the middle cancels the request.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from baton.cli.terminal import CommandError, ExitCode

UNIX_SCHEME = "http+unix"


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
            f"{self.tokens} tokens, first after {self.ttft_s * 1000:.0f} ms, then "
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

        Closing the iterator early closes the connection, which cancels the request.
        """
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = self._connect(timeout=None)
        try:
            started = time.monotonic()
            connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise CommandError(_error_text(response.status, response.read()))
            yield from _read_stream(response, started)
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(f"the stream from {self._url} broke: {error}") from None
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


def _read_stream(response: http.client.HTTPResponse, started: float) -> Pieces:
    first: float | None = None
    finish, pieces, tokens = None, 0, 0
    for line in response:
        if not line.startswith(b"data:"):
            continue  # A comment that keeps the connection alive, or the empty line after an event.
        data = line[5:].strip()
        if data == b"[DONE]":
            seconds = time.monotonic() - started
            yield Answer(finish, tokens or pieces, first or seconds, seconds)
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise CommandError(f"the request failed: {event['error'].get('message')}")
        if event.get("usage"):
            tokens = int(event["usage"]["completion_tokens"])
        for choice in event.get("choices", ()):
            finish = choice.get("finish_reason") or finish
            text = choice.get("delta", {}).get("content") or ""
            if text:
                now = time.monotonic() - started
                first = first or now
                pieces += 1
                yield Delta(text, now)
    raise CommandError("the stream ended without its end mark: the gateway went away")


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


def no_cluster() -> CommandError:
    """Return the error of every command that needs a running cluster."""
    return CommandError(
        "no cluster runs here; start one with `make up` or `baton up`", ExitCode.FAILED
    )
