"""Where a request goes: which decode worker, and which prefill worker if any.

Decides from what workers last said of themselves, corrected by what was sent to them since. The
last word is decode's own reservation; a wrong guess here costs a round trip, never correctness.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from baton.core.ids import Member, Peer, Role
from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.core.slo import Slo
from baton.router.choice import Choice
from baton.router.entry import AFFINITY_BLOCK_TOKENS, Entry
from baton.router.estimate import Estimate, Need
from baton.router.workers import Health, WorkerView
from baton.wire.messages import RequestSpec, WorkerStatus

#: Prefix names remembered, over all workers, and no more than their arenas hold; the oldest are
#: forgotten.
AFFINITY_NAMES_MAX = 65_536
#: Who waits is looked at again after that time, whatever was heard.
AGAIN_S = 0.045
#: Names of workers whose health is remembered; the one seen longest ago is forgotten first.
HEALTHS_MAX = 1_024


@dataclass(frozen=True, slots=True)
class Place:
    """A decision; ``prefill`` is ``None`` where decode computes the prompt itself."""

    decode: Peer
    prefill: Peer | None
    reuse: bool = False
    """Decode has, or imports, what an earlier attempt computed."""
    why: str = ""
    """In words, for people."""
    estimates: tuple[Estimate, ...] = ()
    """What was expected of this way and, after it, of others; empty where nothing is known yet, or
    nothing was estimated."""


class Placement:
    """All workers of one pool as one router sees them. With an ``slo`` each request's way is chosen
    by estimates."""

    def __init__(
        self, limits: Limits, *, local_prefill_max_tokens: int, slo: Slo | None = None
    ) -> None:
        self.limits = limits
        self.local_prefill_max_tokens = local_prefill_max_tokens
        self.choice = None if slo is None else Choice(slo, limits, local_prefill_max_tokens)
        self.workers: dict[Peer, WorkerView] = {}
        self.losses = 0
        self.passed: object = None
        """What the workers were like when the queue was last gone through."""
        self.passed_at = 0.0
        self._healths: OrderedDict[str, Health] = OrderedDict()
        """By worker_id."""
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

    def meet(self, member: Member, now: float) -> None:
        """A worker is there; it says itself what it takes."""
        peer = member.peer
        health = self._healths.setdefault(peer.worker_id, Health())
        self._healths.move_to_end(peer.worker_id)
        while len(self._healths) > HEALTHS_MAX:
            self._healths.popitem(last=False)
        status = WorkerStatus(accepting=False)
        self.workers[peer] = WorkerView(peer, member.role, status, now, member.boot_id, health)

    def forget(self, peer: Peer, now: float, *, lives: bool) -> None:
        """A worker is gone, or its link is; what it had in its cache its successor has."""
        view = self.workers.pop(peer)
        self.losses += 1
        if not lives and not view.leaving:
            view.health.died(now)

    def new_pass(self, now: float) -> bool:
        """The queue is to be gone through. Return whether who waited the last time may have
        another answer now: something is heard of the workers, or time has passed."""
        changes = sum(view.changes for view in self.workers.values())
        state = self.losses, len(self.workers), changes
        if state == self.passed and now - self.passed_at < AGAIN_S:
            return False
        self.passed, self.passed_at = state, now
        if self.choice is not None:
            self.choice.new_pass()
        return True

    def drain_s(self, tokens: int) -> float:
        """Return how long ``tokens`` tokens of prompts that wait here take, after those that
        wait at prefill, or at decode where there is no prefill; 0 where no speed is known. They go
        to whoever is done first: a worker with a long queue delays nobody else's."""
        views = self._accepting(Role.PREFILL) or self._accepting(Role.DECODE)
        queues = []
        for view in views:
            chunk = max(1, view.status.chunk_tokens)
            seconds = view.status.curve.seconds(chunk)
            if seconds > 0:
                speed = chunk / seconds
                queued = view.status.queued_tokens + view.placed_tokens
                queues.append((queued / speed, speed))
        work, speed, done_s = float(tokens), 0.0, 0.0
        for busy_s, each in sorted(queues):
            if speed and done_s <= busy_s:
                break
            work += busy_s * each
            speed += each
            done_s = work / speed
        return done_s

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
        prefills = self._usable(Role.PREFILL, now)
        if self.choice is not None and self.choice.knows(self.workers.values()):
            return self._estimated(entry, decodes, prefills, now)
        decode = min(decodes, key=lambda view: (self._cost(view, entry), view.peer))
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

    def _estimated(
        self, entry: Entry, decodes: list[WorkerView], prefills: list[WorkerView], now: float
    ) -> Place | None:
        assert self.choice is not None
        waited_s = now - entry.arrived
        needs = []
        for view in decodes:
            # What an attempt that is over was to have computed may not be there.
            cached = 0 if entry.placed_once else self._cached(view, entry) * AFFINITY_BLOCK_TOKENS
            needs.append(Need(entry.tokens, min(cached, entry.tokens - 1), waited_s))
        costs = [self._cost(view, entry) for view in decodes]
        found = self.choice.choose(list(zip(decodes, needs, costs, strict=True)), prefills)
        if found is None:
            return None
        best, *others = found
        why = best.words()
        if others:
            why += "; other ways: " + "; ".join(way.words() for way in others)
        return Place(best.decode, best.prefill, why=why, estimates=found)

    def has_room(self, entry: Entry, now: float) -> bool:
        """Whether a decode worker could take ``entry`` in now."""
        return any(self._fits(view, entry) for view in self._usable(Role.DECODE, now))

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
        decode.given()
        decode.placed_blocks += self._blocks(decode, entry)
        if place.prefill is not None:
            prefill = self.workers[place.prefill]
            prefill.given()
            prefill.placed_tokens += entry.tokens
        else:
            decode.placed_tokens += entry.tokens
        for chain in entry.chains:
            self._affinity[chain] = place.decode.worker_id
            self._affinity.move_to_end(chain)
        held = sum(view.capacity_tokens for view in self.of(Role.DECODE)) // AFFINITY_BLOCK_TOKENS
        while len(self._affinity) > min(AFFINITY_NAMES_MAX, held):
            self._affinity.popitem(last=False)

    # --- inside -------------------------------------------------------------------------------

    def _accepting(self, role: Role) -> list[WorkerView]:
        return [view for view in self.of(role) if view.status.accepting]

    def _usable(self, role: Role, now: float) -> list[WorkerView]:
        """Accepting workers; those that just failed only if there is no other."""
        accepting = self._accepting(role)
        return [view for view in accepting if view.health.avoid_until <= now] or accepting

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
        if held and self.choice is not None and not entry.placed_once:
            # What is there will grow too: room for that, before this one costs anything.
            growth += status.growth_blocks
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
