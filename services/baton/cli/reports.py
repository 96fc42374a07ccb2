"""Asks the processes of a cluster things, as a peer that takes part in nothing.

Decides how members are found (the ledger's registry, read only) and how long an answer is waited
for. A process that does not answer is told as silent, never left out.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import msgspec
import redis

from baton.core.ids import Member, Peer, Role, WorkerRole
from baton.core.limits import Limits
from baton.ledger.keys import Keys
from baton.ports.transport import PeerLost, PeerRefused, PeerUp, Received, TransportEvent
from baton.transport.host import boot_id, new_incarnation
from baton.transport.zmq_transport import ZmqTransport
from baton.wire.messages import ChangeRole, ReadReport, Report, RoleAnswered

#: All answers together may take this long.
WAIT_S = 2.0


class LedgerSilent(Exception):
    """The ledger cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A process as the ledger knows it."""

    member: Member
    lease_ms: int
    """What is left of its lease; negative: overdue."""


def read_members(url: str, pool: str) -> list[Registered]:
    """Return every registered process, by name.

    Raises:
        LedgerSilent: see there.
    """
    keys = Keys(pool)
    try:
        with redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0) as server:
            pipe = server.pipeline(transaction=True)
            pipe.hgetall(keys.members)
            pipe.zrange(keys.leases, 0, -1, withscores=True)
            pipe.time()
            members, leases, (seconds, micros) = pipe.execute()
    except (redis.RedisError, OSError, ValueError) as error:
        raise LedgerSilent(str(error)) from None
    now_ms = seconds * 1000 + micros // 1000
    deadlines = {name: int(score) for name, score in leases}
    found = [
        Registered(msgspec.msgpack.decode(body, type=Member), deadlines.get(name, now_ms) - now_ms)
        for name, body in members.items()
    ]
    return sorted(found, key=lambda one: one.member.peer)


def ask(members: list[Member], kind: str, limits: Limits) -> dict[Peer, Any]:
    """Return each process's report of ``kind``, or a text that says why there is none."""
    answers = asyncio.run(_ask(members, ReadReport(kind=kind, token=1), limits))
    return {
        peer: msgspec.json.decode(answer.body) if isinstance(answer, Report) else answer
        for peer, answer in answers.items()
    }


def change_role(member: Member, role: WorkerRole, limits: Limits) -> str:
    """Have a worker take another role; return why it does not, empty if it does."""
    answer = asyncio.run(_ask([member], ChangeRole(role), limits))[member.peer]
    return answer.refused if isinstance(answer, RoleAnswered) else str(answer)


async def _ask(
    members: list[Member], question: ReadReport | ChangeRole, limits: Limits
) -> dict[Peer, Report | RoleAnswered | str]:
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[None] = loop.create_future()
    answers: dict[Peer, Report | RoleAnswered | str] = {}
    peers = {member.peer for member in members}

    def on_event(event: TransportEvent) -> None:
        match event:
            case PeerUp(member):
                transport.send(member.peer, question)
            case Received(peer, Report() | RoleAnswered() as answer):
                answers.setdefault(peer, answer)
            case PeerLost(peer, reason):
                answers.setdefault(peer, f"silent: {reason}")
            case PeerRefused(worker_id, text):
                for peer in peers:
                    if peer.worker_id == worker_id:
                        answers.setdefault(peer, f"refused: {text}")
            case Received():
                pass
        if peers <= set(answers) and not finished.done():
            finished.set_result(None)

    def on_bug(error: BaseException) -> None:
        if not finished.done():
            finished.set_exception(error)

    me = Member(
        peer=Peer(f"cli-{os.getpid()}", new_incarnation()),
        role=Role.CLI,
        endpoint="",
        pid=os.getpid(),
        boot_id=boot_id(),
    )
    transport = ZmqTransport(me, limits, lambda _: None, on_bug)
    await transport.start(on_event)
    try:
        for member in members:
            transport.dial(member)
        if members:
            async with asyncio.timeout(WAIT_S):
                await finished
    except TimeoutError:
        pass  # Whoever did not answer is told as silent below.
    finally:
        await transport.close()
    return {peer: answers.get(peer, f"silent for {WAIT_S:g} s") for peer in peers}
