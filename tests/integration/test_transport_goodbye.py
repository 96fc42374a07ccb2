"""Whoever ends in order is never taken for dead: its goodbye arrives, each time."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from baton.ports.transport import PeerLost
from baton.wire.messages import ReadReport
from support.transport_worlds import ZmqWorld

ROUNDS = 12


def test_a_goodbye_arrives_also_after_a_wait_for_acknowledgements() -> None:
    """The inbox takes its goodbyes in the moment in which it is closed; none of them is lost."""
    for _ in range(ROUNDS):
        loop = asyncio.new_event_loop()
        with tempfile.TemporaryDirectory(prefix="baton-") as directory:
            world = ZmqWorld(Path(directory), loop)
            ends, stays = world.add("ends"), world.add("stays")
            stays.transport.dial(ends.member)
            world.until(lambda a=ends, b=stays: bool(a.ups() and b.ups()))
            ends.transport.send(stays.peer, ReadReport("status", 1))
            world.close(ends)
            world.until(lambda node=stays: bool(node.losses()))
            reasons = [event.reason for event in stays.events if isinstance(event, PeerLost)]
            assert reasons == ["said goodbye"]
            world.end()
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
