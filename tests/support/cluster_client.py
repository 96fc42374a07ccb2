"""A small HTTP client for tests of whole clusters: exact ids, and what happened on the way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any


@dataclass
class Answer:
    """One completion as its client saw it."""

    status: int = 0
    id: str = ""
    """The request's name in logs and ledger."""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    done: bool = False
    """The end mark came."""
    arrivals: list[float] = field(default_factory=list)
    seconds: float = 0.0
    on_id: Callable[[int], None] | None = None
    """Called with the number of ids so far, when some came."""
    on_begin: Callable[[str], None] | None = None
    broken: str = ""
    """The connection ended by itself."""

    @property
    def clear(self) -> bool:
        """Whether the client knows what became of its request."""
        return self.finish is not None or self.error is not None


def complete(
    port: int,
    model: str,
    prompt: Sequence[int] | str,
    *,
    on_id: Callable[[int], None] | None = None,
    on_begin: Callable[[str], None] | None = None,
    **fields: Any,
) -> Answer:
    """Stream one completion, greedy unless told otherwise; the ids come with it.

    ``on_id`` is called with the number of ids so far, ``on_begin`` with the request's id."""
    body = {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **fields,
    }
    answer = Answer(on_id=on_id, on_begin=on_begin)
    began = time.monotonic()
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        answer.status = response.status
        if response.status != 200:
            answer.error = json.loads(response.read())["error"]
        else:
            while line := response.readline():
                _take(answer, line)
    except (OSError, HTTPException) as error:
        answer.broken = repr(error)
    finally:
        connection.close()
    answer.seconds = time.monotonic() - began
    return answer


def _take(answer: Answer, line: bytes) -> None:
    if line.startswith(b"data: [DONE]"):
        answer.done = True
    elif line.startswith(b"data: "):
        event = json.loads(line[6:])
        if answer.on_begin is not None and "id" in event:
            answer.on_begin(event["id"])
            answer.on_begin = None
        answer.id = event.get("id", answer.id)
        answer.error = event.get("error", answer.error)
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices", ()):
            ids = choice.get("token_ids") or []
            if ids:
                answer.arrivals.append(time.monotonic())
            answer.ids += ids
            if ids and answer.on_id is not None:
                answer.on_id(len(answer.ids))
            answer.text += choice.get("text", "")
            answer.finish = choice.get("finish_reason") or answer.finish


def complete_all(
    port: int, model: str, prompts: Sequence[Sequence[int]], **fields: Any
) -> list[Answer]:
    """Stream all prompts at once."""
    answers: list[Answer | None] = [None] * len(prompts)

    def one(number: int) -> None:
        answers[number] = complete(port, model, prompts[number], **fields)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answer for answer in answers if answer is not None]


def get(port: int, path: str) -> tuple[int, bytes]:
    """Return status and body of a GET."""
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def metric(port: int, name: str, **labels: str) -> float:
    """Return the sum of all samples called ``name`` whose labels fit."""
    total = 0.0
    for line in get(port, "/metrics")[1].decode().splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
            total += float(value)
    return total
