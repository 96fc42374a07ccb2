"""One streamed answer as it comes in: what of it counts as a token, and when it was there.

Decides how a stream is read. A *piece* is an event that brings a token, even one without text: half
a character is held back until the rest is there, and its token was in time all the same. A gap is
the time between two pieces at the client's socket, on the client's clock. A piece is one token
unless the server lagged and sent several at once, which ``tokens`` by ``pieces`` shows.
"""

from __future__ import annotations

from typing import Any

import orjson

_DATA = b"data:"
_DONE = b"[DONE]"


class Answer:
    """What one request brought. Times are monotonic, in seconds."""

    __slots__ = (
        "_buffer",
        "arrivals",
        "cached_tokens",
        "done",
        "ended_at",
        "error",
        "finish",
        "ids",
        "prompt_tokens",
        "retry_after",
        "sent_at",
        "status",
        "text",
        "usage_tokens",
    )

    def __init__(self, sent_at: float) -> None:
        self.sent_at = sent_at
        self.ended_at = 0.0
        self.status = 0
        self.error = ""
        self.arrivals: list[float] = []
        """Of each piece."""
        self.ids: list[int] = []
        """If the server tells them."""
        self.text: list[str] = []
        self.usage_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish = ""
        self.retry_after = False
        self.done = False
        """The stream ended as one should: with its end mark."""
        self._buffer = b""

    @property
    def tokens(self) -> int:
        """Output tokens: as the server counted them, else its ids, else the pieces."""
        if self.usage_tokens is not None:
            return self.usage_tokens
        return len(self.ids) or len(self.arrivals)

    @property
    def refused(self) -> bool:
        """Whether the server said that it does not want it now."""
        return self.status in (429, 503)

    @property
    def ok(self) -> bool:
        """Whether it is a whole answer."""
        return self.done and not self.error and self.status == 200 and bool(self.arrivals)

    def feed(self, data: bytes, now: float) -> None:
        """Take in a part of the body."""
        if self.status != 200:
            self._buffer += data[: 4_096 - len(self._buffer)]
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._event(line[len(_DATA) :].strip(), now)

    def end(self, now: float, error: str = "") -> None:
        """The response is complete, or ended with ``error``."""
        self.ended_at = now
        if error:
            self.error = self.error or error
        elif self.status != 200:
            self.error = self.error or f"HTTP {self.status}: {_words(self._buffer)}"
        elif not self.done and not self.error:
            self.error = "the stream ended without its end mark"
        self._buffer = b""

    def _event(self, payload: bytes, now: float) -> None:
        if payload == _DONE:
            self.done = True
            return
        try:
            event: dict[str, Any] = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self.error = self.error or "an event is no JSON"
            return
        if event.get("error"):
            self.error = self.error or _words(payload)
            return
        if usage := event.get("usage"):
            self.usage_tokens = usage.get("completion_tokens")
            self.prompt_tokens = usage.get("prompt_tokens")
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens")
        for choice in event.get("choices") or ():
            delta = choice.get("delta")
            text = choice.get("text") if delta is None else delta.get("content")
            thought = None if delta is None else delta.get("reasoning_content")
            ids = choice.get("token_ids")
            # A role chunk and a bare end bring none.
            held_back = choice.get("finish_reason") is None and "role" not in (delta or ())
            if text or ids or thought or held_back:
                self.arrivals.append(now)
            if text:
                self.text.append(text)
            if ids:
                self.ids += ids
            if choice.get("finish_reason"):
                self.finish = choice["finish_reason"]


def _words(body: bytes) -> str:
    """Return a server's error in a few words."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:200].decode(errors="replace")
    error = found.get("error", found) if isinstance(found, dict) else found
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:200]
