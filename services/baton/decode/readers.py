"""Who reads a sequence's tokens: its gateway, another one, or nobody for a while.

Decides how long a sequence goes on that nobody reads, how far, and what a gateway is sent that
takes it over (ADR 0017). Only a resumable request outlives its gateway; every other one ends with
it.
"""

from __future__ import annotations

from baton.core.ids import Peer
from baton.decode.output import Output
from baton.decode.scheduler import Scheduler
from baton.decode.sequence import Sequence, Stage
from baton.decode.state import State
from baton.wire.messages import RequestResumed, TokensBounded, WorkAdopted


class Readers:
    """The gateways of one decode worker's sequences."""

    def __init__(self, state: State, output: Output, scheduler: Scheduler) -> None:
        self.state = state
        self.output = output
        self.scheduler = scheduler

    def begin(self, seq: Sequence, now: float) -> None:
        """A sequence was taken in; its gateway may be away already."""
        if seq.gateway not in self.state.peers:
            self.away(seq, now)

    def away(self, seq: Sequence, now: float) -> None:
        """Nobody reads: its window begins."""
        if seq.away_since is None:
            seq.away_since = now
            seq.upto = len(seq.output) + self.state.limits.resume_tokens_max
            self.state.note("reader_away", seq, gateway=str(seq.gateway))

    def adopted(self, seq: Sequence, message: WorkAdopted, now: float) -> bool:
        """Its router says which gateway reads it, and from where on. Return whether that one can
        have all that it lacks."""
        if message.held < seq.forced and seq.spec.sampling.logprobs >= 0:
            return False  # log-probabilities of what came with the reservation are not here
        seq.held = min(message.held, len(seq.output))
        if message.gateway != seq.gateway:
            self.state.send(seq.gateway, RequestResumed(seq.spec.request_id, message.turn))
            self.state.note("reader_changed", seq, gateway=str(message.gateway))
            seq.gateway = message.gateway
        if seq.gateway in self.state.peers:
            self._back(seq)
        elif seq.spec.resume_ms:
            self.away(seq, now)
        return True

    def gateway_up(self, gateway: Peer) -> None:
        """A gateway is linked that was awaited."""
        for seq in self.state.sequences.values():
            if seq.gateway == gateway and seq.away_since is not None:
                self._back(seq)

    def _back(self, seq: Sequence) -> None:
        seq.away_since = None
        self._set_bound(seq, None)
        if len(seq.output) > seq.held or seq.finish is not None:
            self.output.queue_run(seq, seq.held)

    def bounded(self, peer: Peer, message: TokensBounded) -> None:
        """Its gateway says how far it may go while nobody reads there."""
        seq = self.state.sequences.get(message.request_id)
        if seq is not None and seq.epoch == message.epoch and seq.gateway == peer:
            self._set_bound(seq, message.upto)

    def _set_bound(self, seq: Sequence, upto: int | None) -> None:
        seq.upto = upto
        if seq.stage is Stage.PAUSED and (upto is None or len(seq.output) < upto):
            seq.stage = Stage.LOCAL
            self.state.note("unpaused", seq)

    def pause(self, seq: Sequence) -> None:
        """Stop a running sequence that has gone as far as it may; it gives its blocks back."""
        if seq.stage is Stage.RUNNING and seq.upto is not None and len(seq.output) >= seq.upto:
            self.scheduler.give_up_blocks(seq)
            seq.stage = Stage.PAUSED
            self.state.note("paused", seq, tokens=len(seq.output))

    def waits(self, seq: Sequence) -> bool:
        """Whether it needs nothing here but somebody to come for it: whoever comes can have it made
        again elsewhere."""
        return seq.away_since is not None and seq.stage in (Stage.FINISHED, Stage.PAUSED)

    def given_up(self, now: float) -> list[Sequence]:
        """Return the sequences for which no gateway came within their window."""
        return [
            seq
            for seq in self.state.sequences.values()
            if seq.away_since is not None and now - seq.away_since > seq.spec.resume_ms / 1000
        ]
