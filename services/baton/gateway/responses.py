"""POST /v1/responses: what a response may ask for.

Nothing is stored: ``previous_response_id`` is refused, ``store`` is accepted and without effect.
``websocket.py`` takes the same requests over a socket.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton.gateway.answering import answer
from baton.gateway.asgi import Request
from baton.gateway.errors import ApiError, invalid, not_supported
from baton.gateway.fields import Fields
from baton.gateway.params import check_model, read_wish
from baton.gateway.prompts import read_messages
from baton.gateway.recipe import Recipe
from baton.gateway.serving import Serving, read_fields


async def responses(serving: Serving, request: Request) -> None:
    """Answer one response, streaming or whole."""
    recipe = await response_recipe(serving, await read_fields(serving, request))
    await answer(serving, request, recipe)


async def response_recipe(serving: Serving, fields: Fields) -> Recipe:
    """Check what is asked for.

    Raises:
        ApiError: it cannot be served.
    """
    model = check_model(fields, serving.model_names)
    _refuse_unsupported(fields)
    messages = _read_input(fields)
    wish = read_wish(fields, serving.text, serving.limits, max_tokens_keys=("max_output_tokens",))
    wish = replace(wish, n=1)
    prompt = await serving.prompts.chat(fields, messages, "input")
    shown = {
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": _metadata(fields),
    }
    prompts = serving.prompts_of(wish, [prompt], "input")
    return serving.recipe("response", model, wish, prompts, shown=shown)


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


def _metadata(fields: Fields) -> dict[str, str]:
    value = fields.get("metadata")
    return value if isinstance(value, dict) else {}
