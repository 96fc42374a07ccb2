"""What is taken in: bounds, reasons, and one entry a request however often it is submitted."""

from __future__ import annotations

import msgspec

from baton.core.ids import Peer
from baton.core.lifecycles import LeaseState
from baton.core.outcomes import Reason
from baton.ports.driving import CallLedger, Note
from baton.ports.ledger import AdmitRequest
from baton.router.attempts import Attempts
from baton.router.entry import Entry, Phase
from baton.router.state import State
from baton.wire.messages import RequestRefused, RequestSpec


class Admission:
    """The door of one router."""

    def __init__(self, state: State, attempts: Attempts) -> None:
        self.state = state
        self.attempts = attempts

    def submit(self, gateway: Peer, spec: RequestSpec, now: float) -> None:
        entry = self.state.entries.get(spec.request_id)
        if entry is not None:
            self.attempts.tell_again(entry, now)
            return
        refusal = self._why_not(spec)
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
        largest = self.state.placement.largest_tokens()
        if spec.open_ended and spec.prompt_tokens + spec.max_tokens > largest:
            spec = msgspec.structs.replace(spec, max_tokens=largest - spec.prompt_tokens)
        entry = Entry.create(spec, now)
        self.state.entries[spec.request_id] = entry
        self.state.emit(CallLedger(AdmitRequest(spec, self.state.me)))

    def _why_not(self, spec: RequestSpec) -> tuple[Reason, str] | None:
        limits = self.state.limits
        if self.state.draining:
            return Reason.DRAINING, "this router is draining"
        if self.state.lease is not LeaseState.HELD:
            return Reason.LEDGER_UNAVAILABLE, "the ledger cannot be reached"
        largest = self.state.placement.largest_tokens()
        if not largest:
            return Reason.NO_DECODE_WORKER, "no decode worker is up"
        waiting = [
            entry.spec.prompt_tokens
            for entry in self.state.entries.values()
            if entry.phase not in (Phase.PLACED, Phase.CLOSING)
        ]
        if len(waiting) >= limits.queue_requests_max:
            return Reason.OVERLOADED, f"{len(waiting)} requests are waiting"
        if sum(waiting) + spec.prompt_tokens > limits.queue_tokens_max:
            return Reason.OVERLOADED, f"{sum(waiting)} prompt tokens are waiting"
        needed = spec.prompt_tokens + (1 if spec.open_ended else spec.max_tokens)
        if needed > largest:
            return (
                Reason.TOO_LONG,
                f"prompt and answer need {needed} tokens, the largest arena holds {largest}",
            )
        return None
