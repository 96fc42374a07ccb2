"""Tokens on their way to the gateways: one message a step and gateway.

Decides when a sequence is complete and what is sent again; the gateway decides what counts. What
many sequences have to say at once, or a long one all over again, may be more than a frame holds:
then it is several messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from baton.core.ids import Peer
from baton.core.stopping import finish_of
from baton.decode.sequence import Sequence, Stage
from baton.decode.state import State
from baton.wire.fields import TokenLogprob
from baton.wire.messages import TokenChunk, TokenRun

#: No id or log-probability takes as many bytes of a message.
ENTRY_BYTES = 32
#: For so many of them a run's name and numbers count.
RUN_ENTRIES = 16


class Output:
    """What one decode worker has to say to gateways."""

    def __init__(self, state: State) -> None:
        self.state = state
        #: To be sent at the end of this event.
        self.runs: dict[Peer, list[TokenRun]] = {}
        #: First tokens, and where they stand in the output: to be sent with those of the step in
        #: flight.
        self.kept: list[tuple[Sequence, int]] = []

    def emit_token(
        self, seq: Sequence, token_id: int, logprob: TokenLogprob | None, now: float
    ) -> None:
        """Append one sampled token, queue it for its gateway, and end the sequence if it must."""
        self._append(seq, token_id, logprob)
        self._tell(seq, now)

    def emit_joined(
        self, seq: Sequence, token_id: int, logprob: TokenLogprob | None, now: float
    ) -> None:
        """Append the token that came with a prompt from elsewhere. If more will follow it is sent
        when the step in flight is over: its successor waits for the rest of that step and a step
        of its own, and would come up to twice as late as all later ones."""
        self._append(seq, token_id, logprob)
        if seq.finish is None and self.state.in_flight:
            self.kept.append((seq, len(seq.output) - 1))
        else:
            self._tell(seq, now)

    def step_over(self) -> None:
        """Queue the first tokens that were kept until now."""
        kept, self.kept = self.kept, []
        for seq, index in kept:
            if self.state.sequences.get(seq.spec.request_id) is seq and seq.stage is Stage.RUNNING:
                self.queue_run(seq, index)

    def _append(self, seq: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        seq.finish = finish_of(seq.spec.sampling, seq.spec.max_tokens, len(seq.output), token_id)
        seq.append(token_id, logprob)

    def _tell(self, seq: Sequence, now: float) -> None:
        self.queue_run(seq, len(seq.output) - 1)
        if seq.finish is not None:
            self.finish(seq, now)

    def finish(self, seq: Sequence, now: float) -> None:
        """Complete: without blocks from now on, and kept until its gateway has spoken."""
        self.state.note("finished", seq, finish=seq.finish, tokens=len(seq.output))
        if seq.running_since is not None:
            self.state.measure("request_decode_seconds", now - seq.running_since)
        seq.stage = Stage.FINISHED
        seq.finished_at = now
        self.state.figures.answer_tokens.learn(len(seq.output))
        self.state.pool.release(seq.blocks)
        seq.blocks = []

    def queue_run(self, seq: Sequence, index: int) -> None:
        """Queue output ids from ``index`` on for the sequence's gateway."""
        start = max(index, seq.held)
        logprobs = tuple(seq.logprobs[start - seq.forced :]) if seq.logprobs else ()
        run = TokenRun(
            request_id=seq.spec.request_id,
            epoch=seq.epoch,
            index=start,
            ids=tuple(seq.output[start:]),
            logprobs=logprobs,
            finish=seq.finish,
            cached_tokens=seq.cached_tokens if start == 0 else 0,
        )
        seq.sent_first = True
        self.runs.setdefault(seq.gateway, []).append(run)

    def resend(self, peer: Peer, request_id: str, epoch: int, index: int) -> None:
        seq = self.state.sequences.get(request_id)
        if seq is not None and seq.epoch == epoch and seq.gateway == peer and seq.sent_first:
            self.queue_run(seq, index)

    def flush(self) -> None:
        """Send what has gathered."""
        runs, self.runs = self.runs, {}
        most = self.state.limits.frame_bytes_max // ENTRY_BYTES
        for gateway, items in runs.items():
            for chunk in chunks_of(items, most):
                self.state.send(gateway, chunk)


def chunks_of(runs: Iterable[TokenRun], most: int) -> Iterator[TokenChunk]:
    """Put ``runs`` into messages of at most ``most`` ids and log-probabilities, one id at least."""
    gathered: list[TokenRun] = []
    size = 0
    for run in runs:
        for part in _parts(run, most):
            entries = RUN_ENTRIES + len(part.ids) * _entries(part)
            if gathered and size + entries > most:
                yield TokenChunk(tuple(gathered))
                gathered, size = [], 0
            gathered.append(part)
            size += entries
    yield TokenChunk(tuple(gathered))


def _entries(run: TokenRun) -> int:
    """Return how many numbers each of its ids comes with, itself included."""
    return 1 + max((1 + len(each.top) for each in run.logprobs), default=0)


def _parts(run: TokenRun, most: int) -> Iterator[TokenRun]:
    """Cut a run that is too long for one message; the end comes with the last part."""
    length = max(1, (most - RUN_ENTRIES) // _entries(run))
    if len(run.ids) <= length:
        yield run
        return
    for begin in range(0, len(run.ids), length):
        end = begin + length
        yield msgspec.structs.replace(
            run,
            index=run.index + begin,
            ids=run.ids[begin:end],
            logprobs=run.logprobs[begin:end],
            finish=run.finish if end >= len(run.ids) else None,
            cached_tokens=run.cached_tokens if begin == 0 else 0,
        )
