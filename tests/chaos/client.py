"""Asks one item over HTTP, on a socket of its own, and writes down what came and when.

Decides what a client knows: an answer with its end mark, an error that says why, a connection that
broke, or silence. It judges nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from chaos.catalogue import Item, Whole

HOST = "127.0.0.1"


@dataclass(slots=True)
class Heard:
    """One request as its client saw it."""

    item: Item
    sent_at: float = 0.0
    ended_at: float = 0.0
    status: int = 0
    id: str = ""
    answer: Whole = field(default_factory=Whole)
    arrivals: list[float] = field(default_factory=list)
    """When tokens came."""
    done: bool = False
    """The whole answer came, with its end mark."""
    left: bool = False
    """The client hung up, as the item says."""
    error: dict[str, Any] | None = None
    broken: str = ""
    """The connection ended before the answer did."""
    silent: bool = False
    """Nothing ended it within the deadline."""
    through_proxy: bool = False


class _Left(Exception):
    """The client has enough."""


async def ask(heard: Heard, port: int, deadline_s: float) -> Heard:
    """Send its item and take what comes, at most ``deadline_s``; fills and returns ``heard``."""
    heard.sent_at = time.monotonic()
    try:
        async with asyncio.timeout(deadline_s):
            await _converse(heard, port)
    except TimeoutError:
        heard.silent = True
    except _Left:
        heard.left = True
    except (OSError, asyncio.IncompleteReadError, _Cut) as error:
        heard.broken = repr(error)
    heard.ended_at = time.monotonic()
    return heard


class _Cut(Exception):
    """The stream ended without its end."""


async def _converse(heard: Heard, port: int) -> None:
    item = heard.item
    reader, writer = await asyncio.open_connection(HOST, port, limit=2**20)
    try:
        body = json.dumps(item.body).encode()
        head = (
            f"POST {item.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        if item.leaves_after == 0:
            await asyncio.sleep(0.002 * (zlib.crc32(item.name.encode()) % 40))
            raise _Left
        heard.status, headers = await _head(reader)
        if heard.status != 200 or not item.stream:
            _take_whole(heard, await _whole_body(reader, headers))
        else:
            async for line in _lines(reader):
                if _take_line(heard, line):
                    return
            raise _Cut("no end mark")
    finally:
        # An abort, not a close: unread bytes are thrown away and nobody waits.
        writer.transport.abort()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in raw[1:] if line)
    return int(raw[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _whole_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return b"".join([chunk async for chunk in _chunks(reader)])


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in _chunks(reader):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


def _take_whole(heard: Heard, raw: bytes) -> None:
    try:
        parsed = json.loads(raw)
    except ValueError:
        raise _Cut(f"status {heard.status} with {raw[:80]!r}") from None
    if heard.status != 200:
        heard.error = parsed["error"]
        return
    heard.id = parsed["id"]
    choice = parsed["choices"][0]
    heard.answer.ids = choice["token_ids"]
    heard.answer.text = choice["message"]["content"] if "message" in choice else choice["text"]
    heard.answer.finish = choice["finish_reason"]
    heard.answer.usage = parsed["usage"]
    heard.answer.logprobs = _logprobs(choice)
    heard.arrivals.append(time.monotonic())
    heard.done = True


def _logprobs(choice: dict[str, Any]) -> list[Any]:
    """Return one entry a token, however the tokens were grouped."""
    found = choice.get("logprobs")
    if not found:
        return []
    if "content" in found:
        return list(found["content"])
    return list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))


def _take_line(heard: Heard, line: bytes) -> bool:
    """Take one line of the stream; return whether it was the last."""
    if not line.startswith(b"data: "):
        return False
    if line.startswith(b"data: [DONE]"):
        heard.done = True
        return True
    event = json.loads(line[6:])
    heard.id = event.get("id", heard.id)
    if "error" in event:
        heard.error = event["error"]
        return True
    answer = heard.answer
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or []
        answer.ids += ids
        if ids:
            heard.arrivals.append(time.monotonic())
        answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        answer.finish = choice.get("finish_reason") or answer.finish
        answer.logprobs += _logprobs(choice)
    leaves = heard.item.leaves_after
    if leaves is not None and len(answer.ids) >= leaves:
        raise _Left
    return False
