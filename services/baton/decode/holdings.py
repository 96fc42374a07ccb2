"""What a decode worker holds, for `baton audit`."""

from __future__ import annotations

from baton.core.ids import Peer
from baton.core.lifecycles import BlockState
from baton.decode.handover import Handover
from baton.decode.imports import Imports
from baton.decode.state import State
from baton.wire.holdings import HeldBlock, HeldRequest, HeldTicket, Holdings

#: Stands for the request of a ticket that this worker's predecessor had sent.
OF_FORMER_OWNER = "former owner"


def holdings_of(state: State, handover: Handover, imports: Imports) -> Holdings:
    """Return all of it, of this instant."""
    dropped = [*state.pinned, *imports.dropped()]
    return Holdings(
        requests=tuple(
            HeldRequest(
                request_id=seq.spec.request_id,
                epoch=seq.epoch,
                stage=seq.stage.value,
                gateway=seq.gateway,
                router=seq.router,
                decode=state.me,
                blocks=tuple(seq.blocks),
                window_ms=0 if seq.away_since is None else seq.spec.resume_ms,
            )
            for seq in state.sequences.values()
        ),
        tickets=(
            *(
                HeldTicket(request_id, epoch, record.writer, record.held, record.revoked)
                for (request_id, epoch), record in handover.tickets.items()
            ),
            *(
                HeldTicket(OF_FORMER_OWNER, 0, Peer("writer", incarnation), blocks, revoked=True)
                for incarnation, blocks in handover.former.items()
            ),
        ),
        blocks=tuple(
            HeldBlock(number, block.state, block.generation, block.references, block.holds)
            for number, block in enumerate(state.pool.blocks)
            if block.state is not BlockState.FREE
            and (block.state is not BlockState.CACHED or block.holds)
        ),
        pinned=tuple(number for seq in dropped for number in seq.blocks),
        arenas=(state.arena,),
    )
