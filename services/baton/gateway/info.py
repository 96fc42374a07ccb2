"""Everything that is not generation: models, health, version, metrics, tokens."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import orjson

from baton.gateway.asgi import Request
from baton.gateway.errors import ApiError, context_exceeded, model_not_found
from baton.gateway.fields import Fields
from baton.gateway.prompts import read_messages
from baton.gateway.serving import Serving, read_fields
from baton.runtime.metrics import merge

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def _model(serving: Serving) -> dict[str, Any]:
    info = serving.text.info
    return {
        "id": serving.model_name,
        "object": "model",
        "created": info.created,
        "owned_by": "baton",
        "root": info.name,
        "parent": None,
        "max_model_len": info.context_max,
    }


async def models(serving: Serving, request: Request) -> None:
    """List the one model."""
    await request.respond(200, orjson.dumps({"object": "list", "data": [_model(serving)]}))


async def model_item(serving: Serving, request: Request, name: str) -> None:
    """Describe one model."""
    if name not in serving.model_names:
        raise model_not_found(name)
    await request.respond(200, orjson.dumps(_model(serving)))


async def health(serving: Serving, request: Request) -> None:
    """200 when a request could be served now; else 503 with the reason."""
    unready = serving.machine.unready()
    if unready is None:
        await request.respond(200, b'{"status":"ok"}')
        return
    reason, message = unready
    body = orjson.dumps({"status": "unavailable", "reason": str(reason), "message": message})
    await request.respond(503, body, headers=[(b"retry-after", b"1")])


async def live(serving: Serving, request: Request) -> None:
    """200 while this process answers at all."""
    await request.respond(200, b'{"status":"alive"}')


def version_text() -> str:
    """Return the installed version."""
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


async def version(serving: Serving, request: Request) -> None:
    """Name and version of the server."""
    await request.respond(200, orjson.dumps({"name": "baton", "version": version_text()}))


async def metrics(serving: Serving, request: Request) -> None:
    """The metrics of all processes in one scrape; those that do not answer are missing."""
    bodies = await serving.exchange.reports("metrics")
    serving.metrics.gauges({**serving.machine.gauges(), **serving.gauges()})
    own = serving.metrics.render()
    texts = [own, *(bodies[worker] for worker in sorted(bodies))]
    await request.respond(200, merge(texts), METRICS_TYPE)


async def tokenize(serving: Serving, request: Request) -> None:
    """Ids of a prompt, or of a chat as the model sees it."""
    fields = await read_fields(serving, request)
    _check_model(serving, fields)
    if fields.get("messages") is not None:
        ids = await serving.prompts.chat(fields, read_messages(fields), "messages")
    else:
        prompt = fields.text("prompt")
        if prompt is None:
            raise ApiError(400, "'prompt' or 'messages' is required", "prompt")
        special = fields.flag("add_special_tokens", True)
        ids = await serving.prompts.plain(prompt, "prompt", special=special)
    body: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": serving.text.info.context_max,
        "tokens": ids,
    }
    if fields.flag("return_token_strs"):
        body["token_strs"] = [serving.text.text_of([i]) for i in ids]
    await request.respond(200, orjson.dumps(body))


async def detokenize(serving: Serving, request: Request) -> None:
    """Text of ids."""
    fields = await read_fields(serving, request)
    _check_model(serving, fields)
    info = serving.text.info
    value = fields.get("tokens")
    if value is None:
        raise ApiError(400, "'tokens' is required", "tokens")
    if isinstance(value, list) and len(value) > info.context_max:
        raise context_exceeded(info.context_max, len(value), None, "tokens")
    ids = fields.token_ids("tokens", info.vocab_size, info.context_max)
    await request.respond(200, orjson.dumps({"prompt": serving.text.text_of(ids)}))


def _check_model(serving: Serving, fields: Fields) -> None:
    name = fields.text("model")
    if name is not None and name not in serving.model_names:
        raise model_not_found(name)
