"""One request as its router sees it, and the bounded queue of those that wait.

Decides order (first come, first served; what is placed again goes to the front), not placement.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from baton.core.ids import Peer
from baton.core.prefix import chain_of, numbers_of, short_names
from baton.router.forecasts import Forecast
from baton.wire.messages import RequestFailed, RequestRefused, RequestSpec


class Phase(Enum):
    """Where a request stands at its router."""

    ADMITTING = "admitting"
    """Waiting for the ledger to have it."""
    ADOPTING = "adopting"
    """Waiting for the ledger to say how it stands: another router had it."""
    QUEUED = "queued"
    PLACING = "placing"
    """Waiting for the ledger to have counted the attempt."""
    PLACED = "placed"
    FENCING = "fencing"
    """Waiting for the gateway to refuse older epochs and to say what it holds."""
    RETRYING = "retrying"
    """Waiting for the ledger to have the next epoch."""
    CLOSING = "closing"
    """Given up; waiting for the gateway to make it terminal."""


#: After so many blames in a row a request is a suspect: its steps are its own.
SUSPECT_AFTER = 2


@dataclass(slots=True)
class Blame:
    """One attempt that ended without a result."""

    epoch: int
    text: str = ""
    lost: set[Peer] = field(default_factory=set)
    """The workers that ended with it and whose successors have not yet said whether this attempt
    was in their step; empty: it counts."""
    workers: tuple[Peer | None, ...] = ()
    """All that computed it."""
    due: float = 0.0
    """When it counts even if no successor has said anything."""


@dataclass(slots=True)
class Entry:
    """One request."""

    spec: RequestSpec
    arrived: float
    phase: Phase = Phase.ADMITTING
    turn: int = 1
    """Ours among the routers that had it."""
    epoch: int = 1
    output: bytes = b""
    """Ids that the client may have seen (uint32 LE): forced in the next attempt."""
    base: int = 0
    """Ids that the last attempt began with."""
    decode: Peer | None = None
    prefill: Peer | None = None
    decode_lost: bool = False
    """The gateway had lost ``decode`` when it gave the request to us."""
    untold: set[Peer] = field(default_factory=set)
    """Workers of the attempt that have to be told, once linked, that it is ours."""
    link_due: float | None = None
    """By then ``decode`` must have opened a link here, so that it can be told."""
    reserved: bool = False
    blames: list[Blame] = field(default_factory=list)
    progress: int = 0
    """The latest attempt that brought new tokens, or that this router found when it adopted."""
    """Attempts in a row that ended without a result and without a new token; refusals and such as
    nobody is to blame for do not count."""
    on_trial: bool = False
    """It has failed too often if all blames are right; it waits until that is known."""
    refusals: int = 0
    """Placements in a row that a worker refused."""
    unmeasured: bool = False
    """Taken in before the arenas were known that would hold it, or not."""
    placed_once: bool = False
    taken_in: bool = False
    """A decode worker had blocks for it, or may have had under another router."""
    recovering_since: float | None = None
    not_before: float = 0.0
    bypassed: int = 0
    looked_at: bool = False
    """It waits, as the workers were when the queue was last gone through."""
    forecast: Forecast | None = None
    """What was expected when it was placed for the first time."""
    ledger_since: float = 0.0
    """When the ledger was first asked for the transition that is pending."""
    ledger_again: float | None = None
    """When to ask again after it did not answer."""
    verdict: RequestRefused | RequestFailed | None = None
    """What the gateway was told, once it is given up."""
    closed_at: float = 0.0
    gateway_lost_at: float | None = None
    """Since when there is no link to its gateway."""
    ask_at: float = 0.0
    """Not before then is decode asked again whether it still has it."""
    restored: bool = False
    """Its record may have been made anew after the ledger was emptied."""
    held: int = 0
    """Output ids that its gateway had when it was adopted."""
    gateway_gone: bool = False
    """That gateway is dead; another one may resume the request within its window."""
    names: tuple[int, ...] = ()
    """Of the leading full blocks of prompt and output that may be cached; see :meth:`name`."""
    named: int = -1
    """Bytes of ids when they were named."""
    expected: int | None = None
    """Tokens that should be cached where it was just placed, until decode says."""
    source: str = ""
    """The decode worker whose arena has its KV; empty: none that could be of use."""
    source_host: str = ""
    """Where that arena can be read."""
    keeper: Peer | None = None
    """A draining decode worker that keeps its blocks until the next one has them."""
    grown: int = 0
    """Prompt and output tokens that its decode worker last said it has."""

    @classmethod
    def create(cls, spec: RequestSpec, now: float) -> Entry:
        return cls(spec=spec, arrived=now, ledger_since=now)

    def name(self, root: bytes, block_size: int, blocks_max: int) -> tuple[int, ...]:
        """Return the names of its blocks; the last token is always computed."""
        ids = self.spec.prompt + self.output
        if self.named != len(ids):
            chain = chain_of(root, ids[:-4], block_size, blocks_max)
            self.names, self.named = tuple(numbers_of(short_names(chain))), len(ids)
        return self.names

    @property
    def suspect(self) -> bool:
        """Whether its next attempt runs alone."""
        return len(self.blames) >= SUSPECT_AFTER

    @property
    def tokens(self) -> int:
        """Tokens whose KV the next attempt needs before it can sample, as far as is known here."""
        return max(self.spec.prompt_tokens + len(self.output) // 4, self.grown)

    @property
    def begun(self) -> bool:
        """Whether the gateway was told of an attempt, or asked to refuse one."""
        return self.placed_once or self.epoch > 1 or self.phase in (Phase.FENCING, Phase.RETRYING)

    @property
    def answering(self) -> bool:
        """Whether its client waits in the middle of an answer, as far as is known here."""
        return self.tokens > self.spec.prompt_tokens

    @property
    def remaining(self) -> int:
        """Output tokens it may still produce."""
        return self.spec.prompt_tokens + self.spec.max_tokens - self.tokens


class WaitingQueue:
    """Requests to be placed, in order; bounded by the router's admission."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def push(self, entry: Entry, *, front: bool = False) -> None:
        request_id = entry.spec.request_id
        assert request_id not in self._entries
        self._entries[request_id] = entry
        self.tokens += entry.spec.prompt_tokens
        if front:
            self._entries.move_to_end(request_id, last=False)

    def remove(self, entry: Entry) -> None:
        """Drop it if it is here."""
        if self._entries.pop(entry.spec.request_id, None) is not None:
            self.tokens -= entry.spec.prompt_tokens
