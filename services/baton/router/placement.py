"""Where a request goes: which decode worker, and which prefill worker if any.

Decides from what workers last said of themselves, corrected by what was sent to them since; which
decode workers are looked at, in ``spread.py``; what they have cached, in ``prefixes.py``. The last
word is decode's own reservation; a wrong guess here costs a round trip, never correctness.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from baton.core.ids import Member, Peer, Role
from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.core.slo import Slo
from baton.router.choice import Choice
from baton.router.entry import Entry
from baton.router.estimate import Estimate, Need
from baton.router.prefixes import PrefixIndex
from baton.router.spread import COMING_WEIGHT, Found, PlacementRule, Spread, common, held
from baton.router.workers import Health, WorkerView
from baton.wire.messages import RequestSpec, WorkerStatus

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
    cached: int | None = None
    """Tokens that decode should have cached; ``None``: that was not the question."""
    estimates: tuple[Estimate, ...] = ()
    """What was expected of this way and, after it, of others; empty where nothing is known yet, or
    nothing was estimated."""


@dataclass(frozen=True, slots=True)
class BlockNaming:
    """How every process of the pool names blocks."""

    root: bytes = b""
    block_size: int = 16


class Placement:
    """All workers of one pool as one router sees them. With an ``slo`` each request's way is chosen
    by estimates."""

    def __init__(
        self,
        limits: Limits,
        *,
        local_prefill_max_tokens: int,
        naming: BlockNaming,
        rule: PlacementRule,
        slo: Slo | None = None,
    ) -> None:
        self.limits = limits
        self.naming = naming
        self.spread = Spread(limits, rule)
        self.prefixes = PrefixIndex(limits)
        self.local_prefill_max_tokens = local_prefill_max_tokens
        self.choice = None if slo is None else Choice(slo, limits, local_prefill_max_tokens)
        self.workers: dict[Peer, WorkerView] = {}
        self.losses = 0
        self.passed: object = None
        """What the workers were like when the queue was last gone through."""
        self.passed_at = 0.0
        self._healths: OrderedDict[str, Health] = OrderedDict()
        """By worker_id."""

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
        if member.role is Role.DECODE:
            self.prefixes.meet(peer, now)

    def forget(self, peer: Peer, now: float, *, lives: bool) -> None:
        """A worker is gone, or its link is; what is in its successor's cache that one tells."""
        view = self.workers.pop(peer)
        self.prefixes.forget(peer)
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

    def in_order(self, waiting: Iterable[Entry], now: float) -> list[Entry]:
        """Return who waits in the order in which places are given: as they came. With an SLO
        whoever cannot have its first token in time any more lets those pass that can, for a
        bounded time; who has had a place does not."""
        entries = list(waiting)
        choice = self.choice
        if choice is None or len(entries) < 2:
            return entries
        soonest_s = min((busy_s for busy_s, _ in self._queues()), default=0.0)

        def lets_pass(entry: Entry) -> bool:
            waited_s = now - entry.arrived
            if entry.begun or choice.overdue(waited_s):
                return False
            left_s = choice.slo.ttft_s - waited_s - soonest_s
            if left_s <= 0:
                return True  # of a long queue nearly all: what is cached need not be asked for
            if left_s >= choice.prompt_s(entry.tokens):
                return False
            cached = max((self._cached(view, entry) for view in self.of(Role.DECODE)), default=0)
            return left_s < choice.prompt_s(entry.tokens - cached)

        return sorted(entries, key=lets_pass)

    def drain_s(self, tokens: int) -> float:
        """Return how long ``tokens`` tokens of prompts that wait here take, after those that
        wait at workers; 0 where no speed is known. They go to whoever is done first: a worker with
        a long queue delays nobody else's."""
        work, speed, done_s = float(tokens), 0.0, 0.0
        for busy_s, each in sorted(self._queues()):
            if speed and done_s <= busy_s:
                break
            work += busy_s * each
            speed += each
            done_s = work / speed
        return done_s

    def _queues(self) -> list[tuple[float, float]]:
        """Return, for each worker that computes prompts, how many seconds of them it has and how
        many tokens a second it makes; none where no speed is known."""
        prefills, choice = self._accepting(Role.PREFILL), self.choice
        computing = prefills or self._accepting(Role.DECODE)
        speeds = [(view, max(1, view.status.chunk_tokens), view.status.curve) for view in computing]
        found = [(view, chunk, curve.seconds(chunk)) for view, chunk, curve in speeds]
        if prefills and choice is not None:
            # Decode helps as far as its streams bear it.
            found += [
                (view, *choice.help_of(view))
                for view in self._accepting(Role.DECODE)
                if view.status.mixed
            ]
        return [
            ((view.status.queued_tokens + view.placed_tokens) * seconds / chunk, chunk / seconds)
            for view, chunk, seconds in found
            if seconds > 0
        ]

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
        found = {view.peer: self._found(view, entry) for view in decodes}
        near = [view for view in decodes if _near(view, entry)]
        if near:
            # Where it is in place first, then where it only has to be copied.
            at_home = [view for view in near if view.peer.worker_id == entry.source]
            decode = self.spread.best(entry, at_home or near, found)
            why = f"what the lost attempt computed is in its {'arena' if at_home else 'reach'}"
            return Place(decode.peer, None, reuse=True, why=why)
        prefills = self._usable(Role.PREFILL, now)
        estimated = self.choice is not None and self.choice.knows(self.workers.values())
        decodes = self.spread.candidates(decodes, estimated=estimated)
        if estimated:
            return self._estimated(entry, decodes, prefills, found, now)
        decode = self.spread.best(entry, decodes, found)
        cached = found[decode.peer].cached
        straight = entry.tokens - cached <= self.local_prefill_max_tokens
        why = self._why(entry, decode, found[decode.peer], len(decodes))
        if not self._accepting(Role.PREFILL) or straight:
            return Place(decode.peer, None, why=why, cached=cached)
        paired = [view for view in prefills if view.peer in decode.status.writers]
        if not paired and (now - decode.since) * 1000 > self.limits.lease_ttl_ms:
            # None of them can write there, nor soon.
            return Place(decode.peer, None, why=why, cached=cached)
        ahead = self.limits.prefill_ahead_max
        free = [view for view in paired if view.status.waiting + view.placed < ahead]
        if not free:
            return None
        prefill = min(
            free, key=lambda view: (view.status.queued_tokens + view.placed_tokens, view.peer)
        )
        return Place(decode.peer, prefill.peer, why=why, cached=cached)

    def _estimated(
        self,
        entry: Entry,
        decodes: list[WorkerView],
        prefills: list[WorkerView],
        found: Mapping[Peer, Found],
        now: float,
    ) -> Place | None:
        assert self.choice is not None
        waited_s = now - entry.arrived
        needs = [Need(entry.tokens, found[view.peer].cached, waited_s) for view in decodes]
        costs = [self.spread.cost(entry, view, found[view.peer]) for view in decodes]
        ways = self.choice.choose(list(zip(decodes, needs, costs, strict=True)), prefills)
        if ways is None:
            return None
        best, *others = ways
        cached = found[best.decode].cached
        why = f"{best.words()}, {cached} tokens cached"
        if others:
            why += "; other ways: " + "; ".join(way.words() for way in others)
        return Place(best.decode, best.prefill, why=why, cached=cached, estimates=ways)

    def has_room(self, entry: Entry, now: float) -> bool:
        """Whether a decode worker could take ``entry`` in now."""
        return any(self._fits(view, entry) for view in self._usable(Role.DECODE, now))

    def could_move(self, entry: Entry, now: float) -> bool:
        """Whether another decode worker could import what its own has, and has room for it and a
        row: where it is, it has one."""
        assert entry.decode is not None
        host = self.workers[entry.decode].host
        return any(
            view.host == host and view.peer != entry.decode and self._fits(view, entry, row=True)
            for view in self._usable(Role.DECODE, now)
        )

    def placed(self, entry: Entry, place: Place) -> None:
        """Remember what was just given away."""
        decode = self.workers[place.decode]
        decode.given()
        decode.placed_blocks += self._blocks(decode, entry)
        rest = entry.tokens - (place.cached or 0)
        if place.prefill is not None:
            prefill = self.workers[place.prefill]
            prefill.given()
            prefill.placed_tokens += rest
            decode.placed_joining += 1
        else:
            decode.placed_tokens += rest
        decode.sent[entry.spec.request_id] = entry
        self.spread.last = place.decode.worker_id

    def left(self, entry: Entry) -> None:
        """Its decode worker does not have it any more, or is told so."""
        if entry.decode in self.workers:
            self.workers[entry.decode].sent.pop(entry.spec.request_id, None)

    def check(self) -> None:
        """Assert the bounds."""
        assert len(self._healths) <= HEALTHS_MAX

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

    def _fits(self, view: WorkerView, entry: Entry, *, row: bool = False) -> bool:
        """``row``: it goes nowhere without a row in decode's steps."""
        status = view.status
        whole = entry.tokens + max(0, entry.remaining)
        there, most = held(view), self.limits.reservations_max
        if row or not (entry.answering or entry.source):
            # Without a row in a step its first token would be followed by a wait for others' last.
            most = min(most, self.limits.batch_sequences_max)
        if there >= most or view.capacity_tokens < whole:
            return False
        growth = 0
        if there:
            growth_tokens = min(self.limits.growth_tokens, entry.remaining)
            growth = -(-growth_tokens // max(1, status.block_size))
        if there and self.choice is not None and not entry.placed_once:
            # What is there will grow too: room for that, before this one costs anything.
            growth += status.growth_blocks
        return view.free_blocks >= self._blocks(view, entry) + growth

    def _found(self, view: WorkerView, entry: Entry) -> Found:
        """Return what ``view`` has of the prompt, and will have."""
        size, names = self.naming.block_size, self._names(entry)
        cached = hoped = self._cached(view, entry)
        for other in view.sent.values():
            more = common(names, other.names) * size - cached
            weight = 1.0 if other.prefill is None else COMING_WEIGHT
            hoped = max(hoped, cached + int(weight * more))
        return Found(cached, hoped)

    def _cached(self, view: WorkerView, entry: Entry) -> int:
        """Return how many leading tokens of ``entry`` a decode worker has."""
        return self.prefixes.leading(view.peer, self._names(entry)) * self.naming.block_size

    def _names(self, entry: Entry) -> tuple[int, ...]:
        most = self.limits.prefix_lookup_blocks_max
        return entry.name(self.naming.root, self.naming.block_size, most)

    def _why(self, entry: Entry, view: WorkerView, found: Found, choices: int) -> str:
        cost = self.spread.cost(entry, view, found)
        words = f"{view.free_blocks} blocks free, {found.cached} tokens cached"
        if found.hoped > found.cached:
            words += f", {found.hoped} hoped for"
        return f"{self.spread.rule}: cost {cost:.2f} of {choices}: {words}"


def _near(view: WorkerView, entry: Entry) -> bool:
    """Whether ``view`` can get at the arena that has the KV of ``entry``."""
    return bool(entry.source) and view.host == entry.source_host
