"""All that the text of an answer depends on, apart from its token ids.

Decides nothing. An answer's events are a pure function of a recipe and of ids, so any gateway that
has both says the same, byte for byte; the ledger keeps the recipe of a request that may be resumed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from baton.core.ids import Peer
from baton.gateway.params import Wish, sampling_of
from baton.wire.fields import ID_BYTES
from baton.wire.messages import RequestSpec

Kind = Literal["chat", "completion", "response"]


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """One prompt: uint32 LE ids, and the most output tokens it may have."""

    ids: bytes
    max_tokens: int

    @property
    def tokens(self) -> int:
        return len(self.ids) // ID_BYTES

    def list(self) -> list[int]:
        """Return the ids as integers."""
        return array("I", self.ids).tolist()


class Recipe(msgspec.Struct, frozen=True, omit_defaults=True):
    """A client's request, checked and tokenized."""

    kind: Kind
    """The endpoint whose words the answer is told in."""
    request_id: str
    """What the client sees as ``id``."""
    model: str
    """The model's name as the client wrote it."""
    created: int
    """Seconds since the epoch."""
    compat: str
    """What the model was: another one's ids would be others."""
    wish: Wish
    seed: int
    prompts: tuple[Prompt, ...]
    echo: bool = False
    item_id: str = ""
    """Id of a response's one item."""
    shown: dict[str, Any] = {}
    """Fields of the request that a response repeats."""

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.wish.n

    @property
    def prompt_tokens(self) -> int:
        """Every prompt counts once, however many choices share it."""
        return sum(prompt.tokens for prompt in self.prompts)

    def choice_ids(self) -> list[str]:
        """Return the request id of each choice, by index."""
        if self.choices == 1:
            return [self.request_id]
        return [f"{self.request_id}-{index}" for index in range(self.choices)]

    def tokens_max(self) -> list[int]:
        """Return how many output tokens each choice may have, by index."""
        return [prompt.max_tokens for prompt in self.prompts for _ in range(self.wish.n)]

    def specs(
        self, gateway: Peer, deadline_ms: int, traceparent: str = "", resume_ms: int = 0
    ) -> Iterator[RequestSpec]:
        """Yield the request of each choice: index = prompt * n + k."""
        ids = self.choice_ids()
        for number, prompt in enumerate(self.prompts):
            for k in range(self.wish.n):
                yield RequestSpec(
                    request_id=ids[number * self.wish.n + k],
                    gateway=gateway,
                    prompt=prompt.ids,
                    sampling=sampling_of(self.wish, self.seed, k),
                    max_tokens=prompt.max_tokens,
                    deadline_ms=deadline_ms,
                    open_ended=self.wish.max_tokens is None,
                    parent_id="" if len(ids) == 1 else self.request_id,
                    traceparent=traceparent,
                    resume_ms=resume_ms,
                )
