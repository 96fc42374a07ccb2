"""How requests are spread over decode workers: by what is cached, within a bounded imbalance.

Decides which of the workers with room come into question, and which of them costs the least. Nobody
is looked at who has more than ``BALANCE`` times its share of the requests (and a few): one prefix
that everybody asks for cannot make one worker do all the work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from baton.core.ids import Peer
from baton.core.limits import Limits
from baton.router.entry import Entry
from baton.router.workers import WorkerView

PlacementRule = Literal["prefix", "least-loaded", "round-robin"]

#: A worker may have so many times its even share of the requests, and so many more.
BALANCE = 1.25
BALANCE_MORE = 2
#: What is saved of a shorter prompt counts as a share of so many tokens: it is soon computed.
SHORT_TOKENS = 1_024
#: A prefix that prefill is computing may be stored in time, or not. One that decode itself computes
#: is: it looks again when the next prompt's turn comes.
COMING_WEIGHT = 0.5
#: What has to be computed keeps others waiting too.
OTHERS_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Found:
    """What a worker has of one prompt."""

    cached: int = 0
    """Leading tokens in its prefix cache."""
    hoped: int = 0
    """The same, and those of prompts under way there, less where that is doubtful."""


def held(view: WorkerView) -> int:
    """Return how many requests it has, as far as is known here."""
    return view.status.running + view.status.waiting + view.placed


class Spread:
    """The rule of one router."""

    def __init__(self, limits: Limits, rule: PlacementRule) -> None:
        self.limits = limits
        self.rule = rule
        self.last = ""
        """Where the last request went."""

    def candidates(self, views: list[WorkerView], *, estimated: bool) -> list[WorkerView]:
        """Return whom of ``views``, who all have room, a new request may go to. Where every way is
        estimated, the estimates see what load costs."""
        match self.rule:
            case "round-robin":
                later = [view for view in views if view.peer.worker_id > self.last]
                return [min(later or views, key=lambda view: view.peer.worker_id)]
            case "least-loaded":
                return [min(views, key=lambda view: (self._load(view), view.peer))]
            case "prefix":
                return views if estimated else within_balance(views)

    def best(
        self, entry: Entry, views: list[WorkerView], found: Mapping[Peer, Found]
    ) -> WorkerView:
        """Return the one that costs the least."""
        return min(views, key=lambda view: (self.cost(entry, view, found[view.peer]), view.peer))

    def cost(self, entry: Entry, view: WorkerView, found: Found) -> float:
        """Load and memory in use, each 0..1, and the tokens to be computed for this prompt and
        before it, as a share of the prompt."""
        hoped = found.hoped if self.rule == "prefix" else 0
        queued = view.status.queued_tokens + view.placed_tokens
        work = queued + (1 + OTHERS_WEIGHT) * (entry.tokens - hoped)
        return self._load(view) + work / max(entry.tokens, SHORT_TOKENS)

    def _load(self, view: WorkerView) -> float:
        used = 1 - max(0, view.free_blocks) / max(1, view.status.blocks_total)
        return held(view) / self.limits.batch_sequences_max + used


def within_balance(views: list[WorkerView]) -> list[WorkerView]:
    """Return those of ``views`` that have not more than their share yet; never nobody."""
    share = (sum(map(held, views)) + 1) / len(views)
    bound = math.ceil(BALANCE * share) + BALANCE_MORE
    return [view for view in views if held(view) < bound]


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many leading names are the same. A name stands for all before it, so that equal
    ones cannot come after different ones."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
