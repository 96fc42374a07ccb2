"""Dials that cross, many times: one side closes its socket while the other sockets are read."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from baton.wire.messages import ReadReport
from support.transport_worlds import Node, ZmqWorld

ROUNDS = 60


def _over(a: Node, b: Node) -> bool:
    return bool(a.received() and b.received()) or bool(a.bugs + b.bugs)


def test_crossed_dials_never_break_a_transport() -> None:
    """Whatever socket is read first, the one that goes away is not asked for anything any more."""
    for _ in range(ROUNDS):
        loop = asyncio.new_event_loop()
        with tempfile.TemporaryDirectory(prefix="baton-") as directory:
            world = ZmqWorld(Path(directory), loop)
            a, b = world.add("a"), world.add("b")
            a.transport.dial(b.member)
            b.transport.dial(a.member)
            a.transport.send(b.peer, ReadReport("status", 1))
            b.transport.send(a.peer, ReadReport("status", 2))
            world.until(
                lambda a=a, b=b: bool(a.received() and b.received()) or bool(a.bugs + b.bugs)
            )
            world.check()
            world.end()
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
