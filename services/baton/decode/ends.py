"""How a sequence leaves this worker: cancelled, moved, failed, or ended for a lost gateway.

Decides who has a say in it, and what its blocks wait for before others get them. When an answer is
complete is decided in ``output.py``, who gives way for memory in ``scheduler.py``.
"""

from __future__ import annotations

from baton.core.ids import Peer
from baton.core.outcomes import Ending, Outcome, Reason
from baton.decode.departure import MOVABLE, Departure
from baton.decode.handover import Handover
from baton.decode.imports import Imports
from baton.decode.sequence import Sequence, Stage
from baton.decode.state import State
from baton.ports.driving import CallLedger
from baton.ports.ledger import EndRequest
from baton.wire.messages import CancelWork, RequestEnded


class Ends:
    """The ends of one decode worker's sequences."""

    def __init__(
        self, state: State, handover: Handover, imports: Imports, departure: Departure
    ) -> None:
        self.state = state
        self.handover = handover
        self.imports = imports
        self.departure = departure

    # --- asked for ----------------------------------------------------------------------------

    def cancel_work(self, message: CancelWork) -> None:
        """A router that lost the request to another one has no say."""
        request_id, epoch = message.request_id, message.epoch
        seq = self.state.sequences.get(request_id)
        if seq is not None and message.turn < seq.turn:
            self.state.measure("stale_messages_total", kind="turn")
        elif message.reason is Reason.MOVED:
            self._move(request_id, epoch)
        else:
            self._cancel(request_id, epoch, message.reason)

    def ended(self, gateway: Peer, message: RequestEnded) -> None:
        """A gateway that lost the request to another one has no say."""
        seq = self.state.sequences.get(message.request_id)
        if seq is not None and seq.gateway != gateway:
            self.state.measure("stale_messages_total", kind="turn")
        else:
            self._cancel(message.request_id, message.epoch, message.outcome.reason)

    def _cancel(self, request_id: str, epoch: int, reason: Reason | None) -> None:
        seq = self.state.sequences.get(request_id)
        if seq is None or seq.epoch > epoch:
            return
        if seq.stage is not Stage.FINISHED:
            self.state.note(
                "cancelled", seq, reason=reason, stage=seq.stage.value, blocks=len(seq.blocks)
            )
        self.drop(seq)

    def _move(self, request_id: str, epoch: int) -> None:
        """Its router has another place for it."""
        seq = self.state.sequences.get(request_id)
        if seq is None or seq.epoch != epoch:
            return
        if seq.stage in MOVABLE:
            self.departure.keep(seq)
        elif seq.stage is not Stage.FINISHED:
            self._cancel(request_id, epoch, Reason.MOVED)

    # --- not asked for ------------------------------------------------------------------------

    def fail(self, seq: Sequence, reason: Reason, text: str, *, retryable: bool = True) -> None:
        """Its attempt is over here, and its router hears why."""
        self.drop(seq)
        self.state.work_failed(seq, reason, text, retryable=retryable)

    def end_for_lost_gateway(self, seq: Sequence) -> None:
        """The owner ends the request in its gateway's place."""
        self.drop(seq)
        self.state.note("cancelled", seq, reason=Reason.GATEWAY_LOST, stage=seq.stage.value)
        outcome = Outcome(
            Ending.CANCELLED, reason=Reason.GATEWAY_LOST, completion_tokens=len(seq.output)
        )
        op = EndRequest(seq.spec.request_id, seq.epoch, outcome, self.state.me, seq.turn)
        self.state.emit(CallLedger(op))

    # --- its blocks ---------------------------------------------------------------------------

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence in any stage. Blocks of the step in flight wait for its end, those of
        an import for the thread."""
        del self.state.sequences[seq.spec.request_id]
        if seq.stage is Stage.IMPORTING:
            assert seq.key in self.imports.running
        elif seq.stage is Stage.REMOTE:
            self.handover.drop(seq)
        elif self.state.in_flight.get(seq.spec.request_id) is seq:
            self.state.pinned.append(seq)
        else:
            self.state.pool.release(seq.blocks)
            seq.blocks = []

    def release_dropped(self) -> None:
        """The step has returned: nothing is read any more for those that were dropped in it."""
        for seq in self.state.pinned:
            self.state.pool.release(seq.blocks)
            seq.blocks = []
        self.state.pinned.clear()
