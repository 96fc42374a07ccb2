"""The ASGI application: routes by hand, keys, CORS, and the one place that writes errors.

Decides who may call what. Nothing here stands on the token path: a handler writes to the socket
itself, so no middleware can hide a disconnect.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from baton.gateway import answering, info, playground
from baton.gateway.asgi import JSON, Headers, Receive, Request, Scope, Send
from baton.gateway.chat import chat_completions
from baton.gateway.completions import completions
from baton.gateway.errors import ApiError
from baton.gateway.responses import responses
from baton.gateway.serving import Handler, Serving
from baton.gateway.websocket import serve_socket

_ROUTES: Mapping[str, tuple[str, str, Handler]] = {
    "/v1/chat/completions": ("POST", "chat_completions", chat_completions),
    "/v1/completions": ("POST", "completions", completions),
    "/v1/responses": ("POST", "responses", responses),
    "/v1/models": ("GET", "models", info.models),
    "/tokenize": ("POST", "tokenize", info.tokenize),
    "/detokenize": ("POST", "detokenize", info.detokenize),
    "/health": ("GET", "health", info.health),
    "/health/ready": ("GET", "health", info.health),
    "/health/live": ("GET", "live", info.live),
    "/live": ("GET", "live", info.live),
    "/version": ("GET", "version", info.version),
    "/metrics": ("GET", "metrics", info.metrics),
}
_MODEL_ITEM = "/v1/models/"
_RESUMABLE = "/v1/requests/"
_EVENTS = "/events"
_EXPOSED = b"x-request-id, retry-after, x-baton-resume, x-baton-resume-token"
_KEYED = ("/v1/", "/tokenize", "/detokenize")


class App:
    """Callable by uvicorn."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._keys = [key.encode() for key in serving.config.api_keys]
        self._root = serving.config.root_path
        self._origins = frozenset(serving.config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request or serve one WebSocket."""
        if scope["type"] == "lifespan":
            return
        request = Request(scope, receive, send, self._serving.bodies)
        request.common_headers = self._cors_headers(request)
        if scope["type"] == "websocket":
            await self._websocket(request, receive, send)
        else:
            await self._http(request)

    # --- HTTP -----------------------------------------------------------------------------------

    async def _http(self, request: Request) -> None:
        try:
            await self._answer(request)
        except ApiError as error:
            if request.status:
                self._serving.log.error("late_error", status=error.status, code=error.code)
                request.abort()
                return
            await request.fail(error)
        except ConnectionError:
            # The client left before it had an answer; there is nobody to tell.
            self._serving.log.debug("client_left", route=request.route)
        except Exception:  # the crash barrier of one request: others are unharmed
            self._serving.log.exception("request_crashed", route=request.route)
            if request.status:
                request.abort()
                return
            await request.fail(ApiError(500, "internal error", None, "internal"))
        finally:
            request.release()
            if request.status:
                status = f"{request.status // 100}xx"
                self._count(request.route, status)

    async def _answer(self, request: Request) -> None:
        path = self._path(request)
        if request.method == "OPTIONS":
            await self._preflight(request)
            return
        if path.startswith(_KEYED):
            self._check_key(request)
        if path in playground.PATHS:
            request.route = "playground"
            _check_method(request, "GET")
            await playground.page(self._serving, request, path)
        elif path.startswith(_MODEL_ITEM):
            request.route = "models"
            _check_method(request, "GET")
            await info.model_item(self._serving, request, path.removeprefix(_MODEL_ITEM))
        elif path.startswith(_RESUMABLE):
            await self._resumable(request, path.removeprefix(_RESUMABLE))
        elif (route := _ROUTES.get(path)) is not None:
            method, request.route, handler = route
            _check_method(request, method)
            if method == "POST":
                _check_content_type(request)
            await handler(self._serving, request)
        else:
            raise ApiError(404, "there is nothing at this path", None, "not_found")

    async def _resumable(self, request: Request, rest: str) -> None:
        """What a resume token names: its events, or the request itself, to be cancelled."""
        request.route = "requests"
        if rest.endswith(_EVENTS):
            # A HEAD would take the answer from whoever reads it, and tell its own client nothing.
            _check_method(request, "GET", head=False)
            await answering.events(self._serving, request, rest.removesuffix(_EVENTS))
        else:
            _check_method(request, "DELETE")
            await answering.cancel(self._serving, request, rest)

    def _path(self, request: Request) -> str:
        """The path below the prefix, whether or not the proxy in front has stripped it."""
        path: str = request.scope["path"]
        if self._root and (path == self._root or path.startswith(self._root + "/")):
            path = path[len(self._root) :] or "/"
        return path

    def _count(self, route: str, status: str) -> None:
        labels = {"path": route, "status": status}
        self._serving.metrics.measure("http_requests_total", 1, labels)

    # --- who may ---------------------------------------------------------------------------------

    def _check_key(self, request: Request) -> None:
        if not self._keys:
            return
        given = request.headers.get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        # Every key is compared, in constant time: neither a near miss nor which key it is shows.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "missing or wrong API key: send 'Authorization: Bearer <key>'",
                None,
                "invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
        request.owner = hashlib.sha256(key.strip()).hexdigest()

    def _allows(self, origin: bytes) -> bool:
        return "*" in self._origins or origin.decode("latin-1") in self._origins

    def _cors_headers(self, request: Request) -> Headers:
        origin = request.headers.get(b"origin")
        if origin is None or not self._origins:
            return []
        headers: Headers = [(b"vary", b"Origin")]
        if self._allows(origin):
            headers.append((b"access-control-allow-origin", origin))
            headers.append(
                (
                    b"access-control-expose-headers",
                    _EXPOSED,
                )
            )
        return headers

    async def _preflight(self, request: Request) -> None:
        headers: Headers = [(b"allow", b"GET, HEAD, POST, DELETE, OPTIONS")]
        origin = request.headers.get(b"origin")
        if origin is not None and self._allows(origin):
            wanted = request.headers.get(b"access-control-request-headers", b"")
            headers += [
                (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
                (b"access-control-allow-headers", wanted or b"authorization, content-type"),
                (b"access-control-max-age", b"600"),
            ]
        await request.start(204, headers)
        await request.write(b"", more=False)

    # --- WebSocket ------------------------------------------------------------------------------

    async def _websocket(self, request: Request, receive: Receive, send: Send) -> None:
        request.route = "websocket"
        try:
            if self._path(request) != "/v1/responses":
                raise ApiError(404, "there is nothing at this path", None, "not_found")
            self._check_key(request)
            self._check_origin(request)
            if self._serving.machine.draining:
                raise ApiError(
                    503, "the gateway is shutting down", None, "draining", retry_after_ms=1_000
                )
        except ApiError as error:
            await _deny(error, send)
            self._count("websocket", f"{error.status // 100}xx")
            return
        self._count("websocket", "1xx")
        try:
            await serve_socket(self._serving, request, receive, send)
        except ConnectionError:
            return
        except Exception:  # the crash barrier of one socket
            self._serving.log.exception("socket_crashed")
            await send({"type": "websocket.close", "code": 1011})

    def _check_origin(self, request: Request) -> None:
        """A page of somebody else's must not use a visitor's browser to reach this socket."""
        origin = request.headers.get(b"origin")
        if origin is None or self._allows(origin):
            return
        host = request.headers.get(b"host", b"").decode("latin-1")
        if urlsplit(origin.decode("latin-1")).netloc != host:
            raise ApiError(403, "this origin is not allowed", None, "origin_not_allowed")


async def _deny(error: ApiError, send: Send) -> None:
    headers = [(b"content-type", JSON), *error.extra_headers()]
    await send(
        {"type": "websocket.http.response.start", "status": error.status, "headers": headers}
    )
    await send({"type": "websocket.http.response.body", "body": error.body()})


def _check_method(request: Request, method: str, *, head: bool = True) -> None:
    """Raise unless the request has that method; ``head``: asking for a GET's head changes nothing,
    so it is answered as one."""
    if request.method == method or (head and method == "GET" and request.method == "HEAD"):
        return
    raise ApiError(
        405,
        f"this path takes {method} only",
        None,
        "method_not_allowed",
        headers=((b"allow", method.encode()),),
    )


def _check_content_type(request: Request) -> None:
    given = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if given and given != JSON and not given.endswith(b"+json"):
        raise ApiError(415, "the body must be application/json", None, "wrong_content_type")
