"""Requests that another router had: taken over as they are, wherever that is possible.

Decides what becomes of a request whose gateway lost its router. The ledger moves the record (no new
epoch); a placed attempt whose decode lives goes on undisturbed, its workers only learn whom to tell
of a failure. Everything else goes the usual way of a retry.
"""

from __future__ import annotations

from baton.core.ids import Peer
from baton.ports.ledger import Adopted
from baton.router.attempts import Attempts
from baton.router.entry import Blame, Entry, Phase
from baton.router.state import State
from baton.wire.messages import SubmitRequest, WorkAdopted


class Adoption:
    """The way in for what other routers had begun."""

    def __init__(self, state: State, attempts: Attempts) -> None:
        self.state = state
        self.attempts = attempts
        attempts.adopted = self.adopted

    def begin(self, message: SubmitRequest, now: float) -> None:
        """Ask the ledger for the record. Nothing else refuses it: it was admitted once."""
        # Its gateway has it as its client sent it: the router before had cut an open end.
        placement = self.state.placement
        entry = Entry.create(placement.fitted(message.spec), now - message.age_ms / 1000)
        entry.phase = Phase.ADOPTING
        entry.turn, entry.epoch = message.turn, message.epoch
        entry.decode, entry.prefill = message.decode, message.prefill
        entry.base, entry.decode_lost = message.base, message.decode_lost
        entry.held = message.held
        entry.placed_once = entry.taken_in = message.begun
        known = placement.largest_tokens() and not self.state.starting(now)
        entry.unmeasured = not (message.begun and known)
        entry.ledger_since = now
        self.state.entries[message.spec.request_id] = entry
        self.attempts.ask_again(entry, now)

    def adopted(self, entry: Entry, reply: Adopted, now: float) -> None:
        """The record is ours: go on from where it stands."""
        entry.epoch = reply.epoch
        entry.blames = [Blame(0, "under another router") for _ in range(reply.failures)]
        entry.progress = reply.epoch
        self.state.measure("requests_adopted_total")
        self.state.note("adopted", entry, turn=entry.turn, state=reply.state.value)
        if reply.decode is None:
            if entry.begun:
                self.attempts.recover(entry, now)
            else:
                self.attempts.enqueue(entry)
            return
        lost = entry.decode_lost and entry.decode == reply.decode
        entry.decode, entry.prefill = reply.decode, reply.prefill
        entry.phase = Phase.PLACED
        entry.placed_once = entry.taken_in = True
        if lost and reply.decode not in self.state.placement.workers:
            self.attempts.recover(entry, now)
            return
        entry.untold = {peer for peer in (entry.decode, entry.prefill) if peer is not None}
        # This router may be new here: whoever lives opens a link within a lease.
        entry.link_due = now + self.state.limits.lease_ttl_ms / 1000
        self._tell_workers(entry)
        self.attempts.tell_placed(entry, now)

    def _tell_workers(self, entry: Entry) -> None:
        """Tell those of the attempt's workers that are linked whom to report to."""
        for worker in sorted(entry.untold & self.state.placement.workers.keys()):
            entry.untold.discard(worker)
            spec = entry.spec
            whom = entry.turn, spec.gateway, entry.held
            adopted = WorkAdopted(spec.request_id, entry.epoch, *whom)
            self.state.send(worker, adopted)
        if entry.decode not in entry.untold:
            entry.link_due = None

    def worker_up(self, peer: Peer) -> None:
        """A worker has opened its link: it may not know yet that its attempts are ours."""
        for entry in self.state.entries.values():
            if entry.phase is Phase.PLACED and peer in entry.untold:
                self._tell_workers(entry)

    def decode_out_of_hearing(self, entry: Entry, now: float) -> None:
        """Decode has ended its link because it did not hear us: it lives, and works. What was said
        meanwhile may be lost, so it is asked when it is linked again."""
        if entry.decode is not None:
            entry.untold.add(entry.decode)
        entry.link_due = now + self.state.limits.lease_ttl_ms / 1000

    def announce(self) -> None:
        """The lease was lost and is held again: the ledger was emptied, or this router was away.
        An emptied ledger learns what stands; a router that was away learns whom it has lost."""
        for entry in self.state.entries.values():
            self.attempts.restore_what_stands(entry)
