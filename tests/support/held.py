"""What a machine says it holds must be readable, and add up, after each event of every test."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.cli.discrepancies import miscounted
from baton.core.ids import Peer
from baton.wire.holdings import Holdings

_SELF = Peer("it", 1)


def holdings(machine: Any) -> Holdings:
    """Return the report as `baton audit` gets it; a block without its holder is an error."""
    body = msgspec.json.encode(machine.holdings())
    held = msgspec.json.decode(body, type=Holdings)
    wrong = [f"{each.subject} is miscounted: {each.text}" for each in miscounted(_SELF, held)]
    assert not wrong, wrong
    return held
