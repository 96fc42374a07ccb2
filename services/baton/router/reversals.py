"""How soon a change of roles may be turned back.

Decides the time between a change and one the other way. Loads that swing faster than roles can
follow, or figures that a crowded machine spoils, look each time like a good reason; what nobody
has gained by should not be tried at the same pace for ever. A change the same way is none of this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from baton.core.ids import Peer, Role

#: In times to settle: the first way back, and the longest wait for one.
FIRST, LONGEST = 2, 64
#: Of so many workers it is known what they did.
NAMES_MAX = 1_024


class Reversals:
    """The changes that a router has seen, whoever asked for them: all routers see the same."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._roles: OrderedDict[str, Role] = OrderedDict()
        self._gained: Role | None = None
        """Which side the last change went to."""
        self._at = 0.0
        self.pause_s = FIRST * settle_s

    def see(self, workers: Iterable[tuple[Peer, Role]], now: float) -> None:
        """Look at who does what; of a worker's incarnations the last one counts."""
        for name, role in {peer.worker_id: role for peer, role in sorted(workers)}.items():
            before = self._roles.get(name, role)
            self._roles[name] = role
            self._roles.move_to_end(name)
            if role is not before:
                self._changed(role, now)
        while len(self._roles) > NAMES_MAX:
            self._roles.popitem(last=False)

    def _changed(self, gained: Role, now: float) -> None:
        if self._gained not in (None, gained):
            # What was turned back as soon as it was allowed will be again: later. What stood for
            # long before has probably followed the work.
            longer = 2.0 if now - self._at < 2 * self.pause_s else 0.5
            pause_s = longer * self.pause_s
            self.pause_s = min(max(pause_s, FIRST * self._settle_s), LONGEST * self._settle_s)
        self._gained, self._at = gained, now

    def not_before(self, gained: Role) -> float:
        """Return when the next change may go to that side."""
        return 0.0 if self._gained in (None, gained) else self._at + self.pause_s
