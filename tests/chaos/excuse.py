"""Whose connection could break through no fault of the cluster's.

Decides which clients that do not come back are excused by a fault: those that were connected to the
gateway that was killed or frozen, by what is known of their request; or by the time, where nothing
had come yet that says which gateway it was. Everybody else's broken connection is silence.
"""

from __future__ import annotations

from collections.abc import Iterable

from chaos.catalogue import Back
from chaos.faults import Done
from chaos.heard import Heard

#: A killed process takes no connection any more after that long, nor a thawed one whose lease is
#: gone.
GONE_S = 0.5
#: What breaks with its gateway or its line breaks within that time, on a loaded machine.
BREAKS_S = 5.0
GATEWAY_ENDS = frozenset({"kill gateway", "freeze gateway"})


def excuse(heard: Heard, faults: Iterable[Done], gateway: str) -> str:
    """Return why this connection could break, "" if it could not.

    ``gateway`` is the incarnation that had its request, "" if nobody knows."""
    if heard.item.back is not Back.NO:
        return ""
    for done in faults:
        if done.fault.kind in GATEWAY_ENDS and done.victim:
            known = heard.id in done.hit if heard.id and not gateway else gateway == done.victim
            if known or (not heard.id and _broke_in(heard, done)):
                return "its gateway died"
        if heard.through_proxy and done.fault.kind == "cut client" and _broke_in(heard, done):
            return "its line was cut"
    return ""


def _broke_in(heard: Heard, done: Done) -> bool:
    """Whether it was connected when the fault struck, and broke because of it."""
    over = done.mended_at or heard.ended_at
    last_taken = over if done.fault.action == "freeze" else done.at
    sent_in_time = heard.sent_at <= last_taken + GONE_S
    return sent_in_time and done.at <= heard.ended_at <= max(over, done.at) + BREAKS_S
