"""Which way a request goes, of all that there are: each decode worker, with each prefill worker
that can write there, or without.

Decides by estimates: the way that loses the fewest good requests, then the one that costs least:
its own time, that of streams that run, and the chance of losing them, each of which counts as much
as all of the time that a first token may take. A way may be worth waiting for; what waits here has
cost nothing yet.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.ids import Peer
from baton.core.limits import Limits
from baton.core.slo import Slo
from baton.core.step_times import StepCurve
from baton.router.estimate import Estimate, Estimator, Need, Speed
from baton.router.workers import WorkerView

#: Estimates kept of each decision: the way that was taken and the next best ones.
KEPT = 4
#: A request is held back for others until so much of ``queue_deadline_ms`` is over.
HELD_SHARE = 0.5


class Choice:
    """The decisions of one router, and what it has learned for them."""

    def __init__(self, slo: Slo, limits: Limits, straight_tokens: int = 0) -> None:
        self.slo = slo
        self.limits = limits
        self.straight_tokens = max(limits.hit_rest_tokens, straight_tokens)
        """What is left of a prompt of at most so many tokens goes to decode itself."""
        self.estimator = Estimator(slo)
        self.donor = StepCurve()
        """Of the worker whose steps were the longest."""
        self.promised: dict[Peer, int] = {}
        """Tokens of requests that wait here for a prefill worker, in this pass."""

    def knows(self, workers: Iterable[WorkerView]) -> bool:
        """Look at what the workers say; return whether that is enough for an estimate."""
        curves = [view.status.curve for view in workers if view.status.curve.tokens]
        self.donor = max(curves, key=lambda curve: curve.tokens[-1], default=StepCurve())
        return bool(curves)

    def help_of(self, view: WorkerView) -> tuple[int, float]:
        """Return how many tokens of prompts a decode worker puts into a step, and how long that
        takes in s; 0 s: nothing is known, or its streams do not bear it."""
        speed, status = self.speed(view, ()), view.status
        chunk = self.estimator.local_chunk(view, speed, 0)
        rows, context = status.running, status.context_tokens
        seconds, calm_s = (speed.now.seconds(n, context) for n in (rows + chunk, rows))
        if rows and not self.slo.keeps(seconds, speed.now.spread) and not self.slo.broken(calm_s):
            return 1, 0.0
        return chunk, seconds

    def prompt_s(self, tokens: int) -> float:
        """Return how long a prompt takes at the least, if a worker does nothing else."""
        return self.donor.prompt_seconds(0, max(1, tokens), self.limits.prefill_chunk_tokens)

    def overdue(self, waited_s: float) -> bool:
        """Return whether a request has waited for others as long as one has to."""
        return waited_s * 1000 >= HELD_SHARE * self.limits.queue_deadline_ms

    def new_pass(self) -> None:
        """The queue is gone through from its head: nobody waits before the first."""
        self.promised.clear()

    def speed(self, view: WorkerView, others: Iterable[WorkerView]) -> Speed:
        """Return what is known of a worker's steps, completed by what others have seen; it borrows
        cores of ``others`` if all of them on its host are idle."""
        alone, borrowed = view.status.curve.extended(self.donor), view.status.curve_borrowed
        helpers = [other for other in others if other.host == view.host]
        if borrowed.tokens and helpers and all(other.idle for other in helpers):
            return Speed(alone, borrowed)
        return Speed(alone, alone)

    def choose(
        self, decodes: list[tuple[WorkerView, Need, float]], prefills: list[WorkerView]
    ) -> tuple[Estimate, ...] | None:
        """Return the best way and the next best ones; ``None`` if it is better to wait.

        ``decodes`` have room for the request; the number is their load, which decides between
        ways that are equal otherwise."""
        found = []
        for view, need, load in decodes:
            straight = need.rest <= self.straight_tokens
            for estimate in self._ways(view, need, prefills):
                # What is less than a hand-over goes straight to decode, unless that loses somebody.
                detour = straight and estimate.prefill is not None
                key = (estimate.lost, detour, round(estimate.cost_s, 3), load)
                found.append((key, str(estimate.prefill or ""), estimate))
        found.sort(key=lambda each: (*each[:2], each[2].decode))
        ways = [estimate for _, _, estimate in found]
        best = ways[0]
        waited_s = decodes[0][1].waited_s
        if self.overdue(waited_s):
            ready = [way for way in ways if way.ready]
            if not ready:
                return None
            best = ready[0]
        elif not best.ready or best.crowded:
            # Who waits for decode's rows keeps no prefill worker: that one is free for the next.
            if best.prefill is not None and not best.ready:
                tokens = next(need.rest for view, need, _ in decodes if view.peer == best.decode)
                self.promised[best.prefill] = self.promised.get(best.prefill, 0) + tokens
            return None
        others = [way for way in ways if way is not best]
        return (best, *others[: KEPT - 1])

    def _ways(self, view: WorkerView, need: Need, prefills: list[WorkerView]) -> Iterable[Estimate]:
        speed, ahead = self.speed(view, prefills), self.limits.prefill_ahead_max
        writers = [prefill for prefill in prefills if prefill.peer in view.status.writers]
        if view.status.mixed or not writers:
            yield self.estimator.local(view, speed, need, ahead)
        for prefill in writers:
            yield self.estimator.remote(
                view,
                prefill,
                (speed, self.speed(prefill, (view,))),
                need,
                ahead=ahead,
                promised=self.promised.get(prefill.peer, 0),
            )
