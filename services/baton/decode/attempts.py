"""Attempts as routers speak of them: placed here, adopted by another router, asked for.

Decides which attempt and which router of it counts, and what a router hears whose attempt is not
here. Whether there is room for one is decided in ``admission.py``.
"""

from __future__ import annotations

from baton.core.ids import Peer
from baton.core.outcomes import Reason
from baton.decode.admission import Admission
from baton.decode.ends import Ends
from baton.decode.imports import Imports
from baton.decode.io import BlocksImported
from baton.decode.output import Output
from baton.decode.readers import Readers
from baton.decode.sequence import Sequence, Stage
from baton.decode.state import State
from baton.wire.fields import ID_BYTES
from baton.wire.messages import DecodeReserved, ReserveDecode, WorkAdopted, WorkAsked, WorkFailed


class Attempts:
    """What routers say of one decode worker's sequences."""

    def __init__(
        self,
        state: State,
        *,
        admission: Admission,
        imports: Imports,
        output: Output,
        readers: Readers,
        ends: Ends,
    ) -> None:
        self.state = state
        self.admission = admission
        self.imports = imports
        self.output = output
        self.readers = readers
        self.ends = ends
        self.arrivals = 0
        self.placements = 0
        """Heard of, taken in or not: a router counts each as load until the next status."""

    # --- placed here --------------------------------------------------------------------------

    def reserve(self, router: Peer, message: ReserveDecode, now: float) -> None:
        """Take it in, or say why not; what is here of an older attempt gives way."""
        self.placements += 1
        spec, epoch = message.spec, message.epoch
        known = self.state.sequences.get(spec.request_id)
        if known is not None and known.epoch >= epoch:
            if known.epoch == epoch and known.turn < message.turn:
                # It was placed once more: the ledger had lost that it was, and where.
                held = len(message.output) // ID_BYTES
                whom = message.turn, spec.gateway, held
                self.adopted(router, WorkAdopted(spec.request_id, epoch, *whom), now)
            if known.epoch > epoch:
                text = f"epoch {known.epoch} is here"
                self.admission.refuse(router, spec.request_id, epoch, Reason.STALE_EPOCH, text)
            return
        if known is not None:
            self.ends.drop(known)
        refusal = self.admission.why_not(message)
        if refusal is not None:
            self.admission.refuse(router, spec.request_id, epoch, *refusal)
            return
        self.arrivals += 1
        seq = Sequence.create(
            message, router, order=self.arrivals, block_size=self.state.block_size
        )
        if seq.finish is None:
            refusal = self.admission.take_in(seq, message.prefill, message.source)
            if refusal is not None:
                self.admission.refuse(router, spec.request_id, epoch, *refusal)
                return
        self.state.sequences[spec.request_id] = seq
        self.readers.begin(seq, now)
        self.state.measure("prefix_cache_queries_total", seq.length)
        self.state.measure("prefix_cache_hits_total", seq.cached_tokens)
        if seq.finish is not None:
            # Only the word that it is complete was missing.
            self._reserved(seq)
            self.output.queue_run(seq, seq.held)
            self.output.finish(seq, now)
        elif seq.stage is not Stage.IMPORTING:
            if seq.forced or message.source:
                self.state.recovered(seq, self._way(seq, message))
            self._reserved(seq)

    def _way(self, seq: Sequence, message: ReserveDecode) -> str:
        if seq.stage is Stage.REMOTE:
            return "prefill"
        return "take_over" if message.source == self.state.me.worker_id else "local"

    def _reserved(self, seq: Sequence) -> None:
        reserved = DecodeReserved(seq.spec.request_id, seq.epoch, seq.cached_tokens)
        self.state.send(seq.router, reserved)

    def imported(self, event: BlocksImported) -> None:
        """Go on from what came; if too much is missing, the router gives it to prefill first."""
        seq = self.imports.finished(event)
        if seq is None:
            return
        seq.stage = Stage.LOCAL
        refusal = self.admission.too_much(seq)
        if refusal is not None and seq.router in self.state.peers:
            self.ends.drop(seq)
            self.admission.refuse(seq.router, *seq.key, *refusal)
            return
        self.state.recovered(seq, "import" if event.sums else "local")
        self._reserved(seq)

    # --- adopted, asked for -------------------------------------------------------------------

    def adopted(self, router: Peer, message: WorkAdopted, now: float) -> None:
        """Another router answers for the attempt from now on; without one here it has to know."""
        request_id, epoch = message.request_id, message.epoch
        seq = self.state.sequences.get(request_id)
        if seq is not None and seq.epoch == epoch and seq.stage is Stage.MOVED:
            self.ends.drop(seq)  # its router took it away, and did not come to place it elsewhere
            seq = None
        mine = seq is not None and seq.epoch == epoch and seq.turn <= message.turn
        if seq is not None and mine and not self.readers.adopted(seq, message, now):
            self.ends.drop(seq)  # it is computed again, with all that its gateway has to be told
            seq = None
        if seq is None or seq.epoch < epoch:
            self._unknown(router, request_id, epoch)
        elif seq.epoch == epoch and seq.turn <= message.turn:
            seq.router, seq.turn, seq.offered = router, message.turn, False
            if seq.stage is not Stage.IMPORTING:
                self._reserved(seq)

    def asked(self, router: Peer, message: WorkAsked) -> None:
        """A router that cannot see the gateway asks: whoever ended it here may have told nobody
        else before it died."""
        seq = self.state.sequences.get(message.request_id)
        if seq is None or seq.epoch != message.epoch or seq.turn > message.turn:
            self._unknown(router, message.request_id, message.epoch)

    def _unknown(self, router: Peer, request_id: str, epoch: int) -> None:
        text = f"{self.state.me} has no such attempt"
        self.state.send(router, WorkFailed(request_id, epoch, Reason.UNKNOWN_ATTEMPT, text))
