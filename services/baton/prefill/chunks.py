"""Chunks: one step over the prompts that have their tickets, and what follows when it returns.

Decides the order of prompts (first come, first served, packed into a token budget), how large a
chunk may be, and when decode hears of what it stored. A block once announced is never stored into
again. A suspect of having ended a worker has its chunks to itself.
"""

from __future__ import annotations

from baton.core.lifecycles import LeaseState, RequestState
from baton.core.outcomes import Reason
from baton.core.step_times import Rehearsed, SharedStepTimes, Step
from baton.ports.driving import CallLedger, RecordStep
from baton.ports.ledger import AdvanceRequest
from baton.prefill.chunk_size import ChunkSize
from baton.prefill.ends import Ends
from baton.prefill.io import ChunkFinished, ChunkResult, ChunkRow, ChunkStored, RunChunk
from baton.prefill.job import Job
from baton.prefill.state import State
from baton.wire.handover import ChunkAnnounced, PrefillCommitted
from baton.wire.messages import AttemptId

#: Weight of the newest chunk in the measured speed.
SPEED_WEIGHT = 0.3


class Chunks:
    """The steps of one prefill worker, one at a time."""

    def __init__(self, state: State, ends: Ends) -> None:
        self.state = state
        self.ends = ends
        self.step = 0
        self.step_since: float | None = None
        self.recorded = False
        """Whether the record of steps names somebody."""
        quarter_s = state.limits.lease_ttl_ms / 4000
        self.size = ChunkSize(state.block_size, state.limits.prefill_chunk_tokens, quarter_s)
        self.times = SharedStepTimes()
        self.tokens_per_s = 0.0

    def rehearsed(self, steps: Rehearsed) -> None:
        """What steps took before the first request."""
        self.times.rehearsed(steps)
        for step, seconds in steps:
            self.size.rehearsed(step.tokens, seconds)

    def start(self, now: float) -> None:
        """Start the next chunk if none runs and there is work."""
        if self.step_since is not None:
            return
        rows = self._rows(now)
        if not rows:
            if self.recorded:
                self.recorded = False
                self.state.emit(RecordStep(()))
            return
        self.step += 1
        self.step_since = now
        self.state.flying = rows
        self.recorded = True
        self.state.emit(RecordStep(tuple(AttemptId(*job.key) for _, job in rows)))
        self.state.emit(RunChunk(self.step, tuple(row for row, _ in rows)))

    def _rows(self, now: float) -> list[tuple[ChunkRow, Job]]:
        budget = self.size.tokens()
        rows: list[tuple[ChunkRow, Job]] = []
        for job in self.state.jobs.values():
            if job.ticket is None:
                continue
            if job.alone and rows:
                break
            chunk = job.chunk(budget, self.state.block_size)
            if chunk is None:
                break
            if job.started_at is None:
                job.started_at = now
                self._advance(job)
            rows.append((chunk, job))
            budget -= len(chunk.row.token_ids)
            if budget <= 0 or job.alone:
                break
        return rows

    def _advance(self, job: Job) -> None:
        if self.state.lease is LeaseState.HELD:
            op = AdvanceRequest(*job.key, RequestState.PREFILLING, self.state.me)
            self.state.emit(CallLedger(op))

    def stored(self, event: ChunkStored, now: float) -> None:
        """Announce it at once: decode verifies the last chunk while its first token is chosen."""
        assert event.step == self.step
        self.state.measure("checksum_seconds", event.sums_seconds)
        for (row, job), checksums in zip(self.state.flying, event.checksums, strict=True):
            if checksums is None or job.stopping:
                continue
            sums = job.advance(row, checksums)
            job.last_write_ns = event.last_write_ns
            if sums:
                self.state.send(job.decode, ChunkAnnounced(*job.key, sums))
            self.state.note(
                "chunk_stored",
                job,
                tokens=len(row.row.token_ids),
                upto=job.computed,
                blocks=len(sums),
                chunk_ms=round((now - (self.step_since or now)) * 1e3, 1),
            )

    def finished(self, event: ChunkFinished, now: float) -> None:
        """Nothing of it stores any more: commit what is complete, end what has to."""
        assert event.step == self.step
        flying, self.state.flying = self.state.flying, []
        since, self.step_since = self.step_since, None
        tokens = sum(len(row.row.token_ids) for row, _ in flying)
        self.state.measure("engine_step_seconds", event.seconds, kind="prefill")
        if event.borrowed:
            borrowed_s = event.seconds * event.borrowed
            self.state.measure("engine_borrowed_seconds_total", borrowed_s, kind="prefill")
        self.state.measure("engine_step_tokens", tokens, kind="prefill")
        if event.seconds > 0 and not any(result.fenced for result in event.results):
            speed = tokens / event.seconds
            weight = SPEED_WEIGHT if self.tokens_per_s else 1.0
            self.tokens_per_s += weight * (speed - self.tokens_per_s)
            self.size.learn(tokens, event.seconds)
            assert since is not None
            step = Step.of((row.row.start, len(row.row.token_ids)) for row, _ in flying)
            self.times.learn(step, now - since, event.borrowed)
        for (_, job), result in zip(flying, event.results, strict=True):
            if job.stopping:
                self.ends.stop(job)
            elif result.fenced:
                self.ends.fail(job, Reason.FENCED, "the ticket's blocks were taken back")
            elif result.failed:
                failed, retryable = result.failed, result.retryable
                self.ends.fail(job, Reason.PREFILL_ERROR, failed, retryable=retryable)
            elif not job.remaining:
                self._commit(job, result, event.ended_ns, now)

    def _commit(self, job: Job, result: ChunkResult, ended_ns: int, now: float) -> None:
        """Everything is stored and announced: give decode the first token, and keep nothing.

        The token goes to decode alone. Whether the KV it was sampled from is what it must be is
        known only when decode has verified the last block; before that no client may see it.
        """
        assert result.sampled is not None and job.ticket is not None
        request_id, epoch = job.key
        first, logprob = result.sampled.token_id, result.sampled.logprob
        prefill_s = now - (job.started_at or now)
        self.state.send(
            job.decode,
            PrefillCommitted(
                request_id=request_id,
                epoch=epoch,
                first_id=first,
                first_logprob=logprob,
                prefill_ms=prefill_s * 1000,
                last_write_ns=job.last_write_ns,
                ended_ns=ended_ns,
            ),
        )
        self.state.measure("request_prefill_seconds", prefill_s)
        self.state.note(
            "prefilled", job, tokens=len(job.tokens), prefill_ms=round(prefill_s * 1e3, 1)
        )
        del self.state.jobs[request_id]
