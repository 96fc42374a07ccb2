"""The role of this worker: how it begins to be another one.

Decides the order: what the mode allows, then the ledger's leave (of all workers of a pool one
changes at a time, and the last of a kind stays), then the word is kept, and only then does the
machine hear that it is to end. From the kept word on the worker comes back as what it was told to
be, whatever happens to this process.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.core.events import PromptsTaken, RoleLeft
from baton.core.ids import Peer, Role, WorkerRole
from baton.ports.ledger import LeaveRole, Leaving, Reply, Unavailable
from baton.runtime import roles
from baton.runtime.service import Context
from baton.wire.messages import ChangeRole

#: Beyond the drain: who was granted to leave its role has so much longer to be gone.
HOLD_MARGIN_MS = 10_000

Answer = Callable[[str], None]
"""Called once: with why not, or with nothing."""


class RoleChange:
    """One per process."""

    def __init__(
        self,
        context: Context,
        others: Callable[[Role], tuple[Peer, ...]],
        busy: Callable[[], str],
        become: Callable[[PromptsTaken | RoleLeft], None],
    ) -> None:
        """``others`` names the other members of a role; ``busy`` says why nothing can be changed
        just now; ``become`` has the machine do it."""
        self._context = context
        self._others = others
        self._busy = busy
        self._become = become
        self._role = context.worker_role
        """What this worker is, or is about to become."""
        self.leaving = False
        """Another machine takes the place of this process's."""

    def ask(self, question: ChangeRole, answer: Answer) -> None:
        """Become that, unless something is against it."""
        wanted, me = question.role, self._context.me
        refused = self._refusal(wanted)
        if self._role is None or refused or wanted is self._role:
            answer(refused)
        elif wanted.process is self._context.role:
            self._take(wanted)
            answer("")
        else:
            # Nobody is needed in the place of whom the mode can do without.
            others = self._others(self._context.role) if self._needed(self._role, wanted) else ()
            hold_ms = self._context.config.limits.drain_ms + HOLD_MARGIN_MS
            op = LeaveRole(me, hold_ms, others, question.settle_ms)
            self._context.ledger.call(op, lambda reply: self._answered(wanted, reply, answer))

    def _refusal(self, wanted: WorkerRole) -> str:
        now, worker_id = self._role, self._context.me.worker_id
        if now is None:
            return f"{worker_id} is a {self._context.role} and nothing else"
        if self.leaving:
            again = f"{worker_id} is becoming {now}; ask again when it is"
            return "" if wanted is now else again
        if busy := self._busy():
            return busy
        return self._why_not(now, wanted, others=bool(self._others(now.process)))

    def _why_not(self, now: WorkerRole, wanted: WorkerRole, *, others: bool) -> str:
        mode = self._context.config.cluster.mode
        return roles.why_not(self._context.me.worker_id, now, wanted, mode, others=others)

    def _needed(self, now: WorkerRole, wanted: WorkerRole) -> bool:
        return bool(self._why_not(now, wanted, others=False))

    def _answered(self, wanted: WorkerRole, reply: Reply | Unavailable, answer: Answer) -> None:
        # Something else may have come first while the ledger was asked.
        refused = self._refusal(wanted)
        match reply:
            case _ if refused or wanted is self._role:
                pass
            case Leaving(granted=True):
                self._take(wanted)
            case Leaving(by=Peer(worker_id)):
                refused = f"{worker_id} changes its role, or did so just now; ask again later"
            case Leaving():
                refused = f"no other worker does what {self._context.me.worker_id} does"
            case Unavailable(reason):
                refused = f"the ledger does not answer ({reason}); ask again"
            case _:
                refused = f"the ledger answered {type(reply).__name__}"
        answer(refused)

    def _take(self, wanted: WorkerRole) -> None:
        context = self._context
        roles.keep_role(context.run_dir, context.me.worker_id, wanted)
        context.log.info("role_taken", former=self._role, now=wanted)
        self._role = wanted
        if wanted.process is context.role:
            self._become(PromptsTaken(wanted is WorkerRole.MIXED))
        else:
            self.leaving = True
            self._become(RoleLeft())
