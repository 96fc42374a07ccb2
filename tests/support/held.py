"""What a machine says it holds must be readable, and add up, after each event of every test."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.cli.discrepancies import miscounted
from baton.core.ids import Peer
from baton.wire.holdings import Holdings


def holdings(machine: Any) -> Holdings:
    """Return the report as `baton audit` gets it; a block without its holder is an error."""
    body = msgspec.json.encode(machine.holdings())
    held = msgspec.json.decode(body, type=Holdings)
    assert list(miscounted(Peer("it", 1), held)) == []
    return held
