"""``text_completion`` objects: chunks of a stream and the whole completion."""

from __future__ import annotations

from typing import Any

import orjson

from baton.gateway.errors import ApiError
from baton.gateway.events import DONE, Event
from baton.gateway.generation import Generation, Part
from baton.gateway.logprobs import completion_object
from baton.gateway.recipe import Recipe
from baton.gateway.tokens import ModelText
from baton.gateway.whole import WholeFormat


class CompletionFormat(WholeFormat):
    """``text_completion`` objects."""

    def __init__(self, generation: Generation, text: ModelText, recipe: Recipe) -> None:
        super().__init__()
        self._generation = generation
        self._text = text
        self._wish = recipe.wish
        prompts = recipe.prompts if recipe.echo else ()
        self._echoes = [text.text_of(prompt.list(), skip_special=True) for prompt in prompts]
        self._head = {
            "id": recipe.request_id,
            "object": "text_completion",
            "created": recipe.created,
            "model": recipe.model,
        }

    def opening(self) -> list[Event]:
        """The echoed prompts, if asked for."""
        if not self._echoes:
            return []
        return [
            self._chunk(Part(index, text=self._echo(index)))
            for index in range(self._generation.count)
        ]

    def part(self, part: Part) -> list[Event]:
        """A text chunk, a finish chunk, or both."""
        out: list[Event] = []
        wants_tokens = self._wish.sampling.logprobs >= 0 or self._wish.return_token_ids
        if part.text or (wants_tokens and part.tokens):
            text = Part(part.index, part.text, part.tokens, usage=part.usage)
            out.append(self._chunk(text))
        if part.finish is not None:
            end = Part(part.index, finish=part.finish, usage=part.usage)
            out.append(self._chunk(end))
        return out

    def closing(self) -> list[Event]:
        """The usage chunk, if wanted, and the end mark."""
        if not self._wish.include_usage:
            return [DONE]
        usage = self._generation.usage().object()
        return [{**self._head, "choices": [], "usage": usage}, DONE]

    def failure(self, error: ApiError) -> list[Event]:
        """One error event; no end mark."""
        return [{"error": error.object()}]

    def whole(self) -> bytes:
        choices = [
            self._choice(Part(p.index, self._echo(p.index) + p.text, p.tokens, p.finish))
            for p in self.in_order()
        ]
        usage = self._generation.usage().object()
        return orjson.dumps({**self._head, "choices": choices, "usage": usage})

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._wish.n] if self._echoes else ""

    def _chunk(self, part: Part) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": [self._choice(part)]}
        if self._wish.continuous_usage:
            chunk["usage"] = (part.usage or self._generation.usage_before()).object()
        return chunk

    def _choice(self, part: Part) -> dict[str, Any]:
        logprobs = None
        if self._wish.sampling.logprobs >= 0 and part.tokens:
            logprobs = completion_object(self._text, part.tokens, len(self._echo(part.index)))
        choice: dict[str, Any] = {
            "index": part.index,
            "text": part.text,
            "logprobs": logprobs,
            "finish_reason": part.finish,
        }
        if self._wish.return_token_ids:
            choice["token_ids"] = [token.token_id for token in part.tokens]
        return choice
