"""A response's objects and events, with their sequence numbers.

The same over HTTP and over a socket; a response has one choice, and one item with one part.
"""

from __future__ import annotations

from typing import Any

import orjson

from baton.gateway.errors import ApiError
from baton.gateway.events import Event
from baton.gateway.generation import Generation, Part
from baton.gateway.recipe import Recipe
from baton.gateway.whole import WholeFormat


class ResponseFormat(WholeFormat):
    """A response's object, and its events with their sequence numbers."""

    def __init__(self, generation: Generation, recipe: Recipe) -> None:
        super().__init__()
        self._generation = generation
        self._recipe = recipe
        self._item_id = recipe.item_id
        self._sequence = 0
        self._text: list[str] = []
        self._finish = ""

    # --- events ---------------------------------------------------------------------------------

    def opening(self) -> list[Event]:
        """Return the events before the first text."""
        where = {"output_index": 0}
        part = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
            self._event("response.output_item.added", **where, item=self._item("in_progress", [])),
            self._event("response.content_part.added", **part, part=_text_part("")),
        ]

    def part(self, part: Part) -> list[Event]:
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

    def closing(self) -> list[Event]:
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

    def failure(self, error: ApiError) -> list[Event]:
        """Return the event of a failure in mid-stream."""
        response = self._response("failed")
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        return [self._event("response.failed", response=response)]

    def cancelled(self) -> list[Event]:
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
        usage = self._generation.usage()
        sampling, shown = self._recipe.wish.sampling, self._recipe.shown
        return {
            "id": self._recipe.request_id,
            "object": "response",
            "created_at": self._recipe.created,
            "status": status,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "instructions": shown["instructions"],
            "max_output_tokens": shown["max_output_tokens"],
            "model": self._recipe.model,
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


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
