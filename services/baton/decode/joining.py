"""The last part of a hand-over: from what prefill says of a prompt to the sequence that runs.

Decides that a sequence joins the steps when its commit is here and all its blocks have verified,
and that whatever does not fit its ticket ends the attempt. Which memory a writer may touch is
decided in ``handover.py``.
"""

from __future__ import annotations

from baton.core.ids import Peer
from baton.core.lifecycles import RequestState
from baton.core.outcomes import Reason
from baton.decode.ends import Ends
from baton.decode.handover import Handover
from baton.decode.io import BlocksVerified
from baton.decode.output import Output
from baton.decode.readers import Readers
from baton.decode.sequence import Sequence, Stage
from baton.decode.state import State
from baton.wire.handover import ChunkAnnounced, PrefillCommitted, PrefillFailed, WriterStopped


class Joining:
    """The sequences of one decode worker whose prompts prefill computes."""

    def __init__(
        self, state: State, handover: Handover, output: Output, readers: Readers, ends: Ends
    ) -> None:
        self.state = state
        self.handover = handover
        self.output = output
        self.readers = readers
        self.ends = ends

    # --- what prefill says --------------------------------------------------------------------

    def announced(self, peer: Peer, message: ChunkAnnounced) -> None:
        """A chunk is stored."""
        wrong = self.handover.announced(peer, message)
        self._complain(message.request_id, message.epoch, wrong)

    def committed(self, peer: Peer, message: PrefillCommitted, now: float) -> None:
        """All is announced, and this is the first token."""
        wrong = self.handover.committed(peer, message)
        self._complain(message.request_id, message.epoch, wrong)
        self._join_if_complete(message.request_id, message.epoch, now)

    def failed(self, peer: Peer, message: PrefillFailed) -> None:
        """It gives the attempt up."""
        seq = self.handover.stopped(peer, (message.request_id, message.epoch))
        if seq is not None:
            self.ends.fail(seq, message.reason, message.message, retryable=message.retryable)

    def stopped(self, peer: Peer, message: WriterStopped) -> None:
        """Unasked: it was cancelled over another link, and so will this worker be."""
        seq = self.handover.stopped(peer, (message.request_id, message.epoch))
        if seq is not None:
            self.ends.fail(seq, Reason.FENCED, f"{peer} stopped")

    def _complain(self, request_id: str, epoch: int, wrong: str | None) -> None:
        """A message that does not fit its ticket ends the attempt: never guess."""
        seq = self.state.sequences.get(request_id)
        if wrong is None or seq is None or seq.epoch != epoch:
            return
        self._integrity(seq, wrong, 1)

    def _integrity(self, seq: Sequence, text: str, blocks: int) -> None:
        self.state.measure("integrity_failures_total", blocks)
        self.ends.fail(seq, Reason.INTEGRITY, text)

    # --- what has verified --------------------------------------------------------------------

    def verified(self, event: BlocksVerified, now: float) -> None:
        """Blocks were looked at: they are what they must be, or the attempt is over."""
        self.state.measure("verify_seconds", event.seconds)
        seq = self.state.sequences.get(event.request_id)
        if seq is None or seq.epoch != event.epoch or seq.stage is not Stage.REMOTE:
            return
        bad = set(event.bad)
        good = [check for check in event.checks if check.logical not in bad]
        self.handover.verified(event.request_id, event.epoch, good, now)
        if bad:
            self._integrity(seq, f"checksum of blocks {sorted(bad)} does not match", len(bad))
            return
        self._join_if_complete(event.request_id, event.epoch, now)

    def _join_if_complete(self, request_id: str, epoch: int, now: float) -> None:
        seq = self.state.sequences.get(request_id)
        if seq is None or seq.epoch != epoch or seq.stage is not Stage.REMOTE:
            return
        commit = self.handover.complete(seq)
        if commit is None:
            return
        fresh = len(seq.blocks) - seq.cached_tokens // seq.block_size
        verified_s = self.handover.check_seconds(seq, commit)
        self.handover.adopt(seq)
        seq.stage = Stage.RUNNING
        seq.computed = seq.length
        seconds = max(0.0, now - commit.ended_ns / 1e9)
        if commit.ended_ns:
            self.state.figures.handed_over(seconds)
        self.state.measure("handover_seconds", seconds)
        self.state.measure("handover_verified_seconds", max(0.0, verified_s))
        self.state.measure("handovers_total")
        self.state.measure("handover_bytes_total", fresh * self.state.block_bytes)
        self.state.note(
            "committed",
            seq,
            blocks=fresh,
            handover_ms=round(seconds * 1e3, 3),
            verified_ms=round(verified_s * 1e3, 3),
            prefill_ms=round(commit.prefill_ms, 1),
        )
        self.state.advance(seq, RequestState.DECODING)
        seq.joined_at = now
        seq.running_since = now
        self.state.measure("generation_tokens_total")
        self.output.emit_joined(seq, commit.first_id, commit.first_logprob, now)
        self.readers.pause(seq)
