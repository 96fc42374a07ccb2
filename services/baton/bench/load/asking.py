"""How a prompt is put into a request: as ids, as text or as a chat.

Decides the bodies. Ids are exact and cost the server no tokenizing; text and chat are for servers
that take no ids, or to measure tokenizing too: one common word stands for one id, and what the
server counts of it is what the result says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from baton.bench.load.answer import Answer

#: One token each, with the space before them, in the vocabularies of common models.
_WORDS = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book
eye job word business issue side kind head house service friend father power hour game line
end member law car city community name president team minute idea body information back
parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education
"""
WORDS = _WORDS.split()


class PromptForm(StrEnum):
    """How prompts are sent."""

    IDS = "ids"
    """``/v1/completions`` with token ids."""
    TEXT = "text"
    """``/v1/completions`` with text."""
    CHAT = "chat"
    """``/v1/chat/completions``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPlan:
    """What every request has in common."""

    form: PromptForm = PromptForm.IDS
    model: str = ""
    ignore_eos: bool = True
    """Have exactly as many tokens as were asked for; refused by some servers."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request."""

    @property
    def path(self) -> str:
        """Return the endpoint."""
        chat = self.form is PromptForm.CHAT
        return "/v1/chat/completions" if chat else "/v1/completions"


class Conversation:
    """What was said so far by one client."""

    def __init__(self, plan: AskPlan) -> None:
        self._plan = plan
        self._ids: list[int] = []
        self._text = ""
        self._messages: list[dict[str, str]] = []
        self.invented = 0
        """Answers whose ids the server did not tell: other ids stand in the history for them."""

    def body(self, new_ids: list[int], output_tokens: int, *, wants_ids: bool) -> bytes:
        """Return the body of the next turn."""
        fields: dict[str, Any] = {
            "model": self._plan.model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._plan.ignore_eos:
            fields["ignore_eos"] = True
        match self._plan.form:
            case PromptForm.IDS:
                self._ids = self._ids + new_ids
                fields["prompt"] = self._ids
                if wants_ids:
                    fields["return_token_ids"] = True
            case PromptForm.TEXT:
                self._text += _words(new_ids)
                fields["prompt"] = self._text
            case PromptForm.CHAT:
                asked = {"role": "user", "content": _words(new_ids).lstrip()}
                self._messages = [*self._messages, asked]
                fields["messages"] = self._messages
        return orjson.dumps(fields | self._plan.fields)

    def heard(self, answer: Answer, next_ids: list[int]) -> None:
        """Put the answer into the history; ``next_ids`` are what a missing one is made of."""
        text = "".join(answer.text)
        self._text += text
        self._messages = [*self._messages, {"role": "assistant", "content": text}]
        ids = answer.ids
        if self._plan.form is PromptForm.IDS and not ids:
            self.invented += 1
            repeated = next_ids * (answer.tokens // len(next_ids) + 1)
            ids = repeated[: answer.tokens]
        self._ids = self._ids + ids


def _words(ids: list[int]) -> str:
    return "".join(" " + WORDS[each % len(WORDS)] for each in ids)
