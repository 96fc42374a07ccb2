"""What the parts of the prefill machine share: prompts, tickets, peers, the commands of one event.

Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.ids import Member, Peer
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.ports.driving import Measure, Note, Send
from baton.prefill.io import ChunkRow
from baton.prefill.job import Job
from baton.wire.handover import Ticket
from baton.wire.messages import AnyMessage


@dataclass(slots=True)
class State:
    """Shared by the machine and its parts; one owner: the machine."""

    me: Peer
    limits: Limits
    block_size: int
    root: bytes
    jobs: dict[str, Job] = field(default_factory=dict)
    """By request id, in order of arrival."""
    early: dict[tuple[str, int], tuple[Ticket, Peer, float]] = field(default_factory=dict)
    """Tickets whose assignment is still on its way (it comes over another link)."""
    flying: list[tuple[ChunkRow, Job]] = field(default_factory=list)
    """The chunk that runs now."""
    peers: dict[Peer, Member] = field(default_factory=dict)
    commands: list[object] = field(default_factory=list)
    lease: LeaseState = LeaseState.VACANT
    draining: bool = False

    def emit(self, command: object) -> None:
        self.commands.append(command)

    def send(self, peer: Peer, message: AnyMessage) -> None:
        """Queue a message; a peer without a link is gone or not there yet, both say so."""
        if peer in self.peers:
            self.emit(Send(peer, message))

    def note(
        self, event: str, job: Job | None = None, level: str = "info", **fields: object
    ) -> None:
        ids = {} if job is None else {"request_id": job.spec.request_id, "epoch": job.epoch}
        self.emit(Note(event, {**ids, **fields}, level))

    def measure(self, name: str, value: float = 1.0, **labels: str) -> None:
        self.emit(Measure(name, value, labels))

    def flies(self, request_id: str, epoch: int) -> bool:
        """Whether the chunk that runs has a row of that attempt."""
        return any(job.key == (request_id, epoch) for _, job in self.flying)
