"""Chat's objects: chunks of a stream and the whole completion."""

from __future__ import annotations

from typing import Any

import orjson

from baton.gateway.errors import ApiError
from baton.gateway.events import DONE, Event
from baton.gateway.generation import Generation, Part
from baton.gateway.logprobs import chat_entries
from baton.gateway.recipe import Recipe
from baton.gateway.tokens import ModelText
from baton.gateway.whole import WholeFormat


class ChatFormat(WholeFormat):
    """Chat's objects: chunks and the whole completion."""

    def __init__(self, generation: Generation, text: ModelText, recipe: Recipe) -> None:
        super().__init__()
        self._generation = generation
        self._text = text
        self._wish = recipe.wish
        self._head = {"id": recipe.request_id, "created": recipe.created, "model": recipe.model}

    def opening(self) -> list[Event]:
        """One role chunk a choice, in index order."""
        return [
            self._chunk(index, {"role": "assistant", "content": ""})
            for index in range(self._generation.count)
        ]

    def part(self, part: Part) -> list[Event]:
        """A content chunk, a finish chunk, or both."""
        out: list[Event] = []
        wants_tokens = self._wish.sampling.logprobs >= 0 or self._wish.return_token_ids
        if part.text or (wants_tokens and part.tokens):
            out.append(self._chunk(part.index, {"content": part.text}, part))
        if part.finish is not None:
            out.append(self._chunk(part.index, {}, end=part))
        return out

    def closing(self) -> list[Event]:
        """The usage chunk, if wanted, and the end mark."""
        if not self._wish.include_usage:
            return [DONE]
        usage = self._generation.usage().object()
        return [{**self._chunk_head(), "choices": [], "usage": usage}, DONE]

    def failure(self, error: ApiError) -> list[Event]:
        """One error event; no end mark."""
        return [{"error": error.object()}]

    def whole(self) -> bytes:
        choices = []
        for part in self.in_order():
            choice: dict[str, Any] = {
                "index": part.index,
                "message": {"role": "assistant", "content": part.text, "refusal": None},
                "logprobs": self._logprobs(part),
                "finish_reason": part.finish,
            }
            if self._wish.return_token_ids:
                choice["token_ids"] = [token.token_id for token in part.tokens]
            choices.append(choice)
        return orjson.dumps(
            {
                **self._head,
                "object": "chat.completion",
                "choices": choices,
                "usage": self._generation.usage().object(),
            }
        )

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        content: Part | None = None,
        end: Part | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(content) if content is not None else None,
            "finish_reason": end.finish if end is not None else None,
        }
        if content is not None and self._wish.return_token_ids:
            choice["token_ids"] = [token.token_id for token in content.tokens]
        chunk: dict[str, Any] = {**self._chunk_head(), "choices": [choice]}
        if self._wish.continuous_usage:
            part = content or end
            usage = part.usage if part is not None else None
            chunk["usage"] = (usage or self._generation.usage_before()).object()
        return chunk

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        if self._wish.sampling.logprobs < 0:
            return None
        return {"content": chat_entries(self._text, part.tokens), "refusal": None}
