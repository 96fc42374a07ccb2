"""What clients are told when something is wrong: statuses, bodies, and who may try again.

Decides the mapping from outcomes to HTTP. Every error has the four keys of OpenAI's error object;
no text holds a path, a stack trace or a part of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson

from baton.core.outcomes import Ending, Outcome, Reason

_STATUS_OF_REFUSAL = {
    Reason.OVERLOADED: 429,
    Reason.QUEUE_FULL: 429,
    Reason.NO_BLOCKS: 429,
    Reason.TOO_LONG: 400,
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    410: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
RETRY_AFTER_DEFAULT_MS = 1_000
#: Why a request was cancelled whose client may come back all the same.
_NOBODY_THERE = frozenset(
    {Reason.GATEWAY_LOST, Reason.CLIENT_DISCONNECTED, Reason.CLIENT_CANCELLED}
)


@dataclass(slots=True)
class ApiError(Exception):
    """An answer other than success. Raised anywhere below a handler, written in one place."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_ms: int = 0
    admitted: bool = False
    """Work may have been done: a client that repeats would do it twice."""
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())

    def object(self) -> dict[str, str | None]:
        """Return the error object."""
        return {
            "message": self.message,
            "type": _TYPES.get(self.status, "server_error"),
            "param": self.param,
            "code": self.code,
        }

    def body(self) -> bytes:
        """Return the JSON body."""
        return orjson.dumps({"error": self.object()})

    def extra_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that tell a client whether and when to try again."""
        headers = list(self.headers)
        if self.retry_after_ms > 0:
            seconds = -(-self.retry_after_ms // 1000)
            headers.append((b"retry-after", str(seconds).encode()))
            headers.append((b"retry-after-ms", str(self.retry_after_ms).encode()))
        if self.admitted:
            headers.append((b"x-should-retry", b"false"))
        return headers


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param, code)


def not_supported(param: str, what: str) -> ApiError:
    """A 400 for what Baton does not do yet."""
    return ApiError(400, f"{what} is not supported yet", param, "unsupported_parameter")


def model_not_found(name: str) -> ApiError:
    """A 404 for a model that is not served here."""
    shown = name if len(name) <= 200 else name[:200] + "..."
    return ApiError(404, f"The model '{shown}' does not exist", "model", "model_not_found")


def context_exceeded(limit: int, prompt: int, wanted: int | None, param: str) -> ApiError:
    """A 400 for a request that does not fit the model's context."""
    if wanted is None:
        asked = f"the prompt has {prompt} tokens"
    else:
        total = prompt + wanted
        asked = f"you asked for {total} tokens ({prompt} in the prompt, {wanted} to generate)"
    message = f"This model's maximum context length is {limit} tokens, but {asked}."
    return ApiError(400, message, param, "context_length_exceeded")


def resumed_elsewhere() -> ApiError:
    """The end of an answer whose client reads it on another connection."""
    return ApiError(
        409,
        "this answer was resumed or cancelled on another connection",
        None,
        str(Reason.SUPERSEDED),
        admitted=True,
    )


def expired() -> ApiError:
    """The end of a request for which nobody came back."""
    return ApiError(
        410,
        "this request was cancelled, or nobody came back within its window; send it again",
        None,
        "resume_expired",
        admitted=True,
    )


def of_outcome(outcome: Outcome, retry_after_ms: int = 0) -> ApiError:
    """The error of a request that was not completed."""
    code = str(outcome.reason) if outcome.reason is not None else str(outcome.ending)
    message = outcome.message or code.replace("_", " ")
    if outcome.ending is Ending.REFUSED:
        status = _STATUS_OF_REFUSAL.get(outcome.reason or Reason.INTERNAL, 503)
        if status == 400:
            return ApiError(400, f"{message} (maximum context length)", None, code)
        return ApiError(
            status, message, None, code, retry_after_ms=retry_after_ms or RETRY_AFTER_DEFAULT_MS
        )
    if outcome.ending is Ending.CANCELLED and outcome.reason is Reason.SUPERSEDED:
        return resumed_elsewhere()
    if outcome.ending is Ending.CANCELLED and outcome.reason in _NOBODY_THERE:
        return expired()
    if outcome.ending is Ending.EXPIRED:
        return ApiError(504, message, None, code, admitted=True)
    return ApiError(500, message, None, code, admitted=True)
