"""Who is to blame for attempts that end without a result, and when a request has failed too often.

Decides what counts: an attempt of the request's own that failed, or a worker that ended while the
request had rows in its step. Which requests had is in the record of the dead worker, and its
successor says it; until then a blame is open, and nobody is given up for open ones. New tokens
since the attempt before clear a request of everything older.
"""

from __future__ import annotations

from baton.core.ids import Peer
from baton.core.outcomes import Reason
from baton.router.entry import Blame, Entry, Phase
from baton.router.state import State
from baton.router.verdicts import Verdicts
from baton.wire.fields import ID_BYTES
from baton.wire.messages import AttemptId, LastStep

#: From the second failure of its own on each next attempt waits, twice as long each time.
FAILED_PAUSE_S = 0.25
#: Of what a worker says of a failure so much is kept: it is kept for every attempt.
TEXT_CHARS_MAX = 1_000


class Blames:
    """All blames of one router's requests."""

    def __init__(self, state: State, verdicts: Verdicts) -> None:
        self.state = state
        self.verdicts = verdicts

    def put(self, entry: Entry, text: str, now: float, lost: Peer | None = None) -> None:
        """The attempt of ``entry`` has ended; with ``lost``, because that worker ended."""
        due = now + self.state.limits.recovery_ms / 1000 if lost is not None else 0.0
        open_ = set() if lost is None else {lost}
        workers = (entry.decode, entry.prefill)
        entry.blames.append(Blame(entry.epoch, text[:TEXT_CHARS_MAX], open_, workers, due))

    def ended(self, peer: Peer, now: float) -> None:
        """``peer`` is lost. An attempt that is over for the death of another worker of its own may
        have ended this one: that blame stays open until this one's successor has spoken too."""
        for entry in self.state.entries.values():
            for blame in entry.blames:
                if blame.lost and peer in blame.workers:
                    blame.lost.add(peer)
                    blame.due = now + self.state.limits.recovery_ms / 1000

    def fenced(self, entry: Entry, output: bytes, now: float) -> bool:
        """Its gateway says what was delivered. Return whether the request may be tried again."""
        held = len(output) // ID_BYTES
        if held > entry.base:
            entry.progress = entry.epoch
            entry.blames = [blame for blame in entry.blames if blame.epoch == entry.epoch]
        entry.output, entry.base = output, held
        own = sum(not blame.lost for blame in entry.blames)
        if own > 1:
            pause = FAILED_PAUSE_S * 2.0 ** (own - 2) * self.state.jitter(entry)
            entry.not_before = max(entry.not_before, now + pause)
        return self.judge(entry, now)

    def judge(self, entry: Entry, now: float) -> bool:
        """Give ``entry`` up if it has failed too often; return ``False`` then. While it is open
        whether it has, it waits."""
        count = len(entry.blames)
        was, entry.on_trial = entry.on_trial, count >= self.state.limits.attempts_max
        if not entry.on_trial:
            if was:
                entry.not_before = now
            return True
        due = max(blame.due if blame.lost else 0.0 for blame in entry.blames)
        if due > now:
            entry.not_before = max(entry.not_before, due)
            return True
        text = f"{count} attempts in a row failed, the last one: {entry.blames[-1].text}"
        self.verdicts.cancel_work(entry, Reason.ATTEMPTS_EXHAUSTED)
        self.verdicts.give_up(entry, now, Reason.ATTEMPTS_EXHAUSTED, text)
        return False

    def heard(self, message: LastStep, now: float) -> None:
        """A successor says who had rows in the step that its former self left."""
        for attempt in message.attempts:
            self._name(attempt, message.peer)
        for entry in list(self.state.entries.values()):
            blames = [each for each in entry.blames if message.peer in each.lost]
            if not blames or entry.phase is Phase.CLOSING:
                continue
            for blame in blames:
                blame.lost.discard(message.peer)
                if AttemptId(entry.spec.request_id, blame.epoch) in message.attempts:
                    blame.lost.clear()  # it counts, whatever the others' successors say
                elif not blame.lost:
                    entry.blames.remove(blame)
                    self.state.note("blame_taken_back", entry, worker=str(message.peer))
            if entry.phase is not Phase.FENCING:
                self.judge(entry, now)

    def _name(self, attempt: AttemptId, peer: Peer) -> None:
        """An attempt that was over already, for another worker's death, has ended this one too:
        it counts, once. What the request has delivered since, or since it is here, clears it."""
        entry = self.state.entries.get(attempt.request_id)
        if entry is None or not entry.progress <= attempt.epoch < entry.epoch:
            return
        known = [blame for blame in entry.blames if blame.epoch == attempt.epoch]
        if not known:
            entry.blames.append(Blame(attempt.epoch, f"{peer} ended in a step of it"))
        elif peer not in known[0].lost:
            known[0].lost.clear()  # whatever the other worker's successor says
