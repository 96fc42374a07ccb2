"""What a decode worker takes in, and how a request starts here.

Decides by what a request needs now and by what it will grow to; the router's guess does not count.
"""

from __future__ import annotations

from baton.core.ids import Peer
from baton.core.lifecycles import LeaseState
from baton.core.outcomes import Reason
from baton.decode.handover import Handover
from baton.decode.imports import Imports
from baton.decode.scheduler import Scheduler
from baton.decode.sequence import Sequence, Stage
from baton.decode.state import State
from baton.wire.messages import ReserveDecode, WorkRefused


class Admission:
    """The door of one decode worker."""

    def __init__(
        self, state: State, handover: Handover, imports: Imports, scheduler: Scheduler
    ) -> None:
        self.state = state
        self.handover = handover
        self.imports = imports
        self.scheduler = scheduler

    def why_not(self, message: ReserveDecode) -> tuple[Reason, str] | None:
        state, spec = self.state, message.spec
        if self.state.draining:
            return Reason.DRAINING, "this worker is draining"
        if self.state.lease is not LeaseState.HELD:
            return Reason.SUSPECT, "this worker cannot renew its lease"
        key = spec.request_id, message.epoch
        if key in self.handover.tickets or key in self.imports.running:
            # The ledger had lost that it was placed here: only a later epoch can be told apart.
            return Reason.STALE_EPOCH, "what this attempt had here is not given back yet"
        if len(state.sequences) >= state.limits.reservations_max:
            return Reason.QUEUE_FULL, "reservations_max sequences are here"
        capacity = state.pool.total * state.block_size
        if spec.prompt_tokens + spec.max_tokens > capacity:
            return (
                Reason.TOO_LONG,
                f"prompt and answer need more than the arena's {capacity} tokens",
            )
        if spec.gateway not in state.peers and not spec.resume_ms:
            return Reason.NO_LINK, f"no link to {spec.gateway} yet"
        if message.prefill is not None and message.prefill not in self.handover.writers:
            return Reason.NO_LINK, f"{message.prefill} has not mapped this arena yet"
        return None

    def take_in(
        self, seq: Sequence, prefill: Peer | None, source: str
    ) -> tuple[Reason, str] | None:
        """Reserve its blocks and start its way: a ticket to ``prefill``, an import from ``source``,
        or local chunks."""
        state, pool, limits = self.state, self.state.pool, self.state.limits
        full = (seq.length - 1) // state.block_size
        seq.extend_chains(state.root, full * state.block_size)
        found = pool.match(seq.chains[:full])
        pool.reference(found)
        seq.cached_tokens = seq.computed = len(found) * state.block_size
        elsewhere = source not in ("", state.me.worker_id) and len(found) < full
        if source and prefill is None and not elsewhere and self.too_much(seq):
            pool.release(found)
            return self.too_much(seq)
        needed = seq.blocks_for(seq.length) - len(found)
        growth = min(
            seq.blocks_for(limits.growth_tokens),
            seq.blocks_for(seq.spec.prompt_tokens + seq.spec.max_tokens) - needed - len(found),
        )
        crowded = any(other.blocks for other in state.sequences.values())
        wanted = needed + (growth if crowded else 0)
        if pool.available() < wanted or (crowded and self.scheduler.waiting()):
            pool.release(found)
            return Reason.NO_BLOCKS, f"{wanted} blocks wanted, {pool.available()} available"
        if prefill is not None and found and seq.length - seq.computed <= limits.hit_rest_tokens:
            self.handover.decline(seq, prefill)
            prefill = None
        if prefill is None:
            fresh = pool.grow(needed)
            assert fresh is not None
            seq.blocks = [*found, *fresh]
            if elsewhere:
                self.imports.start(seq, source)
                return None
            seq.stage = Stage.LOCAL
            state.note("taken_in", seq, way="local", cached_tokens=seq.cached_tokens)
            return None
        fresh = pool.reserve(needed, epoch=seq.epoch, writer=prefill.incarnation)
        assert fresh is not None
        seq.blocks = [*found, *fresh]
        self.handover.issue(seq, prefill, found, fresh)
        return None

    def too_much(self, seq: Sequence) -> tuple[Reason, str] | None:
        """Why what is left to compute of KV that was said to be there is not computed here."""
        rest = seq.length - seq.computed
        if rest <= self.state.limits.local_rest_tokens:
            return None
        return Reason.KV_MISSING, f"{rest} of {seq.length} tokens are not here"

    def refuse(self, router: Peer, request_id: str, epoch: int, reason: Reason, text: str) -> None:
        self.state.note(
            "work_refused", request_id=request_id, epoch=epoch, reason=reason, message=text
        )
        self.state.send(router, WorkRefused(request_id, epoch, reason, text))
