"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

import orjson

from baton.gateway import sse
from baton.gateway.asgi import Request
from baton.gateway.chat import WholeFormat, answer_whole
from baton.gateway.errors import ApiError
from baton.gateway.fields import Fields
from baton.gateway.generation import Generation, Part
from baton.gateway.logprobs import completion_object
from baton.gateway.params import (
    check_model,
    completion_logprobs,
    read_wish,
    refuse_unsupported,
    with_logprobs,
)
from baton.gateway.recipe import Recipe
from baton.gateway.serving import Serving, new_id, now_s, read_fields, seed_of
from baton.gateway.tokens import ModelText

MAX_TOKENS_DEFAULT = 16


async def completions(serving: Serving, request: Request) -> None:
    """Complete one or several prompts, streaming or whole."""
    fields = await read_fields(serving, request)
    if fields.get("max_tokens") is None:
        fields = Fields({**fields.values, "max_tokens": MAX_TOKENS_DEFAULT})
    model = check_model(fields, serving.model_names)
    refuse_unsupported(fields)
    echo = _refuse_or_echo(fields)
    wish = read_wish(fields, serving.text, serving.limits, max_tokens_keys=("max_tokens",))
    wish = with_logprobs(wish, completion_logprobs(fields, serving.limits))
    if echo and wish.sampling.logprobs >= 0:
        raise fields.fail("echo", "with 'logprobs' is not supported yet")
    prompts = await serving.prompts.completion(fields)
    if len(prompts) * wish.n > serving.limits.choices_max * 4:
        raise fields.fail("n", "times the number of prompts is too large")
    recipe = Recipe(
        kind="completion",
        request_id=new_id("cmpl-"),
        model=model,
        created=now_s(),
        wish=wish,
        seed=seed_of(wish),
        prompts=serving.prompts_of(wish, prompts, "prompt"),
        echo=echo,
    )
    generation = serving.generate(recipe, request.traceparent)
    form = CompletionFormat(generation, serving.text, recipe)
    if wish.stream:
        await sse.stream(request, generation, form, serving.limits)
    else:
        await answer_whole(request, generation, form)


def _refuse_or_echo(fields: Fields) -> bool:
    if fields.text("suffix"):
        raise fields.fail("suffix", "is not supported yet")
    best_of = fields.integer("best_of", None, 1, 2**31)
    if best_of is not None and best_of != (fields.get("n") or 1):
        raise fields.fail("best_of", "other than 'n' is not supported yet")
    return fields.flag("echo")


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

    def opening(self) -> list[sse.Event]:
        """The echoed prompts, if asked for."""
        if not self._echoes:
            return []
        return [
            self._chunk(Part(index, text=self._echo(index)))
            for index in range(self._generation.count)
        ]

    def part(self, part: Part) -> list[sse.Event]:
        """A text chunk, a finish chunk, or both."""
        out: list[sse.Event] = []
        wants_tokens = self._wish.sampling.logprobs >= 0 or self._wish.return_token_ids
        if part.text or (wants_tokens and part.tokens):
            out.append(self._chunk(Part(part.index, part.text, part.tokens)))
        if part.finish is not None:
            out.append(self._chunk(Part(part.index, finish=part.finish)))
        return out

    def closing(self) -> list[sse.Event]:
        """The usage chunk, if wanted, and the end mark."""
        if not self._wish.include_usage:
            return [sse.DONE]
        usage = self._generation.usage().object()
        return [{**self._head, "choices": [], "usage": usage}, sse.DONE]

    def failure(self, error: ApiError) -> list[sse.Event]:
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
            chunk["usage"] = self._generation.usage().object()
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
