"""Log-probabilities in the two shapes of the API."""

from __future__ import annotations

from typing import Any

from baton.gateway.text import TextToken
from baton.gateway.tokens import ModelText

#: JSON has no minus infinity; a banned token is shown with this.
LOWEST = -9999.0


def chat_entries(text: ModelText, tokens: list[TextToken]) -> list[dict[str, Any]]:
    """Return ``logprobs.content`` entries, one a token."""
    return [_chat_entry(text, token) for token in tokens]


def _chat_entry(text: ModelText, token: TextToken) -> dict[str, Any]:
    entry = token.logprob
    top = entry.top if entry is not None else ()
    return {
        "token": _shown(text, token.token_id),
        "logprob": _number(entry.logprob if entry is not None else LOWEST),
        "bytes": list(token.raw),
        "top_logprobs": [
            {
                "token": _shown(text, token_id),
                "logprob": _number(logprob),
                "bytes": list(text.token_bytes(token_id)),
            }
            for token_id, logprob in top
        ],
    }


def completion_object(text: ModelText, tokens: list[TextToken], start: int) -> dict[str, Any]:
    """Return the ``logprobs`` object of completions; ``start`` is the answer's offset."""
    chosen = [token.logprob for token in tokens]
    return {
        "tokens": [_shown(text, token.token_id) for token in tokens],
        "token_logprobs": [_number(e.logprob) if e is not None else None for e in chosen],
        "top_logprobs": [
            {_shown(text, token_id): _number(logprob) for token_id, logprob in e.top}
            if e is not None
            else None
            for e in chosen
        ],
        "text_offset": [start + token.offset for token in tokens],
    }


def _shown(text: ModelText, token_id: int) -> str:
    return text.token_bytes(token_id).decode("utf-8", "replace")


def _number(value: float) -> float:
    return max(value, LOWEST)
