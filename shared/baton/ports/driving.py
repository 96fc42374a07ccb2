"""Commands and events between a machine and its driver that every service shares.

A driver executes the commands of one event in order, before the next event is taken. What only one
service needs (run a step, mark blocks) stands in that service's package, with its own executor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.ids import Peer
from baton.ports.ledger import AnyOp, Reply, Unavailable
from baton.wire.messages import AnyMessage, AttemptId


@dataclass(frozen=True, slots=True)
class Send:
    """Command: send ``message`` to ``peer``."""

    peer: Peer
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class CallLedger:
    """Command: make a transition; the answer comes as :class:`LedgerAnswered`."""

    op: AnyOp


@dataclass(frozen=True, slots=True)
class LedgerAnswered:
    """Event: the answer to a :class:`CallLedger` with the same ``op``."""

    op: AnyOp
    reply: Reply | Unavailable


@dataclass(frozen=True, slots=True)
class RecordStep:
    """Command: remember, beyond this process's end, who has rows in the step that starts next;
    nobody: none runs. Comes before the step."""

    attempts: tuple[AttemptId, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """Command: log one structured event. Never a prompt's text, never token ids."""

    event: str
    fields: Mapping[str, object] = field(default_factory=dict)
    level: str = "info"


@dataclass(frozen=True, slots=True)
class Measure:
    """Command: add to the counter, or observe into the histogram, called ``name``.

    Names are those of ``baton.runtime.metrics`` without the prefix ``baton_``; an unknown name is
    a bug.
    """

    name: str
    value: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)


#: Exit code that asks whoever supervises for a successor.
EXIT_RESTART = 75
#: Exit code that asks the guard for a successor in the role that is kept for this worker.
EXIT_ROLE = 79


@dataclass(frozen=True, slots=True)
class Exit:
    """Command: end this process. ``code`` 0 only when somebody asked for it for good."""

    code: int
    reason: str
