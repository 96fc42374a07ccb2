"""POST /v1/chat/completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import orjson

from baton.gateway import sse
from baton.gateway.asgi import Request, watched
from baton.gateway.errors import ApiError
from baton.gateway.generation import ClientLeft, Generation, Part
from baton.gateway.logprobs import chat_entries
from baton.gateway.params import (
    chat_logprobs,
    check_model,
    read_wish,
    refuse_unsupported,
    with_logprobs,
)
from baton.gateway.prompts import read_messages
from baton.gateway.recipe import Recipe
from baton.gateway.serving import Serving, new_id, now_s, read_fields, seed_of
from baton.gateway.tokens import ModelText


async def chat_completions(serving: Serving, request: Request) -> None:
    """Answer a chat, streaming or whole."""
    fields = await read_fields(serving, request)
    model = check_model(fields, serving.model_names)
    refuse_unsupported(fields)
    messages = read_messages(fields)
    keys = ("max_completion_tokens", "max_tokens")
    wish = read_wish(fields, serving.text, serving.limits, max_tokens_keys=keys)
    wish = with_logprobs(wish, chat_logprobs(fields, serving.limits))
    prompt = await serving.prompts.chat(fields, messages, "messages")
    recipe = Recipe(
        kind="chat",
        request_id=new_id("chatcmpl-"),
        model=model,
        created=now_s(),
        wish=wish,
        seed=seed_of(wish),
        prompts=serving.prompts_of(wish, [prompt], "messages"),
    )
    generation = serving.generate(recipe, request.traceparent)
    form = ChatFormat(generation, serving.text, recipe)
    if wish.stream:
        await sse.stream(request, generation, form, serving.limits)
    else:
        await answer_whole(request, generation, form)


async def answer_whole(request: Request, generation: Generation, form: WholeFormat) -> None:
    """Collect everything, then answer once; a client that leaves cancels."""
    try:
        async with watched(request, generation.stream):
            while not generation.done:
                for part in await generation.parts(60.0):
                    form.collect(part)
            await request.respond(200, form.whole())
    except ClientLeft:
        return


class WholeFormat(ABC):
    """Collects parts and makes one answer of them."""

    def __init__(self) -> None:
        self._parts: dict[int, Part] = {}

    def collect(self, part: Part) -> None:
        """Add what a choice gained."""
        whole = self._parts.setdefault(part.index, Part(part.index))
        whole.text += part.text
        whole.tokens += part.tokens
        whole.finish = part.finish or whole.finish

    @abstractmethod
    def whole(self) -> bytes:
        """Return the answer's body."""

    def in_order(self) -> list[Part]:
        """Return the choices by index."""
        return [self._parts[index] for index in sorted(self._parts)]


class ChatFormat(WholeFormat):
    """Chat's objects: chunks and the whole completion."""

    def __init__(self, generation: Generation, text: ModelText, recipe: Recipe) -> None:
        super().__init__()
        self._generation = generation
        self._text = text
        self._wish = recipe.wish
        self._head = {"id": recipe.request_id, "created": recipe.created, "model": recipe.model}

    def opening(self) -> list[sse.Event]:
        """One role chunk a choice, in index order."""
        return [
            self._chunk(index, {"role": "assistant", "content": ""})
            for index in range(self._generation.count)
        ]

    def part(self, part: Part) -> list[sse.Event]:
        """A content chunk, a finish chunk, or both."""
        out: list[sse.Event] = []
        wants_tokens = self._wish.sampling.logprobs >= 0 or self._wish.return_token_ids
        if part.text or (wants_tokens and part.tokens):
            out.append(self._chunk(part.index, {"content": part.text}, part))
        if part.finish is not None:
            out.append(self._chunk(part.index, {}, finish=part.finish))
        return out

    def closing(self) -> list[sse.Event]:
        """The usage chunk, if wanted, and the end mark."""
        if not self._wish.include_usage:
            return [sse.DONE]
        usage = self._generation.usage().object()
        return [{**self._chunk_head(), "choices": [], "usage": usage}, sse.DONE]

    def failure(self, error: ApiError) -> list[sse.Event]:
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
        part: Part | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(part) if part is not None else None,
            "finish_reason": finish,
        }
        if part is not None and self._wish.return_token_ids:
            choice["token_ids"] = [token.token_id for token in part.tokens]
        chunk: dict[str, Any] = {**self._chunk_head(), "choices": [choice]}
        if self._wish.continuous_usage:
            chunk["usage"] = self._generation.usage().object()
        return chunk

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        if self._wish.sampling.logprobs < 0:
            return None
        return {"content": chat_entries(self._text, part.tokens), "refusal": None}
