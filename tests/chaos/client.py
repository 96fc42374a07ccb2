"""Asks one item, on sockets of its own, and writes down what came and when.

Decides what a client knows: an answer with its end mark, an error that says why, a connection that
broke, or silence; and how a client comes back that may: with its token over SSE, or with its
idempotency key. It judges nothing. (Over a WebSocket: ``sockets.py``.)
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
import zlib
from collections.abc import AsyncIterator
from typing import Any

from chaos import sockets
from chaos.catalogue import Back
from chaos.heard import HOST, Cut, Heard, Later, Left

#: Who comes back waits so long first.
AGAIN_S = 0.1
RESUME_S = 20
_NOT_NOW = frozenset({429, 503})


async def ask(heard: Heard, port: int, deadline_s: float) -> Heard:
    """Send its item and take what comes, at most ``deadline_s``; fills and returns ``heard``."""
    heard.sent_at = time.monotonic()
    try:
        async with asyncio.timeout(deadline_s):
            while not await _turn(heard, port):
                heard.comebacks += 1
                await asyncio.sleep(AGAIN_S)
    except TimeoutError:
        heard.silent = True
    except Left:
        heard.left = True
    except (OSError, asyncio.IncompleteReadError, Cut) as error:
        heard.broken = repr(error)
    heard.ended_at = time.monotonic()
    return heard


async def _turn(heard: Heard, port: int) -> bool:
    """Use one connection; return whether all was said, or it has to come back."""
    back = heard.item.back
    try:
        await (sockets.converse if back is Back.SOCKET else _converse)(heard, port)
    except Later:
        return False
    except (OSError, asyncio.IncompleteReadError, Cut) as error:
        if back is Back.NO:
            raise
        heard.trouble = repr(error)
        return False
    return True


async def _converse(heard: Heard, port: int) -> None:
    item = heard.item
    reader, writer = await asyncio.open_connection(HOST, port, limit=2**20)
    try:
        writer.write(_request(heard))
        await writer.drain()
        if item.leaves_after == 0:
            await asyncio.sleep(0.002 * (zlib.crc32(item.name.encode()) % 40))
            raise Left
        heard.status, headers = await _head(reader)
        heard.token = headers.get("x-baton-resume-token", heard.token)
        if heard.status == 204:
            heard.done = True
        elif heard.status != 200 or not item.stream:
            _take_whole(heard, await _whole_body(reader, headers))
        else:
            async for line in _lines(reader):
                if _take_line(heard, line):
                    return
            raise Cut("no end mark")
    finally:
        # An abort, not a close: unread bytes are thrown away and nobody waits.
        writer.transport.abort()


def _request(heard: Heard) -> bytes:
    item = heard.item
    if item.back is Back.TOKEN and heard.token:
        last = f"Last-Event-ID: {heard.last_id}\r\n" if heard.last_id else ""
        path = f"/v1/requests/{heard.token}/events"
        return f"GET {path} HTTP/1.1\r\nHost: x\r\n{last}Connection: close\r\n\r\n".encode()
    heard.start_over()
    body = json.dumps(item.body).encode()
    more = f"X-Baton-Resume: {RESUME_S}\r\n" if item.back is Back.TOKEN else ""
    if item.back is not Back.NO:
        heard.key = heard.key or uuid.uuid4().hex
        more += f"Idempotency-Key: {heard.key}\r\n"
    head = (
        f"POST {item.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


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
        raise Cut(f"status {heard.status} with {raw[:80]!r}") from None
    if heard.status != 200:
        _take_error(heard, parsed["error"])
        return
    heard.id = parsed["id"]
    answer = heard.answer
    answer.usage = parsed["usage"]
    # Of several choices one after the other, so that a token of one in another's place shows.
    for choice in sorted(parsed["choices"], key=lambda each: each["index"]):
        answer.ids += choice["token_ids"]
        answer.text += choice["message"]["content"] if "message" in choice else choice["text"]
        answer.finish = f"{answer.finish or ''} {choice['finish_reason']}".strip()
        answer.logprobs += _logprobs(choice)
    heard.arrived(len(answer.ids))
    heard.done = True


def _take_error(heard: Heard, error: dict[str, Any]) -> None:
    """Take an error; raise if its client is to come again."""
    if heard.item.back is not Back.NO:
        code = error.get("code")
        if code == "draining" and heard.status == 200:
            raise Later  # another gateway goes on
        if heard.comebacks and heard.status in _NOT_NOW:
            raise Later
        if code == "resume_unknown":
            heard.forget()
            raise Later
    heard.error = error


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
    if line.startswith(b"id: "):
        heard.next_id = line[4:].strip().decode()
    if not line.startswith(b"data: "):
        return False
    heard.last_id = heard.next_id or heard.last_id
    if line.startswith(b"data: [DONE]"):
        heard.done = True
        return True
    event = json.loads(line[6:])
    heard.id = event.get("id", heard.id)
    if "error" in event:
        _take_error(heard, event["error"])
        return True
    answer = heard.answer
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or []
        answer.ids += ids
        heard.arrived(len(answer.ids))
        answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        answer.finish = choice.get("finish_reason") or answer.finish
        answer.logprobs += _logprobs(choice)
    leaves = heard.item.leaves_after
    if leaves is not None and len(answer.ids) >= leaves:
        raise Left
    return False
