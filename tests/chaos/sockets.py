"""A client that asks over a WebSocket and comes back with its token.

Decides how a response's events become an answer: its ids are the events' sequence numbers, so that
one missing or told twice shows.
"""

from __future__ import annotations

import json
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from chaos.heard import HOST, Cut, Heard, Later

_ENDED = {"response.completed", "response.incomplete"}
#: Nothing was computed: over HTTP these are answered with 429 and 503.
_REFUSALS = {
    *("overloaded", "queue_full", "no_blocks", "no_router", "no_prefill_worker"),
    *("no_decode_worker", "ledger_unavailable", "draining"),
}


async def converse(heard: Heard, port: int) -> None:
    """Ask, or go on where it broke; return at the end."""
    url = f"ws://{HOST}:{port}/v1/responses"
    try:
        async with connect(
            url, proxy=None, open_timeout=None, ping_interval=None, close_timeout=0.5
        ) as socket:
            await socket.send(json.dumps(_message(heard)))
            async for text in socket:
                if _take(heard, json.loads(text)):
                    return
    except (WebSocketException, EOFError) as error:
        raise Cut(repr(error)) from None
    raise Cut("closed in the middle")


def _message(heard: Heard) -> dict[str, Any]:
    if not heard.token:
        heard.start_over()
        return heard.item.body
    resume = {"type": "response.resume", "resume_token": heard.token}
    return {**resume, "last_event_id": heard.last_id} if heard.last_id else resume


def _take(heard: Heard, event: dict[str, Any]) -> bool:
    kind, answer = event["type"], heard.answer
    if kind == "error":
        heard.status = event["status"]
        _take_error(heard, event["error"])
        return True
    if kind == "response.failed":
        error = event["response"]["error"]
        refused = error["code"] in _REFUSALS and not answer.text
        heard.status = 503 if refused else 200
        _take_error(heard, error)
        return True
    heard.status = 200
    heard.id = event["response_id"]
    heard.token = event.get("resume_token", heard.token)
    heard.last_id = event.get("event_id", heard.last_id)
    answer.ids.append(event["sequence_number"])
    if kind == "response.output_text.delta":
        answer.text += event["delta"]
        heard.arrived(len(answer.ids))
    if kind not in _ENDED:
        return False
    usage = event["response"]["usage"]
    answer.usage = {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
    }
    answer.finish = event["response"]["status"]
    heard.done = True
    return True


def _take_error(heard: Heard, error: dict[str, Any]) -> None:
    code = error.get("code")
    if code == "draining" or (heard.comebacks and heard.status in (429, 503)):
        raise Later
    if code == "resume_unknown":
        heard.forget()
        raise Later
    heard.error = error
