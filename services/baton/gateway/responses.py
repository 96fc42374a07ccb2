"""The Responses API: its objects and events, and POST /v1/responses.

Decides what a response looks like; ``websocket.py`` sends the same events over a socket. Nothing is
stored: ``previous_response_id`` is refused, ``store`` is accepted and without effect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from baton.gateway import sse
from baton.gateway.asgi import Request
from baton.gateway.chat import WholeFormat, answer_whole
from baton.gateway.errors import ApiError, invalid, not_supported
from baton.gateway.fields import Fields
from baton.gateway.generation import Generation, Part
from baton.gateway.params import check_model, read_wish
from baton.gateway.prompts import read_messages
from baton.gateway.recipe import Recipe
from baton.gateway.serving import Serving, new_id, now_s, read_fields, seed_of


async def responses(serving: Serving, request: Request) -> None:
    """Answer one response, streaming or whole."""
    fields = await read_fields(serving, request)
    form = await start_response(serving, fields, request.traceparent)
    if form.recipe.wish.stream:
        await sse.stream(request, form.generation, form, serving.limits)
    else:
        await answer_whole(request, form.generation, form)


async def start_response(serving: Serving, fields: Fields, traceparent: str) -> ResponseFormat:
    """Check and submit one response.

    Raises:
        ApiError: it cannot be served.
    """
    model = check_model(fields, serving.model_names)
    _refuse_unsupported(fields)
    messages = _read_input(fields)
    wish = read_wish(fields, serving.text, serving.limits, max_tokens_keys=("max_output_tokens",))
    wish = replace(wish, n=1)
    prompt = await serving.prompts.chat(fields, messages, "input")
    recipe = Recipe(
        kind="response",
        request_id=new_id("resp_"),
        model=model,
        created=now_s(),
        wish=wish,
        seed=seed_of(wish),
        prompts=serving.prompts_of(wish, [prompt], "input"),
        item_id=new_id("msg_"),
        shown={
            "instructions": fields.get("instructions"),
            "max_output_tokens": fields.get("max_output_tokens"),
            "metadata": _metadata(fields),
        },
    )
    return ResponseFormat(serving.generate(recipe, traceparent), recipe)


def _refuse_unsupported(fields: Fields) -> None:
    for key in ("previous_response_id", "conversation", "prompt"):
        if fields.get(key) is not None:
            raise not_supported(key, f"'{key}'")
    if fields.flag("background"):
        raise not_supported("background", "'background'")
    tools = fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise fields.fail("tools", "must be a list")
    if tools:
        raise not_supported("tools", "'tools'")
    if fields.get("tool_choice") not in (None, "none", "auto"):
        raise fields.fail("tool_choice", "needs 'tools', which is not supported yet")
    text = fields.object("text")
    text_format = text.object("format") if text is not None else None
    if text_format is not None and text_format.text("type", "text") != "text":
        raise not_supported("text.format", "a 'text.format' other than 'text'")
    if fields.integer("n", 1, 1, 2**31) != 1:
        raise fields.fail("n", "must be 1 for a response")


def _read_input(fields: Fields) -> list[dict[str, Any]]:
    """Turn ``input`` and ``instructions`` into messages."""
    value = fields.get("input")
    if value is None:
        raise invalid("input", "'input' is required")
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise fields.fail("input", "must be a string or a list of messages")
    for i, item in enumerate(items):
        if isinstance(item, dict) and item.get("type", "message") != "message":
            raise not_supported(f"input[{i}].type", f"an input of type {str(item['type'])[:40]!r}")
    try:
        messages = read_messages(Fields({"messages": items}))
    except ApiError as error:
        param = (error.param or "").replace("messages", "input", 1)
        raise invalid(param, error.message.replace("messages", "input", 1)) from None
    instructions = fields.text("instructions")
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    return messages


class ResponseFormat(WholeFormat):
    """A response's object, and its events with their sequence numbers."""

    def __init__(self, generation: Generation, recipe: Recipe) -> None:
        super().__init__()
        self.generation = generation
        self.recipe = recipe
        self._item_id = recipe.item_id
        self._sequence = 0
        self._text: list[str] = []
        self._finish = ""

    @property
    def response_id(self) -> str:
        return self.recipe.request_id

    # --- events ---------------------------------------------------------------------------------

    def opening(self) -> list[sse.Event]:
        """Return the events before the first text."""
        where = {"output_index": 0}
        part = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
            self._event("response.output_item.added", **where, item=self._item("in_progress", [])),
            self._event("response.content_part.added", **part, part=_text_part("")),
        ]

    def part(self, part: Part) -> list[sse.Event]:
        """Return the events of new text."""
        self._finish = part.finish or self._finish
        if not part.text:
            return []
        self._text.append(part.text)
        return [
            self._event(
                "response.output_text.delta",
                item_id=self._item_id,
                output_index=0,
                content_index=0,
                delta=part.text,
                logprobs=[],
            )
        ]

    def closing(self) -> list[sse.Event]:
        """Return the events after the last text; the last one holds the whole response."""
        text = "".join(self._text)
        where: dict[str, Any] = {
            "item_id": self._item_id,
            "output_index": 0,
            "content_index": 0,
        }
        status = self._status()
        item = self._item(status, [_text_part(text)])
        return [
            self._event("response.output_text.done", **where, text=text, logprobs=[]),
            self._event("response.content_part.done", **where, part=_text_part(text)),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{status}", response=self._response(status, [item])),
        ]

    def failure(self, error: ApiError) -> list[sse.Event]:
        """Return the event of a failure in mid-stream."""
        response = self._response("failed")
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        return [self._event("response.failed", response=response)]

    def cancelled(self) -> list[sse.Event]:
        """Return the terminal event of a response its client cancelled."""
        text = "".join(self._text)
        item = self._item("incomplete", [_text_part(text)])
        return [self._event("response.cancelled", response=self._response("cancelled", [item]))]

    # --- objects --------------------------------------------------------------------------------

    def whole(self) -> bytes:
        for part in self.in_order():
            self.part(part)
        status = self._status()
        item = self._item(status, [_text_part("".join(self._text))])
        return orjson.dumps(self._response(status, [item]))

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._sequence, **values}
        self._sequence += 1
        return event

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _response(self, status: str, output: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        ended = status in ("completed", "incomplete")
        usage = self.generation.usage()
        sampling, shown = self.recipe.wish.sampling, self.recipe.shown
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.recipe.created,
            "status": status,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "instructions": shown["instructions"],
            "max_output_tokens": shown["max_output_tokens"],
            "model": self.recipe.model,
            "output": output or [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
            if ended
            else None,
            "user": None,
            "metadata": shown["metadata"],
        }


def _metadata(fields: Fields) -> dict[str, str]:
    value = fields.get("metadata")
    return value if isinstance(value, dict) else {}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
