"""Whether one side has more work than its workers can do while the other has time to spare, and who
then changes its role.

Decides by what workers last said, smoothed: routers that see the same workers come to the same
answer, and the ledger lets one worker change at a time. A side is strained or has time to spare; in
between nothing happens, and what a change has settled does not call for the way back. If the way
back is called for all the same, ``reversals.py`` says how soon. Moving a worker costs its prefix
cache and some seconds, so an imbalance has to last, and a change is given time to show.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.ids import Role, WorkerRole
from baton.core.lifecycles import LeaseState
from baton.core.slo import Slo
from baton.ports.driving import Note
from baton.router.reversals import Reversals
from baton.router.state import State
from baton.router.workers import WorkerView
from baton.wire.messages import ChangeRole, RoleAnswered

LOOK_S = 0.25
#: Weight of the newest look: the last few seconds count.
WEIGHT = 0.1
#: A side is strained from here on. 1 is: its prompts (or requests that find no memory) wait for
#: half the TTFT SLO, its steps take as long as two tokens may be apart, or its batches are full.
STRAINED = 0.9
WAIT_SHARE = 0.5
#: No worker counts as more strained than this.
FIGURE_MAX = 2.0
#: A side may lose a worker if the others are then this busy at most.
SPARE = 0.7


@dataclass(frozen=True, slots=True)
class Policy:
    """When roles may change by themselves."""

    slo: Slo
    decodes_as: WorkerRole
    """What a prefill worker becomes that decodes from now on."""
    hold_s: float
    """An imbalance has to last so long."""
    settle_s: float
    """After a change the next one comes no sooner."""


@dataclass(slots=True)
class Side:
    """One side as it has been lately."""

    strain: float = 0.0
    busy: float = 0.0
    """Share of its workers' time or places in use."""

    def learn(self, strain: float, busy: float) -> None:
        self.strain += WEIGHT * (strain - self.strain)
        self.busy += WEIGHT * (busy - self.busy)

    def spares_one(self, workers: int) -> bool:
        """Whether one of so many workers could go."""
        without = self.busy * workers / max(1, workers - 1)
        return workers > 1 and without <= SPARE and self.strain <= SPARE


class Balance:
    """The balance of one pool's roles, as one router sees it."""

    def __init__(self, state: State, policy: Policy) -> None:
        self.state = state
        self.policy = policy
        self.prefill = Side()
        self.decode = Side()
        self.reversals = Reversals(policy.settle_s)
        self.next_at = 0.0
        self._short: Role | None = None
        """Which side lacks a worker that the other could give."""
        self._since = 0.0
        self._again_at = 0.0

    def time_passed(self, now: float) -> None:
        """Look at the workers, at a pace of its own; ask one to change if that is due."""
        if now < self.next_at:
            return
        self.next_at = now + LOOK_S
        workers = self.state.placement.workers.items()
        self.reversals.see(((peer, view.role) for peer, view in workers), now)
        prefills = self._accepting(Role.PREFILL)
        decodes = self._accepting(Role.DECODE)
        if not prefills or not decodes or self.state.lease is not LeaseState.HELD:
            self._short = None
            return
        self._learn(prefills, decodes, now)
        short = self._lacking(len(prefills), len(decodes))
        if short is not self._short:
            self._short, self._since = short, now
        if short is None or now < max(self._since + self.policy.hold_s, self._again_at):
            return
        if now < self.reversals.not_before(short):
            return
        self._again_at = now + self.policy.settle_s
        givers = decodes if short is Role.PREFILL else prefills
        self._ask(min(givers, key=_load), short)

    def answered(self, view: WorkerView, message: RoleAnswered, now: float) -> None:
        """One that does not change may be able to later, or another one is."""
        if message.refused:
            self._again_at = now + self.policy.hold_s
        told = {"worker": view.peer.worker_id, "wanted": message.role, "refused": message.refused}
        self.state.emit(Note("role_answered", told))

    def _accepting(self, role: Role) -> list[WorkerView]:
        return [view for view in self.state.placement.of(role) if view.status.accepting]

    def _learn(self, prefills: list[WorkerView], decodes: list[WorkerView], now: float) -> None:
        wait_s = WAIT_SHARE * self.policy.slo.ttft_s
        queue = self.state.queue
        head = next(iter(queue), None)
        held = head is not None and not self.state.placement.has_room(head, now)
        prompts_s = self.state.placement.drain_s(0 if held else queue.tokens)
        busy = _mean(float(view.status.running > 0) for view in prefills)
        self.prefill.learn(prompts_s / wait_s, busy)
        places = self.state.limits.batch_sequences_max
        used = _mean(view.status.running / places for view in decodes)
        steps = _mean(self._step_s(view) / self.policy.slo.itl_s for view in decodes)
        waited = (now - head.arrived) / wait_s if held and head is not None else 0.0
        self.decode.learn(max(used, steps, waited), max(used, steps))

    @staticmethod
    def _step_s(view: WorkerView) -> float:
        status = view.status
        if not status.running:
            return 0.0
        return status.curve.seconds(status.running, status.context_tokens)

    def _lacking(self, prefills: int, decodes: int) -> Role | None:
        if self.decode.strain >= STRAINED and self.prefill.spares_one(prefills):
            return Role.DECODE
        if self.prefill.strain >= STRAINED and self.decode.spares_one(decodes):
            return Role.PREFILL
        return None

    def _ask(self, view: WorkerView, short: Role) -> None:
        role = WorkerRole.PREFILL if short is Role.PREFILL else self.policy.decodes_as
        self.state.measure("role_changes_asked_total", wanted=role)
        told = {
            "worker": view.peer.worker_id,
            "wanted": role,
            "prefill": round(self.prefill.strain, 2),
            "decode": round(self.decode.strain, 2),
        }
        self.state.emit(Note("role_change_asked", told))
        self.state.send(view.peer, ChangeRole(role, round(self.policy.settle_s * 1000)))

    def gauges(self) -> dict[str, float]:
        """Return the gauges of ``/metrics``."""
        return {"strain:prefill": self.prefill.strain, "strain:decode": self.decode.strain}


def _mean(figures: Iterable[float]) -> float:
    """Of one figure a worker; one that says nonsense is not to speak for all of them."""
    bounded = [min(figure, FIGURE_MAX) for figure in figures]
    return sum(bounded) / len(bounded)


def _load(view: WorkerView) -> tuple[object, ...]:
    """Who has the least to give away changes first; routers come to the same answer."""
    status = view.status
    return status.running + status.waiting, status.queued_tokens, view.peer
