"""Tokens on their way to the gateways: one message a step and gateway.

Decides when a sequence is complete and what is sent again; the gateway decides what counts.
"""

from __future__ import annotations

from baton.core.ids import Peer
from baton.core.stopping import finish_of
from baton.decode.sequence import Sequence, Stage
from baton.decode.state import State
from baton.wire.messages import TokenChunk, TokenLogprob, TokenRun


class Output:
    """What one decode worker has to say to gateways."""

    def __init__(self, state: State) -> None:
        self.state = state
        #: To be sent at the end of this event.
        self.runs: dict[Peer, list[TokenRun]] = {}

    def emit_token(
        self, seq: Sequence, token_id: int, logprob: TokenLogprob | None, now: float
    ) -> None:
        """Append one sampled token, queue it for its gateway, and end the sequence if it must."""
        seq.finish = finish_of(seq.spec.sampling, seq.spec.max_tokens, len(seq.output), token_id)
        seq.append(token_id, logprob)
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
        for gateway, items in runs.items():
            self.state.send(gateway, TokenChunk(tuple(items)))
