"""An answer being told: what it consists of, and how a client comes back to it.

Decides which requests outlive their connection and who may resume one. How long they do is the
machine's business (``keeping.py``), which events a client has is ``numbering.py``'s.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

import msgspec

from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.gateway.asgi import Headers, Request
from baton.gateway.errors import ApiError, expired, invalid
from baton.gateway.events import Event
from baton.gateway.exchange import ID_BYTES, LOGPROB_BYTES, Claim, Stream
from baton.gateway.fields import Fields
from baton.gateway.formats import AnyFormat, format_of
from baton.gateway.generation import Generation
from baton.gateway.numbering import Labels, Numbering, Unnumbered, read_position
from baton.gateway.recipe import Recipe
from baton.gateway.serving import Serving
from baton.gateway.vocabulary import (
    NotResumed,
    Ready,
    ResumableWanted,
    ResumeWanted,
    Unresumable,
)

#: Random bytes of a token's secret.
SECRET_BYTES = 32
TOKEN_CHARS_MAX = 256
KEY_CHARS_MAX = 255

_encode = msgspec.msgpack.Encoder().encode
_recipe_decoder = msgspec.msgpack.Decoder(Recipe)


@dataclass(slots=True)
class Telling:
    """One answer on its way to one client."""

    recipe: Recipe
    generation: Generation
    form: AnyFormat
    labels: Labels
    token: str = ""
    """Resumes it; "" if nothing does."""
    window_s: int = 0

    def opening(self) -> list[Event]:
        """Return the events before the first part; the first of them tells the token."""
        events = self.form.opening()
        if self.token and events and isinstance(events[0], dict):
            events[0]["resume_token"] = self.token
        return events

    def headers(self) -> Headers:
        """Return what a client has to know to resume it."""
        if not self.token:
            return []
        return [
            (b"x-baton-resume", str(self.window_s).encode()),
            (b"x-baton-resume-token", self.token.encode()),
        ]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A client asked that its request outlives its connection."""

    window_ms: int
    repeat: str = ""
    """Digest of its idempotency key."""
    body: str = ""


# --- asking for it ------------------------------------------------------------------------------


def wanted_by_headers(request: Request, recipe: Recipe, limits: Limits) -> Wanted | None:
    """Read ``X-Baton-Resume`` and ``Idempotency-Key``; ``None``: a disconnect cancels.

    Raises:
        ApiError: they cannot be read, or cannot be had.
    """
    window = request.headers.get(b"x-baton-resume", b"").decode("latin-1").strip()
    key = request.headers.get(b"idempotency-key", b"").decode("latin-1").strip()
    if len(key) > KEY_CHARS_MAX:
        raise invalid("idempotency-key", f"'Idempotency-Key' has over {KEY_CHARS_MAX} characters")
    if not window and not key:
        return None
    if not key and not recipe.wish.stream:
        raise invalid(
            "x-baton-resume",
            "'X-Baton-Resume' needs 'stream': true, or an 'Idempotency-Key' to repeat it with",
        )
    window_ms = _window_ms(window, limits) if window else limits.resume_default_ms
    if not key:
        return Wanted(window_ms)
    return Wanted(window_ms, digest(request.owner, key), request.body_digest)


def wanted_by_field(fields: Fields, limits: Limits) -> Wanted | None:
    """Read ``resume_s`` of a message."""
    value = fields.get("resume_s")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise fields.fail("resume_s", "must be a whole number of seconds")
    return Wanted(_window_ms(str(value), limits))


def _window_ms(text: str, limits: Limits) -> int:
    most = limits.resume_max_ms // 1000
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= most:
        raise invalid("x-baton-resume", f"a resume window is 1 to {most} whole seconds")
    return int(text) * 1000


def _check_size(recipe: Recipe, encoded: bytes, limits: Limits) -> None:
    wish = recipe.wish
    one = ID_BYTES
    if wish.sampling.logprobs >= 0:
        one += LOGPROB_BYTES * (1 + wish.sampling.logprobs)
    tokens = wish.n * sum(prompt.max_tokens for prompt in recipe.prompts)
    if len(encoded) > limits.resume_record_bytes_max or one * tokens > limits.resume_bytes_max:
        raise invalid(
            None,
            "this request is too large to be resumable: ask for fewer tokens, choices or "
            "log-probabilities, or leave 'X-Baton-Resume' and 'Idempotency-Key' out",
        )


# --- beginning and resuming ---------------------------------------------------------------------


async def begin(
    serving: Serving, recipe: Recipe, wanted: Wanted | None, owner: str, traceparent: str
) -> Telling:
    """Submit a recipe; with an idempotency key that is in use, join what it began.

    Raises:
        ApiError: it is refused.
    """
    exchange, limits = serving.exchange, serving.limits
    if wanted is None:
        specs = list(recipe.specs(serving.me, limits.request_deadline_ms, traceparent))
        return _tell(serving, recipe, exchange.open(specs), Unnumbered())
    encoded = _encode(recipe)
    _check_size(recipe, encoded, limits)
    secret = secrets.token_urlsafe(SECRET_BYTES)
    event = ResumableWanted(
        resumable_id=recipe.request_id,
        token=digest(secret),
        owner=owner,
        choices=tuple(recipe.choice_ids()),
        recipe=encoded,
        window_ms=wanted.window_ms,
        repeat=wanted.repeat,
        body=wanted.body,
    )
    ready = await exchange.claim(Claim(event.resumable_id, event))
    return _ready(serving, ready, secret, "", traceparent)


async def resume(
    serving: Serving, token: str, owner: str, last_event_id: str, *, stream_only: bool = False
) -> Telling:
    """Go on telling what ``token`` resumes, after the event that the client had last;
    ``stream_only``: if it was asked for as a stream.

    Raises:
        ApiError: there is nothing to resume, or not for this client or in this way. Who reads it
            goes on reading.
    """
    resumable_id, secret = read_token(token)
    event = ResumeWanted(secrets.token_hex(16), resumable_id, digest(secret), owner)
    ready = await serving.exchange.claim(Claim(event.claim, event))
    return _ready(serving, ready, secret, last_event_id, "", stream_only=stream_only)


def _ready(
    serving: Serving,
    ready: Ready | NotResumed,
    secret: str,
    last_event_id: str,
    traceparent: str,
    *,
    stream_only: bool = False,
) -> Telling:
    if isinstance(ready, NotResumed):
        raise _refusal(ready)
    exchange = serving.exchange
    try:
        recipe = _recipe_decoder.decode(ready.recipe)
    except msgspec.MsgspecError:
        recipe = None
    try:
        if recipe is None or recipe.compat != serving.compat:
            raise _lost()
        if stream_only and not recipe.wish.stream:
            raise _no_stream()
        after = read_position(last_event_id, recipe.tokens_max()) if last_event_id else None
    except ApiError:
        exchange.unread(ready.resumable_id)
        raise
    if ready.submit:
        specs = recipe.specs(
            serving.me, serving.limits.request_deadline_ms, traceparent, ready.window_ms
        )
        stream = exchange.open(list(specs), ready.resumable_id)
    else:
        stream = exchange.attach(ready.resumable_id, recipe.choice_ids())
    telling = _tell(serving, recipe, stream, Numbering(recipe.choices, after))
    telling.token = f"{ready.resumable_id}.{secret}"
    telling.window_s = ready.window_ms // 1000
    return telling


def _tell(serving: Serving, recipe: Recipe, stream: Stream, labels: Labels) -> Telling:
    stepwise = isinstance(labels, Numbering)
    generation = Generation(serving.exchange, serving.text, recipe, stream, stepwise=stepwise)
    return Telling(recipe, generation, format_of(recipe, generation, serving.text), labels)


# --- tokens and errors --------------------------------------------------------------------------


def digest(*parts: str) -> str:
    """Return what the ledger may know of a secret."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_token(token: str) -> tuple[str, str]:
    """Return the resumable's id and the secret of a resume token.

    Raises:
        ApiError: it is no token.
    """
    resumable_id, dot, secret = token.rpartition(".")
    if not dot or not resumable_id or len(token) > TOKEN_CHARS_MAX or not token.isascii():
        raise _unknown()
    return resumable_id, secret


def _unknown() -> ApiError:
    return ApiError(
        404,
        "no request has this resume token: its window is over, or the token is wrong; "
        "send the request again",
        "resume_token",
        "resume_unknown",
    )


def _lost() -> ApiError:
    return ApiError(
        410,
        "this answer cannot be told again: the model has changed since; send the request again",
        "resume_token",
        "resume_lost",
        admitted=True,
    )


def _no_stream() -> ApiError:
    return ApiError(
        409,
        "this request is no stream: repeat it with its 'Idempotency-Key' instead",
        "resume_token",
        "not_a_stream",
    )


def _refusal(refused: NotResumed) -> ApiError:
    match refused.why:
        case Unresumable.UNKNOWN:
            return _unknown()
        case Unresumable.FOREIGN:
            return ApiError(
                403,
                "this request belongs to another API key; resume it with the key that began it",
                "resume_token",
                "resume_foreign",
            )
        case Unresumable.OVER:
            return expired()
        case Unresumable.DIFFERS:
            return ApiError(
                422,
                "this 'Idempotency-Key' was used for another request; use a new one",
                "idempotency-key",
                "idempotency_key_reused",
            )
        case Unresumable.REFUSED:
            reason = refused.reason or Reason.INTERNAL
            status = 429 if reason is Reason.OVERLOADED else 503
            return ApiError(status, refused.message, None, str(reason), retry_after_ms=1_000)
