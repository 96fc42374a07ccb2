"""How a request leaves its router: refused, given up, ended by its gateway, or without one.

Decides which message the gateway will take for it, and how long an entry is kept afterwards.
"""

from __future__ import annotations

from collections import OrderedDict

from baton.core.ids import Peer
from baton.core.outcomes import Ending, Outcome, Reason
from baton.ports.driving import CallLedger
from baton.ports.ledger import EndRequest
from baton.router.entry import Entry, Phase
from baton.router.moves import Moves
from baton.router.state import State
from baton.wire.messages import CancelWork, RequestEnded, RequestFailed, RequestRefused

#: Ends remembered; a ledger answers within seconds, or not at all.
OVER_MAX = 1_024


class Verdicts:
    """The ends of all requests of one router."""

    def __init__(self, state: State, moves: Moves) -> None:
        self.state = state
        self.over: OrderedDict[str, Outcome] = OrderedDict()
        """How requests have ended lately."""
        self.moves = moves

    def refuse(self, entry: Entry, now: float, reason: Reason, text: str) -> None:
        """Nothing was computed, and nothing will be: the client may come again.

        What a worker has taken in can only fail, or go on with another router if this one leaves.
        """
        if entry.taken_in and reason is not Reason.DRAINING:
            self.give_up(entry, now, reason, text)
            return
        self.state.measure("requests_refused_total", reason=reason)
        self.state.note("refused", entry, reason=reason, message=text)
        retry_after_ms = self.state.retry_after_ms(reason)
        epoch = self._fence(entry) if entry.begun else 0
        verdict = RequestRefused(entry.spec.request_id, reason, text, retry_after_ms, epoch)
        self._close(entry, verdict, now)

    def give_up(
        self,
        entry: Entry,
        now: float,
        reason: Reason,
        text: str,
        ending: Ending = Ending.FAILED,
    ) -> None:
        self.state.note("given_up", entry, level="warning", reason=reason, message=text)
        outcome = Outcome(ending, reason=reason, message=text)
        self._close(entry, RequestFailed(entry.spec.request_id, self._fence(entry), outcome), now)

    def _fence(self, entry: Entry) -> int:
        """Return the epoch that its gateway may have been fenced at: what is below, it refuses,
        verdicts too."""
        return entry.epoch + (entry.phase in (Phase.FENCING, Phase.RETRYING))

    def _close(self, entry: Entry, verdict: RequestRefused | RequestFailed, now: float) -> None:
        """Kept until the gateway says how it ended, so that a repeated submit starts nothing; at
        most as long as the ledger's record would answer that as well."""
        self.state.queue.remove(entry)
        self.state.placement.left(entry)
        self.moves.settled(entry)
        entry.phase = Phase.CLOSING
        entry.closed_at = now
        entry.verdict = verdict
        self.state.send(entry.spec.gateway, verdict)

    def ended_already(self, entry: Entry, now: float, epoch: int, outcome: Outcome) -> None:
        """The ledger knows its end, by whoever found its gateway away: that gateway must hear."""
        self.state.note("already_ended", entry, ending=outcome.ending)
        epoch = max(epoch, self._fence(entry))
        self._close(entry, RequestFailed(entry.spec.request_id, epoch, outcome), now)

    def ended(self, gateway: Peer, message: RequestEnded) -> None:
        """Its gateway says how it ended; one that lost the request to another one has no say."""
        request_id, outcome = message.request_id, message.outcome
        entry = self.state.entries.get(request_id)
        if entry is None or entry.spec.gateway != gateway:
            return
        if outcome.ending is not Ending.COMPLETED:
            # The gateway may not know yet whom this was given to.
            self.cancel_work(entry, outcome.reason or Reason.CLIENT_CANCELLED)
        else:
            for peer in (entry.decode, entry.prefill):
                if peer is not None and peer in self.state.placement.workers:
                    self.state.placement.workers[peer].succeeded()
        self.state.note("ended", entry, ending=outcome.ending)
        self.forget(entry)
        self.over[request_id] = outcome
        while len(self.over) > OVER_MAX:
            self.over.popitem(last=False)
        if message.early or entry.restored:
            # Its gateway may have ended it in a ledger that was emptied since.
            self.born_late(request_id, entry.epoch, entry.turn)

    def born_late(self, request_id: str, epoch: int, turn: int) -> None:
        """The ledger may have made the record after the request's end, which found none: end it."""
        outcome = self.over.get(request_id)
        if outcome is not None:
            op = EndRequest(request_id, epoch, outcome, self.state.me, turn)
            self.state.emit(CallLedger(op))

    def end_for_lost_gateway(self, entry: Entry) -> None:
        outcome = Outcome(Ending.CANCELLED, reason=Reason.GATEWAY_LOST)
        self.state.note("ended", entry, ending=outcome.ending, reason=Reason.GATEWAY_LOST)
        self.cancel_work(entry, Reason.GATEWAY_LOST)
        op = EndRequest(entry.spec.request_id, entry.epoch, outcome, self.state.me, entry.turn)
        self.state.emit(CallLedger(op))
        self.forget(entry)

    def cancel_work(self, entry: Entry, reason: Reason) -> None:
        """Tell its workers that this attempt is over; see :class:`CancelWork`."""
        if entry.phase is not Phase.PLACED:
            return
        for peer in (entry.decode, entry.prefill):
            if peer is not None:
                message = CancelWork(entry.spec.request_id, entry.epoch, reason, entry.turn)
                self.state.send(peer, message)

    def check(self) -> None:
        """Assert the bound."""
        assert len(self.over) <= OVER_MAX

    def forget(self, entry: Entry) -> None:
        """Nothing is known of it here any more."""
        self.state.queue.remove(entry)
        self.state.placement.left(entry)
        self.moves.settled(entry)
        self.state.entries.pop(entry.spec.request_id, None)
