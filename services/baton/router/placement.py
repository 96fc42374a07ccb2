"""Where a request goes: which decode worker, and which prefill worker if any.

Decides from what workers last said of themselves, corrected by what was sent to them since. The
last word is decode's own reservation; a wrong guess here costs a round trip, never correctness.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from baton.core.ids import Peer, Role
from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.router.entry import AFFINITY_BLOCK_TOKENS, Entry
from baton.wire.messages import RequestSpec, WorkerStatus

#: Prefix names remembered, over all workers; the oldest are forgotten.
AFFINITY_NAMES_MAX = 65_536
AVOID_FIRST_S = 0.2
AVOID_MAX_S = 10.0


@dataclass(slots=True)
class WorkerView:
    """One worker incarnation: what it last said, and what it was given since."""

    peer: Peer
    role: Role
    status: WorkerStatus
    since: float
    """When its link opened."""
    host: str
    """Workers of one host can read each other's arenas."""
    placed: int = 0
    """Given since the last status."""
    placed_blocks: int = 0
    placed_tokens: int = 0
    failures: int = 0
    """Failed attempts in a row."""
    avoid_until: float = 0.0

    def refresh(self, status: WorkerStatus) -> None:
        self.status = status
        self.placed = self.placed_blocks = self.placed_tokens = 0

    def failed(self, now: float) -> None:
        """It failed an attempt: leave it alone for a while if there is another."""
        self.failures += 1
        wait = min(AVOID_FIRST_S * 2.0 ** min(self.failures - 1, 10), AVOID_MAX_S)
        self.avoid_until = now + wait

    def succeeded(self) -> None:
        self.failures = 0
        self.avoid_until = 0.0

    @property
    def free_blocks(self) -> int:
        return self.status.blocks_free - self.placed_blocks

    @property
    def capacity_tokens(self) -> int:
        return self.status.blocks_total * self.status.block_size


@dataclass(frozen=True, slots=True)
class Place:
    """A decision; ``prefill`` is ``None`` where decode computes the prompt itself."""

    decode: Peer
    prefill: Peer | None
    reuse: bool = False
    """Decode has, or imports, what an earlier attempt computed."""
    why: str = ""
    """In words, for people."""


class Placement:
    """All workers of one pool as one router sees them."""

    def __init__(self, limits: Limits, *, local_prefill_max_tokens: int) -> None:
        self.limits = limits
        self.local_prefill_max_tokens = local_prefill_max_tokens
        self.workers: dict[Peer, WorkerView] = {}
        #: Prefix name -> the decode worker that last computed it. Its memory outlives its process,
        #: so this is its stable name.
        self._affinity: OrderedDict[bytes, str] = OrderedDict()

    def of(self, role: Role) -> list[WorkerView]:
        return [view for view in self.workers.values() if view.role is role]

    def largest_tokens(self) -> int:
        """Tokens of the largest arena known, 0 if none is."""
        return max((view.capacity_tokens for view in self.of(Role.DECODE)), default=0)

    def fitted(self, spec: RequestSpec) -> RequestSpec:
        """Return ``spec``, cut to what the largest arena holds if it has no limit of its own."""
        room = self.largest_tokens() - spec.prompt_tokens
        if not spec.open_ended or room < 1 or spec.max_tokens <= room:
            return spec
        return msgspec.structs.replace(spec, max_tokens=room)

    def too_long(self, spec: RequestSpec) -> str | None:
        """Say why no arena that is there holds ``spec``, if it is so."""
        largest = self.largest_tokens()
        needed = spec.prompt_tokens + (1 if spec.open_ended else spec.max_tokens)
        if not largest or needed <= largest:
            return None
        return f"prompt and answer need {needed} tokens, the largest arena holds {largest}"

    def forget(self, peer: Peer) -> None:
        """A worker is gone; what it had in its cache its successor has."""
        self.workers.pop(peer, None)

    def missing(self, *, split: bool) -> tuple[Reason, str] | None:
        """Return what a request would lack, whatever the load; ``split`` wants a prefill too."""
        decodes = [view for view in self._accepting(Role.DECODE) if view.capacity_tokens]
        if not decodes:
            return Reason.NO_DECODE_WORKER, "no decode worker is ready"
        if not split:
            return None
        prefills = {view.peer for view in self._accepting(Role.PREFILL)}
        if not prefills:
            return Reason.NO_PREFILL_WORKER, "no prefill worker is ready"
        if not any(prefills & set(view.status.writers) for view in decodes):
            return Reason.NO_PREFILL_WORKER, "no prefill worker has mapped decode's memory yet"
        return None

    def choose(self, entry: Entry, now: float) -> Place | None:
        """Return where ``entry`` can start now, or ``None`` if it has to wait."""
        decodes = [view for view in self._usable(Role.DECODE, now) if self._fits(view, entry)]
        if not decodes:
            return None
        near = [view for view in decodes if _near(view, entry)]
        if near:
            # Where it is in place first, then where it only has to be copied.
            decode = min(
                near,
                key=lambda v: (v.peer.worker_id != entry.source, self._cost(v, entry), v.peer),
            )
            where = "in its arena" if decode.peer.worker_id == entry.source else "in its reach"
            why = f"what the lost attempt computed is {where}"
            return Place(decode.peer, None, reuse=True, why=why)
        decode = min(decodes, key=lambda view: (self._cost(view, entry), view.peer))
        prefills = self._usable(Role.PREFILL, now)
        uncached = entry.tokens - self._cached(decode, entry) * AFFINITY_BLOCK_TOKENS
        why = self._why(decode, entry, len(decodes))
        if not self._accepting(Role.PREFILL) or uncached <= self.local_prefill_max_tokens:
            return Place(decode.peer, None, why=why)
        paired = [view for view in prefills if view.peer in decode.status.writers]
        if not paired and (now - decode.since) * 1000 > self.limits.lease_ttl_ms:
            return Place(decode.peer, None, why=why)  # none of them can write there, nor soon
        ahead = self.limits.prefill_ahead_max
        free = [view for view in paired if view.status.waiting + view.placed < ahead]
        if not free:
            return None
        prefill = min(
            free, key=lambda view: (view.status.queued_tokens + view.placed_tokens, view.peer)
        )
        return Place(decode.peer, prefill.peer, why=why)

    def could_move(self, entry: Entry, now: float) -> bool:
        """Whether another decode worker could import what its own has, and has room for it."""
        assert entry.decode is not None
        host = self.workers[entry.decode].host
        return any(
            view.host == host and view.peer != entry.decode and self._fits(view, entry)
            for view in self._usable(Role.DECODE, now)
        )

    def placed(self, entry: Entry, place: Place) -> None:
        """Remember what was just given away."""
        decode = self.workers[place.decode]
        decode.placed += 1
        decode.placed_blocks += self._blocks(decode, entry)
        if place.prefill is not None:
            prefill = self.workers[place.prefill]
            prefill.placed += 1
            prefill.placed_tokens += entry.tokens
        for chain in entry.chains:
            self._affinity[chain] = place.decode.worker_id
            self._affinity.move_to_end(chain)
        while len(self._affinity) > AFFINITY_NAMES_MAX:
            self._affinity.popitem(last=False)

    # --- inside -------------------------------------------------------------------------------

    def _accepting(self, role: Role) -> list[WorkerView]:
        return [view for view in self.of(role) if view.status.accepting]

    def _usable(self, role: Role, now: float) -> list[WorkerView]:
        """Accepting workers; those that just failed only if there is no other."""
        accepting = self._accepting(role)
        return [view for view in accepting if view.avoid_until <= now] or accepting

    def _blocks(self, view: WorkerView, entry: Entry) -> int:
        size = max(1, view.status.block_size)
        return -(-entry.tokens // size)

    def _fits(self, view: WorkerView, entry: Entry) -> bool:
        status = view.status
        held = status.running + status.waiting + view.placed
        whole = entry.tokens + max(0, entry.remaining)
        if held >= self.limits.reservations_max or view.capacity_tokens < whole:
            return False
        growth = 0
        if held:
            growth_tokens = min(self.limits.growth_tokens, entry.remaining)
            growth = -(-growth_tokens // max(1, status.block_size))
        return view.free_blocks >= self._blocks(view, entry) + growth

    def _cached(self, view: WorkerView, entry: Entry) -> int:
        """Leading blocks of the prompt that ``view`` probably still has."""
        count = 0
        for chain in entry.chains:
            if self._affinity.get(chain) != view.peer.worker_id:
                break
            count += 1
        return count

    def _why(self, view: WorkerView, entry: Entry, choices: int) -> str:
        cached = self._cached(view, entry) * AFFINITY_BLOCK_TOKENS
        return (
            f"least cost {self._cost(view, entry):.2f} of {choices}: {view.free_blocks} blocks "
            f"free, about {cached} tokens cached"
        )

    def _cost(self, view: WorkerView, entry: Entry) -> float:
        """Load and memory in use, each 0..1, less the share of the prompt that is cached."""
        status = view.status
        load = (status.running + status.waiting + view.placed) / self.limits.batch_sequences_max
        used = 1 - max(0, view.free_blocks) / max(1, status.blocks_total)
        cached = self._cached(view, entry) * AFFINITY_BLOCK_TOKENS / max(1, entry.tokens)
        return load + used - cached


def _near(view: WorkerView, entry: Entry) -> bool:
    """Whether ``view`` can get at the arena that has the KV of ``entry``."""
    return bool(entry.source) and view.host == entry.source_host
