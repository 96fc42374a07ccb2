"""Continuous batching on decode: which rows the next step has, and who gives way for memory.

Decides the batch: every running sequence up to the limit, oldest first, and one chunk of local
prefill, which several sequences share if each needs less (after a take-over each needs a few
tokens). A suspect of having ended a worker is stepped alone, in turn with all others: should it do
that again, nobody else is blamed.

When blocks run out the youngest gives way: its blocks are released and its tokens computed again
later (row invariance makes them the same). The oldest can always go on, so the worker never
freezes.
"""

from __future__ import annotations

from baton.core.outcomes import Reason
from baton.core.slo import Slo
from baton.core.step_times import MOSTLY, chunk_beside, pairs_of
from baton.decode.handover import Handover
from baton.decode.io import RunStep
from baton.decode.sequence import Sequence, Stage
from baton.decode.state import State
from baton.ports.channel import BlockCheck
from baton.ports.driving import RecordStep
from baton.ports.engine import Row, SampleSpec
from baton.wire.messages import AttemptId

#: Whether borrowed cores pay is looked at every so many steps, and tried again after so long.
BORROWING_STEPS, BORROWING_AGAIN_S = 8, 60.0
#: So much of the time that a first token may take a prompt waits for streams it would disturb.
PAUSE_SHARE = 0.5


class Scheduler:
    """Builds steps over the sequences of one decode worker."""

    def __init__(self, state: State, handover: Handover, slo: Slo | None = None) -> None:
        self.state = state
        self.handover = handover
        self.slo = slo
        self.step = 0
        self.step_since: float | None = None
        self.rows: tuple[Row, ...] = ()
        self.seals: tuple[tuple[BlockCheck, ...], ...] = ()
        self.preemptions = 0
        self.shared = False
        """Whether the last step was that of everybody who is no suspect."""
        self.recorded = False
        """Whether the record names somebody."""
        self.borrowing = False
        """Whether the last step had other workers' cores."""
        self.declined_at: float | None = None
        """Since when streams' steps want none of them."""

    # --- building -----------------------------------------------------------------------------

    def start_step(self, now: float) -> None:
        """Start the next step if none runs and there is work."""
        if self.step_since is not None:
            return
        rows = self._rows(now)
        if not rows:
            self.forget_step()
            return
        self.step += 1
        self.step_since = now
        self.rows = tuple(rows)
        self.state.in_flight = {
            row.request_id: self.state.sequences[row.request_id] for row in rows
        }
        self.seals = tuple(self._seals(row) for row in rows)
        self.recorded = True
        attempts = [AttemptId(*seq.key) for seq in self.state.in_flight.values()]
        self.state.emit(RecordStep(tuple(attempts)))
        self.state.emit(RunStep(self.step, self.rows, self.seals, self._borrows(now)))

    def _borrows(self, now: float) -> bool:
        """Return whether the step may have other workers' cores. They make most steps shorter and
        some longer, those whose core was wanted back or taken by others; it is the longest that
        streams' SLO is about. Now and then it is tried again."""
        streams = sum(seq.stage is Stage.RUNNING for seq in self.state.in_flight.values())
        if self.slo is None or not streams:
            return True
        if self.step % BORROWING_STEPS == 0:
            steps = self.state.figures.steps
            context = sum(row.start for row in self.rows)
            if steps.borrowing_pays(streams, context, self.slo.itl_s):
                self.declined_at = None
            elif self.declined_at is None:
                self.declined_at = now
            elif now - self.declined_at >= BORROWING_AGAIN_S:
                self.declined_at = None
                steps.forget_borrowed()
        return self.declined_at is None

    def forget_step(self) -> None:
        """No step runs: should this worker end now, nobody is to blame."""
        if self.recorded:
            self.recorded = False
            self.state.emit(RecordStep(()))

    def _rows(self, now: float) -> list[Row]:
        """Whoever has waited longest has the next step: everybody together, or one suspect."""
        ready = [*self.state.live(Stage.RUNNING), *self.state.live(Stage.LOCAL)]
        together = [seq for seq in ready if not seq.alone]
        suspects = sorted(
            (seq for seq in ready if seq.alone), key=lambda seq: (seq.stepped, seq.order)
        )
        for seq in suspects if self.shared else ():
            if rows := self._rows_of([seq], now):
                self.shared, seq.stepped = False, self.step + 1
                return rows
        if rows := self._rows_of(together, now):
            self.shared = True
            return rows
        for seq in suspects:
            if rows := self._rows_of([seq], now):
                seq.stepped = self.step + 1
                return rows
        return []

    def _rows_of(self, ready: list[Sequence], now: float) -> list[Row]:
        """Return the rows of one step of ``ready``, the running ones before the local prompts."""
        limits = self.state.limits
        rows: list[Row] = []
        for seq in [seq for seq in ready if seq.stage is Stage.RUNNING]:
            if len(rows) >= limits.batch_sequences_max:
                break
            if seq.stage is not Stage.RUNNING:
                continue  # an older one's need may have taken its blocks just now
            if self._room(seq, seq.length):
                rows.append(self._row(seq, seq.length))
        prompts = [seq for seq in ready if seq.stage is Stage.LOCAL]
        budget = self._chunk(rows, prompts, now) if prompts else 0
        for seq in prompts if budget else ():
            if not seq.blocks:
                self._reuse_prefix(seq)
            elif seq.computed == seq.cached_tokens:
                self._reuse_more(seq)
            end = min(seq.computed + budget, seq.length)
            if not self._room(seq, end):
                break  # the next one is younger: it does not take what this one waits for
            rows.append(self._row(seq, end))
            budget -= end - seq.computed
            if end < seq.length or not budget:
                break
        # A row may have been pre-empted by a later one's need; only what still stands runs.
        return [row for row in rows if self._stands(row)]

    @property
    def chunk_tokens(self) -> int:
        """Return how many prompt tokens a step may have at most. With an SLO it is that which keeps
        chunks short beside running sequences."""
        limits = self.state.limits
        if self.slo is None:
            return limits.local_prefill_chunk_tokens
        return max(limits.local_prefill_chunk_tokens, limits.prefill_chunk_tokens)

    def _chunk(self, rows: list[Row], prompts: list[Sequence], now: float) -> int:
        """Return how many tokens of local ``prompts`` go into a step with ``rows``; 0: they wait
        for these."""
        joining = any(seq.stage is Stage.REMOTE for seq in self.state.sequences.values())
        if self.slo is None or not (rows or joining):
            return self.chunk_tokens
        first, unit, steps = prompts[0], self.state.block_size, self.state.figures.steps
        alone = steps.curve()
        curve = steps.curve_borrowed() if self.borrowing else alone
        count, context = len(rows), sum(row.start for row in rows)
        chunk = chunk_beside(
            self.slo,
            alone,
            curve,
            first.computed,
            most=self.chunk_tokens,
            unit=unit,
            rows=count,
            context=context,
        )
        calm_s = curve.seconds(count, context) if rows else 0.0
        if chunk > unit or not rows or first.output or self.slo.broken(calm_s):
            return chunk
        least = min(unit, first.length - first.computed)
        step_s = curve.seconds(count + least, context, pairs_of(first.computed, least))
        if self.slo.keeps(step_s, curve.spread) or curve.tokens[-1] < count + least:
            return chunk
        # As steps have shown nothing is short enough. It began when nothing ran, or nobody else
        # could take it.
        for seq in prompts:
            seq.paused_since = now if seq.paused_since is None else seq.paused_since
        assert first.paused_since is not None
        return 0 if now - first.paused_since < PAUSE_SHARE * self.slo.ttft_s else chunk

    def _stands(self, row: Row) -> bool:
        seq = self.state.sequences.get(row.request_id)
        return seq is not None and seq.computed == row.start and bool(seq.blocks)

    def _row(self, seq: Sequence, end: int) -> Row:
        last = end == seq.length
        sample = SampleSpec(seq.spec.sampling, len(seq.output), seq.prompt, seq.output)
        return Row(
            request_id=seq.spec.request_id,
            token_ids=seq.tokens[seq.computed : end],
            start=seq.computed,
            blocks=seq.table(),
            arena=self.state.arena.file_id,
            sample=sample if last else None,
        )

    def _seals(self, row: Row) -> tuple[BlockCheck, ...]:
        """Name the blocks that ``row`` fills to their end."""
        seq, size = self.state.in_flight[row.request_id], self.state.block_size
        filled = range(row.start // size, (row.start + len(row.token_ids)) // size)
        return tuple(
            BlockCheck(logical, seq.blocks[logical], size, seq.name_of(self.state.root, logical))
            for logical in filled
        )

    # --- memory -------------------------------------------------------------------------------

    def _room(self, seq: Sequence, tokens: int) -> bool:
        """Give ``seq`` blocks for its first ``tokens`` tokens, taking them from younger ones."""
        missing = seq.blocks_for(tokens) - len(seq.blocks)
        if missing <= 0:
            return True
        while True:
            fresh = self.state.pool.grow(missing)
            if fresh is not None:
                seq.blocks.extend(fresh)
                return True
            if not self._make_room(seq):
                return False

    def _reuse_prefix(self, seq: Sequence) -> None:
        """Start (again) from what the cache still has; the last token is always computed."""
        seq.extend_chains(self.state.root, seq.length - 1)
        found = self.state.pool.match(seq.chains[: (seq.length - 1) // seq.block_size])
        self.state.pool.reference(found)
        seq.blocks = list(found)
        seq.computed = len(found) * seq.block_size

    def _reuse_more(self, seq: Sequence) -> None:
        """Its turn comes: what others have computed since it was taken in need not be again."""
        first = seq.computed // seq.block_size
        found = self.state.pool.match(seq.chains[: (seq.length - 1) // seq.block_size])
        more = found[first:]
        if not more:
            return
        self.state.pool.reference(more)
        self.state.pool.release(seq.blocks[first : len(found)])
        seq.blocks[first : len(found)] = more
        seq.computed = seq.cached_tokens = len(found) * seq.block_size
        self.state.measure("prefix_cache_hits_total", len(more) * seq.block_size)

    def _make_room(self, needy: Sequence) -> bool:
        """Take blocks from the youngest sequence younger than ``needy``; ``False`` if none.

        What is kept for another worker gives way first. Blocks of an import are the thread's: they
        are waited for."""
        kept = [seq for seq in self.state.live(Stage.MOVED) if seq.blocks]
        if kept:
            self._count(kept[-1])
            self.state.pool.release(kept[-1].blocks)
            kept[-1].blocks = []
            return True
        younger = [
            seq for seq in self.state.sequences.values() if seq.order > needy.order and seq.blocks
        ]
        local = [seq for seq in younger if seq.stage in (Stage.LOCAL, Stage.RUNNING)]
        if local:
            victim = max(local, key=lambda seq: seq.order)
            self._count(victim)
            self.give_up_blocks(victim)
            return True
        remote = [seq for seq in younger if seq.stage is Stage.REMOTE]
        if remote and not self.handover.revoking():
            # Its blocks come back only when its writer has stopped; the router places it again.
            victim = max(remote, key=lambda seq: seq.order)
            self._count(victim)
            self.handover.drop(victim)
            del self.state.sequences[victim.spec.request_id]
            self.state.work_failed(victim, Reason.NO_BLOCKS, "an older request needed the memory")
        return False

    def _count(self, victim: Sequence) -> None:
        self.preemptions += 1
        self.state.measure("preemptions_total")
        self.state.note("preempted", victim, stage=victim.stage.value)

    def give_up_blocks(self, seq: Sequence) -> None:
        """Release everything ``seq`` has computed; it will be computed again."""
        self.state.pool.release(seq.blocks)
        seq.blocks = []
        seq.computed = 0
        seq.stage = Stage.LOCAL

    # --- ends ---------------------------------------------------------------------------------

    def learn(self, now: float, borrowed: float) -> None:
        """The step in flight has returned all results; it had ``borrowed`` cores for that share."""
        assert self.step_since is not None
        self.borrowing = borrowed >= MOSTLY
        self.state.figures.stepped(self.rows, now - self.step_since, borrowed)

    def end_step(self) -> list[tuple[Row, tuple[BlockCheck, ...], Sequence]]:
        """The step returned: nothing is pinned by it any more. Return its rows, each with the
        blocks that it filled."""
        rows = [
            (row, seals, self.state.in_flight[row.request_id])
            for row, seals in zip(self.rows, self.seals, strict=True)
        ]
        self.rows = self.seals = ()
        self.step_since = None
        self.state.in_flight = {}
        return rows

    def waiting(self) -> bool:
        """Whether a sequence that was taken in has no blocks now: new ones must wait."""
        return any(
            seq.stage is Stage.LOCAL and not seq.blocks for seq in self.state.sequences.values()
        )
