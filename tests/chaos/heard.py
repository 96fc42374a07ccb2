"""What one client knows of one request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from chaos.catalogue import Item, Whole

HOST = "127.0.0.1"


@dataclass(slots=True)
class Heard:
    """One request as its client saw it, over all its connections."""

    item: Item
    sent_at: float = 0.0
    ended_at: float = 0.0
    status: int = 0
    id: str = ""
    answer: Whole = field(default_factory=Whole)
    before: list[Whole] = field(default_factory=list)
    """What came until it was told from the start again."""
    arrivals: list[float] = field(default_factory=list)
    """When tokens came that had not come before."""
    counts: list[int] = field(default_factory=list)
    """How many had come by then."""
    done: bool = False
    """The whole answer came, with its end mark."""
    left: bool = False
    """The client hung up, as the item says."""
    error: dict[str, Any] | None = None
    broken: str = ""
    """The connection ended before the answer did, and the client did not come back."""
    silent: bool = False
    """Nothing ended it within the deadline."""
    through_proxy: bool = False
    comebacks: int = 0
    trouble: str = ""
    """What broke the last of its connections."""
    forgotten: int = 0
    """How often nobody knew its token any more."""
    token: str = ""
    key: str = ""
    last_id: str = ""
    next_id: str = ""

    def arrived(self, count: int) -> None:
        """``count`` tokens are there now."""
        if count > (self.counts[-1] if self.counts else 0):
            self.arrivals.append(time.monotonic())
            self.counts.append(count)

    def start_over(self) -> None:
        """It is asked from the start (again)."""
        if self.answer.ids or self.answer.text:
            self.before.append(self.answer)
        self.answer = Whole()
        self.last_id = self.next_id = ""

    def forget(self) -> None:
        """The token was unknown: the next turn asks anew."""
        self.forgotten += 1
        self.token = self.key = ""


class Left(Exception):
    """The client has enough."""


class Cut(Exception):
    """The stream ended without its end."""


class Later(Exception):
    """The client was told to come again."""
