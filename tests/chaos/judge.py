"""Whether what a client heard is what it had to hear.

Decides the class of every answer. Only one may happen to anybody: right. What else is allowed
depends on the fault, and is counted; wrong and silent never are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from chaos.catalogue import Whole
from chaos.heard import Heard


class Class(StrEnum):
    """What became of one request."""

    RIGHT = "right"
    LEFT = "left"
    """The client hung up; what it had until then was right."""
    REFUSED = "refused"
    """Nothing was computed, and the client was told when to come again."""
    FAILED = "failed"
    """Accepted, then a clear error; what came before was right."""
    BROKEN = "broken"
    """The connection ended because its gateway died or was cut off from the client."""
    WRONG = "wrong"
    GAP = "gap"
    """Tokens are missing, or came twice."""
    SILENT = "silent"
    """No end: neither answer nor error within the deadline, or a stream that just stopped."""


#: What must never happen.
NEVER = frozenset({Class.WRONG, Class.GAP, Class.SILENT})
_REFUSALS = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Judgement:
    """The class of an answer, and why."""

    what: Class
    why: str = ""


def judge(heard: Heard, *, excused: str = "", may_forget: bool = False) -> Judgement:
    """Judge one answer.

    ``excused`` says why its connection could break, if it could; ``may_forget``: the ledger lost
    what it knew of it.
    """
    wanted = heard.item.reference
    if wanted is not None:
        wrong = _difference(heard.answer, wanted, whole=heard.done)
        for part in heard.before:
            wrong = wrong or _difference(part, wanted, whole=False)
        if wrong is not None:
            return wrong
    if heard.silent:
        return Judgement(Class.SILENT, f"no end within the deadline {heard.trouble}")
    if heard.forgotten and not may_forget:
        return Judgement(Class.FAILED, "its token was unknown when it came back")
    if heard.done:
        return Judgement(Class.RIGHT)
    if heard.left:
        return Judgement(Class.LEFT)
    if heard.error is not None:
        code = str(heard.error.get("code"))
        if heard.status in _REFUSALS:
            return Judgement(Class.REFUSED, code)
        return Judgement(Class.FAILED, f"{code}: {heard.error.get('message')}")
    if heard.broken and excused:
        return Judgement(Class.BROKEN, excused)
    return Judgement(Class.SILENT, f"the connection ended: {heard.broken}")


def _difference(got: Whole, wanted: Whole, *, whole: bool) -> Judgement | None:
    ids = got.ids
    if ids != wanted.ids[: len(ids)]:
        return _wrong_ids(ids, wanted.ids)
    if not wanted.text.startswith(got.text):
        return Judgement(Class.WRONG, f"text {got.text!r} instead of {wanted.text!r}")
    if got.logprobs != wanted.logprobs[: len(got.logprobs)]:
        return Judgement(Class.WRONG, "log-probabilities differ")
    if not whole:
        return None
    if len(ids) < len(wanted.ids):
        return Judgement(Class.GAP, f"{len(ids)} of {len(wanted.ids)} tokens, said to be all")
    for name in ("text", "finish", "logprobs"):
        if getattr(got, name) != getattr(wanted, name):
            text = f"{name} {getattr(got, name)!r} instead of {getattr(wanted, name)!r}"
            return Judgement(Class.WRONG, text)
    if _counts(got) != _counts(wanted):
        return Judgement(Class.WRONG, f"usage {got.usage} instead of {wanted.usage}")
    return None


def _counts(answer: Whole) -> tuple[object, object]:
    usage = answer.usage or {}
    return usage.get("prompt_tokens"), usage.get("completion_tokens")


def _wrong_ids(got: list[int], wanted: list[int]) -> Judgement:
    pairs = zip(got, wanted, strict=False)
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), len(wanted))
    rest = got[at:]
    for shift in range(1, max(len(wanted), len(got))):
        if rest and rest == wanted[at + shift : at + shift + len(rest)]:
            return Judgement(Class.GAP, f"{shift} tokens missing at {at}")
        if shift <= at and rest and rest == wanted[at - shift : at - shift + len(rest)]:
            return Judgement(Class.GAP, f"{shift} tokens twice at {at}")
    return Judgement(
        Class.WRONG, f"from token {at} of {len(got)}: {rest[:8]} instead of {wanted[at : at + 8]}"
    )
