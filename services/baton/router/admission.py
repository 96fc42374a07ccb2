"""What is taken in: bounds, reasons, and one entry a request however often it is submitted."""

from __future__ import annotations

from baton.core.ids import Peer
from baton.core.outcomes import Reason
from baton.ports.driving import Note
from baton.router.adoption import Adoption
from baton.router.attempts import Attempts
from baton.router.entry import Entry, Phase
from baton.router.state import State
from baton.wire.messages import RequestRefused, RequestResumed, RequestSpec, SubmitRequest


class Admission:
    """The door of one router."""

    def __init__(self, state: State, attempts: Attempts, adoption: Adoption) -> None:
        self.state = state
        self.attempts = attempts
        self.adoption = adoption

    def submit(self, gateway: Peer, message: SubmitRequest, now: float) -> None:
        spec = message.spec
        entry = self.state.entries.get(spec.request_id)
        if entry is not None and message.turn < entry.turn and entry.spec.gateway != gateway:
            # Its client reads at another gateway by now; that one's absence is another matter.
            self.state.send(gateway, RequestResumed(spec.request_id, entry.turn))
            return
        if entry is not None and message.turn <= entry.turn:
            self.attempts.tell_again(entry, now)
            return
        had = entry is not None
        if entry is not None:
            # Another router had it meanwhile, or another gateway claimed it: what we know is old.
            if entry.spec.gateway != gateway:
                resumed = RequestResumed(spec.request_id, message.turn)
                self.state.send(entry.spec.gateway, resumed)
            self.attempts.verdicts.forget(entry)
        taken_in = message.turn > 1 or message.begun
        if taken_in and (had or not self.state.draining):
            # What this router has it sees through, whoever reads it by now.
            self.adoption.begin(message, now)
            return
        refusal = self._why_not(spec, now)
        if refusal is not None:
            reason, text = refusal
            self.state.measure("requests_refused_total", reason=reason)
            self.state.emit(
                Note("refused", {"request_id": spec.request_id, "reason": reason, "message": text})
            )
            self.state.send(
                gateway,
                RequestRefused(spec.request_id, reason, text, self.state.retry_after_ms(reason)),
            )
            return
        entry = Entry.create(self.state.placement.fitted(spec), now)
        entry.unmeasured = not self.state.placement.largest_tokens()
        self.state.entries[spec.request_id] = entry
        self.attempts.ask_again(entry, now)

    def _why_not(self, spec: RequestSpec, now: float) -> tuple[Reason, str] | None:
        limits = self.state.limits
        if self.state.draining:
            return Reason.DRAINING, "this router is draining"
        awaited = self.state.starting(now) or self.state.returning(now)
        if not self.state.placement.largest_tokens() and not awaited:
            return Reason.NO_DECODE_WORKER, "no decode worker is up"
        entries = [
            entry
            for entry in self.state.entries.values()
            if entry.phase not in (Phase.PLACED, Phase.CLOSING, Phase.ADOPTING)
        ]
        waiting = [entry.spec.prompt_tokens for entry in entries]
        if len(waiting) >= limits.queue_requests_max:
            return Reason.OVERLOADED, f"{len(waiting)} requests are waiting"
        if sum(waiting) + spec.prompt_tokens > limits.queue_tokens_max:
            return Reason.OVERLOADED, f"{sum(waiting)} prompt tokens are waiting"
        if (text := self.state.placement.too_long(spec)) is not None:
            return Reason.TOO_LONG, text
        # One whose gateway is away waits for that, and nobody waits for it.
        there = (entry for entry in entries if entry.gateway_lost_at is None)
        return self._too_late(sum(entry.spec.prompt_tokens for entry in there))

    def _too_late(self, tokens: int) -> tuple[Reason, str] | None:
        """Say why its first token would come too late whatever way it goes, if that is so and is
        to be refused; ``tokens`` prompt tokens wait before it."""
        choice = self.state.placement.choice
        if choice is None or not choice.slo.refuse or not tokens:
            return None
        wait_s = max(self.state.queue_s, self.state.placement.drain_s(tokens))
        if wait_s <= choice.slo.ttft_s:
            return None
        return Reason.OVERLOADED, f"it would wait {wait_s:.1f} s before anything of it is computed"
