"""What decode workers have in their prefix caches, as they tell it themselves.

Decides when a worker is asked for all it has: when its link opens, and when one of its changes was
missed; nothing is known of it then until it has answered. No name is ever put here because a
request was sent somewhere. To be wrong here costs time: decode looks every prompt up itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.core.ids import Peer
from baton.core.limits import Limits
from baton.core.prefix import numbers_of
from baton.wire.messages import BlocksChanged, BlocksListed, BlocksWanted

#: A worker is asked for its first page not more often than that.
LIST_PAUSE_S = 0.05


@dataclass(slots=True)
class Known:
    """One worker's cache. Names are whole prefixes, so that a set of them is all there is to know:
    no tree of parents and children."""

    names: set[int] = field(default_factory=set)
    number: int | None = None
    """Of the last change that is in ``names``; ``None``: the first page has not come."""
    page: int | None = 0
    """The page that is waited for; ``None``: all are here."""
    ask_at: float = 0.0
    """When it is asked for (again), unless it comes."""
    begun_at: float = 0.0
    """When the first page was asked for."""


class PrefixIndex:
    """Those of all decode workers of one router; a name is eight bytes of a prefix's hash."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.known: dict[Peer, Known] = {}
        self.total = 0
        """Names of all of them."""

    # --- looking ------------------------------------------------------------------------------

    def leading(self, peer: Peer, names: Sequence[int]) -> int:
        """Return how many of the first of ``names`` (of the blocks of one prompt) ``peer`` has."""
        known = self.known.get(peer)
        if known is None:
            return 0
        there = known.names
        for count, name in enumerate(names):
            if name not in there:
                return count
        return len(names)

    def deadline(self) -> float | None:
        """Return when :meth:`to_ask` may have something."""
        times = [known.ask_at for known in self.known.values() if known.page is not None]
        return min(times, default=None)

    # --- what workers say ---------------------------------------------------------------------

    def meet(self, peer: Peer, now: float) -> None:
        """A decode worker is there: it is to be asked."""
        self.forget(peer)
        self.known[peer] = Known(ask_at=now)

    def forget(self, peer: Peer) -> None:
        """It is gone, or its link is."""
        known = self.known.pop(peer, None)
        if known is not None:
            self.total -= len(known.names)

    def to_ask(self, now: float) -> list[tuple[Peer, BlocksWanted]]:
        """Return whom to ask for what now."""
        asks = []
        for peer, known in self.known.items():
            if known.page is None or now < known.ask_at:
                continue
            if known.page == 0:
                known.begun_at = now
            known.ask_at = now + self.limits.block_page_ms / 1000
            asks.append((peer, BlocksWanted(known.page)))
        return asks

    def changed(self, peer: Peer, message: BlocksChanged, now: float) -> str:
        """Take a change in. Return why all has to be asked for again, or nothing."""
        known = self.known.get(peer)
        if known is None or known.number is None or message.number <= known.number:
            return ""  # the page that is waited for has it
        if message.number > known.number + 1:
            return self._begin_again(known, now, "gap")
        if message.too_many:
            return self._begin_again(known, now, "too_many")
        known.number = message.number
        gone = known.names.intersection(numbers_of(message.removed))
        known.names -= gone
        self.total -= len(gone)
        self._add(known, numbers_of(message.stored))
        return ""

    def listed(self, peer: Peer, message: BlocksListed, now: float) -> str:
        """Take a page in; see :meth:`changed`."""
        known = self.known.get(peer)
        if known is None or known.page is None or message.start != known.page:
            return ""  # a page that came twice
        if message.start == 0:
            known.number = message.number
        elif message.number != known.number:
            return self._begin_again(known, now, "gap")
        self._add(known, numbers_of(message.stored))
        follows = message.next is not None and message.next > message.start
        known.page = message.next if follows else None
        known.ask_at = now
        return ""

    def told(self, peer: Peer, number: int, now: float) -> str:
        """The worker says which change it told last; see :meth:`changed`."""
        known = self.known.get(peer)
        if known is None or known.number is None or number <= known.number:
            return ""
        return self._begin_again(known, now, "gap")

    # --- inside -------------------------------------------------------------------------------

    def _begin_again(self, known: Known, now: float, why: str) -> str:
        self.total -= len(known.names)
        known.names = set()
        known.number, known.page = None, 0
        known.ask_at = max(now, known.begun_at + LIST_PAUSE_S)
        return why

    def _add(self, known: Known, names: Iterable[int]) -> None:
        fresh = [name for name in names if name not in known.names]
        room = max(0, self.limits.prefix_index_blocks_max - self.total)
        known.names.update(fresh[:room])
        self.total += min(len(fresh), room)

    def check(self) -> None:
        """Assert that what is counted is there, and within the bound."""
        assert self.total == sum(len(known.names) for known in self.known.values())
        assert self.total <= self.limits.prefix_index_blocks_max
        for known in self.known.values():
            assert known.number is not None or (known.page == 0 and not known.names)
