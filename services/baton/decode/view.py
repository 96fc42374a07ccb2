"""What others see of a decode worker: routers, ``/metrics``, ``baton status``.

Decides nothing; reads what the machine's parts hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.core.lifecycles import LeaseState
from baton.decode.handover import Handover
from baton.decode.news import BlockNews
from baton.decode.scheduler import Scheduler
from baton.decode.sequence import Stage
from baton.decode.state import State
from baton.wire.messages import WorkerStatus

#: Sequences that will run once their prompt is here.
_WAITING = (Stage.REMOTE, Stage.LOCAL, Stage.IMPORTING)


class View:
    """One decode worker, looked at."""

    def __init__(
        self, state: State, handover: Handover, scheduler: Scheduler, news: BlockNews
    ) -> None:
        self.state = state
        self.handover = handover
        self.scheduler = scheduler
        self.news = news

    def load(self) -> tuple[object, ...]:
        """Return what routers hear of soon when it changes."""
        stages = self._stages()
        waiting = sum(map(stages.count, _WAITING))
        writers = tuple(sorted(self.handover.writers))
        joining, running = stages.count(Stage.REMOTE), stages.count(Stage.RUNNING)
        return self._accepting(), self.state.mixed, writers, waiting, joining, running

    def _accepting(self) -> bool:
        return not self.state.draining and self.state.lease is LeaseState.HELD

    def worker_status(self, now: float) -> WorkerStatus:
        """Return what routers place by."""
        since = self.scheduler.step_since
        stages = self._stages()
        sequences = self.state.sequences.values()
        figures, limits = self.state.figures, self.state.limits
        return WorkerStatus(
            accepting=self._accepting(),
            running=stages.count(Stage.RUNNING),
            waiting=sum(map(stages.count, _WAITING)),
            joining=stages.count(Stage.REMOTE),
            queued_tokens=sum(s.length - s.computed for s in sequences if s.stage is Stage.LOCAL),
            blocks_total=self.state.pool.total,
            blocks_free=self.state.pool.available(),
            block_size=self.state.block_size,
            writers=tuple(sorted(self.handover.writers)),
            step=self.scheduler.step,
            step_age_ms=0 if since is None else int((now - since) * 1000),
            curve=figures.steps.curve(),
            curve_borrowed=figures.steps.curve_borrowed(),
            chunk_tokens=self.scheduler.chunk_tokens,
            context_tokens=sum(s.length for s in sequences if s.stage is Stage.RUNNING),
            growth_blocks=figures.growth_blocks(sequences, limits.growth_tokens),
            handover_us=round(figures.handover_s.value * 1e6),
            mixed=self.state.mixed,
            blocks_told=self.news.number,
        )

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of ``/metrics``."""
        stages = self._stages()
        counts = self.state.pool.counts()
        gauges = {f"blocks:{state.name.lower()}": float(n) for state, n in counts.items()}
        gauges["num_requests_running"] = stages.count(Stage.RUNNING)
        gauges["num_requests_waiting"] = sum(map(stages.count, _WAITING))
        gauges["kv_cache_usage_perc"] = 1 - self.state.pool.available() / self.state.pool.total
        gauges["arena_bytes"] = float(self.state.pool.total * self.state.block_bytes)
        return gauges

    def status(self) -> dict[str, object]:
        """Return what ``baton status`` shows."""
        counts = self.state.pool.counts()
        stages = self._stages()
        return {
            "lease": self.state.lease.value,
            "draining": self.state.draining,
            "mixed": self.state.mixed,
            "blocks": {state.name.lower(): n for state, n in counts.items()},
            "sequences": {stage.value: stages.count(stage) for stage in Stage},
            "tickets": len(self.handover.tickets),
            "writers": sorted(str(writer) for writer in self.handover.writers),
            "peers": sorted(str(peer) for peer in self.state.peers),
            "step": self.scheduler.step,
            "preemptions": self.scheduler.preemptions,
        }

    def _stages(self) -> list[Stage]:
        return [seq.stage for seq in self.state.sequences.values()]
