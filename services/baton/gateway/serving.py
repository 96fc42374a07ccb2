"""What every endpoint needs, in one object, and the start of a generation."""

from __future__ import annotations

import hashlib
import secrets
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.core.ids import Peer
from baton.core.limits import Limits
from baton.gateway.asgi import BodyBudget, Request
from baton.gateway.exchange import Exchange
from baton.gateway.fields import Fields, parse_object
from baton.gateway.machine import GatewayMachine
from baton.gateway.params import Wish, check_context
from baton.gateway.prompts import Prompts
from baton.gateway.recipe import Kind, Prompt, Recipe
from baton.gateway.tokens import ModelText
from baton.runtime.logs import FilteringBoundLogger
from baton.runtime.metrics import Metrics
from baton.runtime.settings import GatewayConfig

#: Bodies up to this size are parsed on the loop.
PARSE_INLINE_BYTES = 256 * 1024

_PREFIXES: Mapping[Kind, str] = {"chat": "chatcmpl-", "completion": "cmpl-", "response": "resp_"}


@dataclass(slots=True)
class Serving:
    """One gateway process's parts."""

    me: Peer
    compat: str
    """What the model's ids depend on: weights, tokenizer, dtype, kernels."""
    text: ModelText
    model_name: str
    config: GatewayConfig
    limits: Limits
    machine: GatewayMachine
    exchange: Exchange
    metrics: Metrics
    log: FilteringBoundLogger
    prompts: Prompts = field(init=False)
    bodies: BodyBudget = field(init=False)
    connections: set[object] = field(default_factory=set)
    sockets: set[Socket] = field(default_factory=set)
    """Open WebSockets."""
    on_left: Callable[[], None] | None = None
    """Set when the gateway leaves: called when the last connection has closed."""

    def __post_init__(self) -> None:
        self.prompts = Prompts(self.text)
        self.bodies = BodyBudget(self.limits)

    @property
    def model_names(self) -> frozenset[str]:
        """Names under which the one model is served."""
        return frozenset({self.model_name})

    def prompts_of(self, wish: Wish, prompts: list[list[int]], param: str) -> tuple[Prompt, ...]:
        """Return the prompts of a recipe, each with the most tokens that may follow it.

        Raises:
            ApiError: prompt and answer do not fit the model's context.
        """
        context = self.text.info.context_max
        return tuple(
            Prompt(array("I", ids).tobytes(), check_context(wish, len(ids), context, param))
            for ids in prompts
        )

    def recipe(
        self,
        kind: Kind,
        model: str,
        wish: Wish,
        prompts: tuple[Prompt, ...],
        *,
        echo: bool = False,
        shown: dict[str, Any] | None = None,
    ) -> Recipe:
        """Return a new request's recipe, with ids that nobody can guess."""
        return Recipe(
            kind=kind,
            request_id=new_id(_PREFIXES[kind]),
            model=model,
            created=_now_s(),
            compat=self.compat,
            wish=wish,
            seed=wish.seed if wish.seed is not None else secrets.randbits(63),
            prompts=prompts,
            echo=echo,
            item_id=new_id("msg_") if kind == "response" else "",
            shown=shown or {},
        )

    @property
    def leaving(self) -> bool:
        """Whether each connection is to close when its answer is complete."""
        return self.on_left is not None

    def connection_closed(self, connection: object) -> None:
        """A client is gone."""
        self.connections.discard(connection)
        if self.on_left is not None and not self.connections:
            self.on_left()

    def gauges(self) -> Mapping[str, float]:
        """Return the values of the HTTP layer's gauges."""
        return {
            "client_connections": len(self.connections),
            "client_streams": self.exchange.open_streams,
            "session_buffer_bytes": self.exchange.buffered_bytes,
        }


class Socket(Protocol):
    """An open WebSocket."""

    def leave(self) -> None:
        """Close when nothing runs on it any more."""
        ...


class Handler(Protocol):
    """Answers one request."""

    async def __call__(self, serving: Serving, request: Request) -> None: ...


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(14)}"


def _now_s() -> int:
    return int(time.time())  # noqa: TID251 - the wall clock a client sees; decides nothing


async def read_fields(serving: Serving, request: Request) -> Fields:
    """Read and parse the JSON body."""
    body = await request.body()

    def read() -> Fields:
        if b"idempotency-key" in request.headers:
            path: str = request.scope["path"]
            request.body_digest = hashlib.sha256(path.encode() + b"\0" + body).hexdigest()
        return parse_object(body)

    try:
        if len(body) <= PARSE_INLINE_BYTES:
            return read()
        return await serving.prompts.offload(read)
    finally:
        request.release()
