"""POST /v1/chat/completions."""

from __future__ import annotations

from baton.gateway.answering import answer
from baton.gateway.asgi import Request
from baton.gateway.params import (
    chat_logprobs,
    check_model,
    read_wish,
    refuse_unsupported,
    with_logprobs,
)
from baton.gateway.prompts import read_messages
from baton.gateway.serving import Serving, read_fields


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
    prompts = serving.prompts_of(wish, [prompt], "messages")
    await answer(serving, request, serving.recipe("chat", model, wish, prompts))
