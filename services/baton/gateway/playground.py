"""The playground: static files of the package, read once, never a path from a client."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from baton.gateway.asgi import Headers, Request
from baton.gateway.serving import Serving

_TYPES = {
    "index.html": b"text/html; charset=utf-8",
    "style.css": b"text/css; charset=utf-8",
    "app.js": b"text/javascript; charset=utf-8",
    "icon.svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY: Headers = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


@dataclass(frozen=True, slots=True)
class _Asset:
    body: bytes
    content_type: bytes
    etag: bytes


def _load() -> dict[str, _Asset]:
    folder = files("baton.gateway").joinpath("page")
    assets = {}
    for name, content_type in _TYPES.items():
        body = folder.joinpath(name).read_bytes()
        etag = b'"' + hashlib.sha256(body).hexdigest()[:20].encode() + b'"'
        assets[name] = _Asset(body, content_type, etag)
    return assets


_ASSETS = _load()
PATHS = {"/": "index.html", **{f"/page/{name}": name for name in _TYPES}}


async def page(serving: Serving, request: Request, path: str) -> None:
    """Answer with one of the page's files."""
    asset = _ASSETS[PATHS[path]]
    if request.headers.get(b"if-none-match") == asset.etag:
        await request.start(304, [(b"etag", asset.etag), *_SECURITY])
        await request.write(b"", more=False)
        return
    await request.respond(200, asset.body, asset.content_type, [(b"etag", asset.etag), *_SECURITY])
