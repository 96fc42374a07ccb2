"""What a prefill worker holds, for `baton audit`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from baton.core.ids import Peer
from baton.prefill.job import Job
from baton.wire.handover import ArenaRef, Ticket
from baton.wire.holdings import HeldRequest, HeldTicket, Holdings


def holdings_of(
    me: Peer,
    jobs: Iterable[Job],
    early: Mapping[tuple[str, int], tuple[Ticket, Peer, float]],
    arenas: Iterable[ArenaRef],
) -> Holdings:
    """Return all of it, of this instant."""
    return Holdings(
        requests=tuple(
            HeldRequest(
                request_id=job.spec.request_id,
                epoch=job.epoch,
                stage=_stage(job),
                gateway=job.gateway,
                router=job.router,
                decode=job.decode,
                prefill=me,
            )
            for job in jobs
        ),
        early=tuple(
            HeldTicket(request_id, epoch, me, tuple(pair.block for pair in ticket.blocks))
            for (request_id, epoch), (ticket, _, _) in early.items()
        ),
        arenas=tuple(arenas),
    )


def _stage(job: Job) -> str:
    if job.stopping:
        return "stopping"
    if job.ticket is None:
        return "without ticket"
    return "computing" if job.started_at is not None else "ticketed"
