"""POST /v1/completions."""

from __future__ import annotations

from baton.gateway.answering import answer
from baton.gateway.asgi import Request
from baton.gateway.fields import Fields
from baton.gateway.params import (
    check_model,
    completion_logprobs,
    read_wish,
    refuse_unsupported,
    with_logprobs,
)
from baton.gateway.serving import Serving, read_fields

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
    ready = serving.prompts_of(wish, prompts, "prompt")
    await answer(serving, request, serving.recipe("completion", model, wish, ready, echo=echo))


def _refuse_or_echo(fields: Fields) -> bool:
    if fields.text("suffix"):
        raise fields.fail("suffix", "is not supported yet")
    best_of = fields.integer("best_of", None, 1, 2**31)
    if best_of is not None and best_of != (fields.get("n") or 1):
        raise fields.fail("best_of", "other than 'n' is not supported yet")
    return fields.flag("echo")
