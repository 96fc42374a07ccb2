"""Decode's arenas as one prefill worker has them: mapped, being mapped, or to be given up.

Decides how long a mapping is kept. Unmapping lets this worker's lock go, and a lock seen gone is
its death to the arena's owner: so never while the owner may come back. When the owner has died, its
successor takes the same memory over, with what this worker has stored there; the mapping waits for
that, for a bounded time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from baton.core.ids import Peer
from baton.wire.handover import ArenaRef


class Arenas:
    """One mapping a worker, and for a short while those of former owners."""

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        #: By file id, as their owners of now offered them.
        self.mapped: dict[str, ArenaRef] = {}
        #: Offered, and in the hands of the engine's thread.
        self.mapping: dict[str, ArenaRef] = {}
        #: Owners that are over for good -> until when a successor is waited for.
        self.gone: dict[Peer, float] = {}

    def allows(self, arena: ArenaRef) -> bool:
        """Whether ``arena`` is mapped here for that very owner: a former one's tickets are void."""
        return self.mapped.get(arena.file_id) == arena

    def offered(self, arena: ArenaRef, now: float) -> None:
        """It is about to be mapped. A successor with another file needs the former one no more."""
        for ref in self.mapped.values():
            if ref.file_id != arena.file_id and _succeeds(arena.owner, ref.owner):
                self.gone[ref.owner] = now
        self.mapping[arena.file_id] = arena

    def opened(self, ref: ArenaRef, error: str, now: float) -> None:
        """It is mapped, or (``error``) cannot be: then our lock's end is the answer to its owner,
        unless that one is over as well."""
        if self.mapping.get(ref.file_id) == ref:
            del self.mapping[ref.file_id]
        known = self.mapped.get(ref.file_id)
        if not error:
            self.mapped[ref.file_id] = ref
        elif known is not None and known.owner != ref.owner and ref.owner not in self.gone:
            self.gone[known.owner] = now

    def lost(self, owner: Peer, now: float) -> None:
        """That incarnation will not come back."""
        self.gone.setdefault(owner, now + self._kept_s)

    def succeeded_by(self, peer: Peer, others: Iterable[Peer]) -> list[Peer]:
        """Return the owners here, and those among ``others``, whose worker ``peer`` is now."""
        known = [*self._owners(), *others]
        return [owner for owner in dict.fromkeys(known) if _succeeds(peer, owner)]

    def give_up(self, now: float, used: Collection[str]) -> list[str]:
        """Forget the mappings that nobody waits for; return their file ids. Those ``used`` by a
        chunk, or about to be mapped for a successor, stay."""
        over = [
            file_id
            for file_id, ref in self.mapped.items()
            if self.gone.get(ref.owner, math.inf) <= now
            and file_id not in used
            and file_id not in self.mapping
        ]
        for file_id in over:
            del self.mapped[file_id]
        owners = set(self._owners())
        self.gone = {owner: until for owner, until in self.gone.items() if owner in owners}
        return over

    def _owners(self) -> list[Peer]:
        return [ref.owner for ref in (*self.mapped.values(), *self.mapping.values())]


def _succeeds(peer: Peer, former: Peer) -> bool:
    """Whether ``peer`` is a later run of the same worker."""
    return peer.worker_id == former.worker_id and peer.incarnation > former.incarnation
