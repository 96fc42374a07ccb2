"""What the keeper has, and who had it. Pure but for the descriptors, which are numbers here.

Decides when a descriptor is let go: when its arena's file is given another one, or its owner says
so. Never by a timer, and never because somebody died: that is what it is kept for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: One for each decode worker of the host.
KEPT_MAX = 256
#: Remembered for each; the oldest go first, and then it is not complete any more.
TAKERS_MAX = 1_024


@dataclass(slots=True)
class Kept:
    """One arena's memory."""

    name: str
    fd: int
    complete: bool
    takers: dict[int, int] = field(default_factory=dict)
    """Pid of each incarnation that made it, offered it or fetched it."""

    def taken(self, incarnation: int, pid: int) -> None:
        """That process has it. Incarnation 0 only reads, and is nobody."""
        if incarnation:
            self.takers[incarnation] = pid
        if len(self.takers) > TAKERS_MAX:
            del self.takers[next(iter(self.takers))]
            self.complete = False


class Store:
    """All that is kept. Whoever gets a descriptor back from it closes it."""

    def __init__(self) -> None:
        self._by_id: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, file_id: str) -> Kept | None:
        return self._by_id.get(file_id)

    def keep(self, name: str, file_id: str, fd: int, *, fresh: bool) -> list[int] | None:
        """Keep ``fd``; return the descriptors that it takes the place of, itself among them if it
        is kept already. ``None``: there is no room."""
        known = self._by_id.get(file_id)
        if known is not None:
            return [fd]
        gone = self.drop(name)
        if len(self._by_id) >= KEPT_MAX:
            assert not gone
            return None
        self._by_id[file_id] = Kept(name, fd, complete=fresh)
        return gone

    def drop(self, name: str) -> list[int]:
        """Forget what is kept under ``name``; return its descriptors."""
        found = [file_id for file_id, kept in self._by_id.items() if kept.name == name]
        return [self._by_id.pop(file_id).fd for file_id in found]
