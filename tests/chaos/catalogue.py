"""What is asked in a chaos run: bodies of every kind, and the answers of an undisturbed cluster.

Decides the mix. Each body is asked once before the first fault; what it got then is what every
later answer must be, token for token. A seed decides all of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

SONNETS = Path(__file__).resolve().parents[1] / "reference" / "sonnets.txt"


class Back(Enum):
    """How a client comes back when its connection breaks."""

    NO = "it does not"
    TOKEN = "over SSE, with its resume token"
    KEY = "by the same POST, with its idempotency key"
    SOCKET = "over a WebSocket, with its resume token"


@dataclass(slots=True)
class Item:
    """One body, and what is known of its answer."""

    name: str
    path: str
    body: dict[str, Any]
    weight: float = 1.0
    leaves_after: int | None = None
    """The client leaves when it has so many tokens; 0: at once."""
    reference: Whole | None = None
    stop_of: str = ""
    """Its stop string is cut from the answer of the item of that name."""
    back: Back = Back.NO

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(slots=True)
class Whole:
    """A complete answer, whatever way it came."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    first_s: float = 0.0
    """Until the first token."""
    gap_s: float = 0.0
    """Median gap between two tokens."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths, in characters of prompt and tokens of answer."""

    short: int
    long: int
    few: int
    some: int
    many: int


#: One character is one token of the fake model.
FAKE = Sizes(short=40, long=330, few=12, some=26, many=110)
#: About four characters are one token of the real one.
REAL = Sizes(short=160, long=1_800, few=8, some=20, many=60)


def catalogue(model: str, sizes: Sizes, seed: int) -> list[Item]:
    """Return the items of one run."""
    chance = random.Random(f"catalogue {seed}")
    text = SONNETS.read_text()
    items: list[Item] = []

    def prompt(length: int) -> str:
        at = chance.randrange(len(text) - length)
        return text[at : at + length]

    def add(kind: str, count: int, make: Callable[[], dict[str, Any]], **fields: Any) -> None:
        for number in range(count):
            body = {"model": model, "return_token_ids": True, **make()}
            if body.get("stream"):
                body["stream_options"] = {"include_usage": True}
            items.append(Item(f"{kind}-{number}", _path(body), body, **fields))

    def greedy(length: int, tokens: int, **more: Any) -> dict[str, Any]:
        return {"prompt": prompt(length), "max_tokens": tokens, "temperature": 0, **more}

    def seeded(length: int, tokens: int, **more: Any) -> dict[str, Any]:
        return {
            "prompt": prompt(length),
            "max_tokens": tokens,
            "temperature": 0.9,
            "top_p": 0.95,
            "seed": chance.randrange(2**31),
            "repetition_penalty": 1.2,
            "presence_penalty": 0.4,
            "stream": True,
            "ignore_eos": True,
            **more,
        }

    def every_rule(length: int, tokens: int, **more: Any) -> dict[str, Any]:
        """All that a request may ask for at once."""
        return seeded(
            length,
            tokens,
            top_k=14,
            min_p=0.01,
            frequency_penalty=0.9,
            logit_bias={"97": 1.5, "101": 2.5, "116": -2.0},
            allowed_token_ids=list(range(95, 123)),
            bad_words=["et", "n"],
            min_tokens=tokens // 2,
            stop_token_ids=[101, 115],
            **more,
        )

    streamed: dict[str, Any] = {"stream": True, "ignore_eos": True}
    add("short", 8, lambda: greedy(sizes.short, sizes.some, **streamed), weight=2)
    add("own-end", 4, lambda: greedy(sizes.short, sizes.many, stream=True))
    add("long-prompt", 6, lambda: greedy(sizes.long, sizes.some, **streamed), weight=1.5)
    add("long-answer", 3, lambda: greedy(sizes.short, sizes.many, **streamed))
    add("whole", 4, lambda: greedy(sizes.long // 2, sizes.some, ignore_eos=True))
    add("whole-seeded", 3, lambda: seeded(sizes.short, sizes.some, stream=False))
    add("seeded", 6, lambda: seeded(sizes.long // 2, sizes.some), weight=1.5)
    add("logprobs", 3, lambda: greedy(sizes.short, sizes.few, logprobs=2, **streamed))
    add("chat", 4, lambda: _chat(prompt(sizes.short), sizes.some))
    token, key = {"back": Back.TOKEN, "weight": 2}, {"back": Back.KEY, "weight": 2}
    add("resumed", 4, lambda: greedy(sizes.short, sizes.some, **streamed), **token)
    add("resumed-long", 2, lambda: seeded(sizes.short, sizes.many), **token)
    add("resumed-chat", 2, lambda: _chat(prompt(sizes.short), sizes.some), **token)
    add("repeated", 2, lambda: greedy(sizes.short, sizes.some, **streamed), **key)
    add("repeated-whole", 2, lambda: seeded(sizes.short, sizes.some, stream=False), **key)
    for number in range(4):
        body = _response(model, prompt(sizes.short), sizes.some)
        items.append(Item(f"socket-{number}", "", body, weight=2, back=Back.SOCKET))
    add("every-rule", 4, lambda: every_rule(sizes.long // 2, sizes.some), weight=1.5)
    add(
        "repeated-choices", 2, lambda: every_rule(sizes.short, sizes.some, stream=False, n=2), **key
    )
    add("left", 6, lambda: greedy(sizes.long // 2, sizes.many, **streamed), weight=1)
    for number, item in enumerate(each for each in items if each.name.startswith("left")):
        item.leaves_after = (0, 0, 1, 5, 12, 20)[number % 6]
    for name in ("short-0", "short-1", "seeded-0", "every-rule-0", "resumed-0"):
        source = next(each for each in items if each.name == name)
        body, back = dict(source.body), source.back
        items.append(Item(f"stop-{name}", source.path, body, stop_of=name, back=back))
    return items


def _path(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def _response(model: str, text: str, tokens: int) -> dict[str, Any]:
    """Return a message of a WebSocket."""
    return {
        "type": "response.create",
        "model": model,
        "input": text,
        "max_output_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "resume_s": 20,
        "stream": True,
    }


def _chat(text: str, tokens: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }


def probe(model: str, sizes: Sizes, number: int, seed: int) -> Item:
    """Return a request that passes every stage and whose prompt no cache has.

    It has no reference of its own at first: the run asks it again when all is over.
    """
    chance = random.Random(f"probe {seed} {number}")
    letters = "".join(
        chance.choice("abcdefghijklmnopqrstuvwxyz    ") for _ in range(sizes.long // 2)
    )
    body = {
        "model": model,
        "return_token_ids": True,
        "prompt": f"{number} {letters}",
        "max_tokens": sizes.some,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    back = (Back.NO, Back.TOKEN, Back.KEY)[number % 3]
    return Item(f"probe-{number}", "/v1/completions", body, back=back)


def uncached(model: str, sizes: Sizes, count: int, seed: int) -> list[Item]:
    """Return items that, asked in turn, find nothing of themselves in any cache any more."""
    chance = random.Random(f"uncached {seed}")
    text = SONNETS.read_text()
    items = []
    for number in range(count):
        at = chance.randrange(len(text) - sizes.long)
        body = {
            "model": model,
            "return_token_ids": True,
            "prompt": f"{number}. {text[at : at + sizes.long * 2 // 3]}",
            "max_tokens": sizes.many,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        items.append(Item(f"uncached-{number}", "/v1/completions", body))
    return items
