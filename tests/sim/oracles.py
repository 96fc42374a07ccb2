"""What must hold between two events, told by looking from outside: no machine is asked.

An effect of a lower epoch is a change of what a machine holds for a request by a message with an
epoch below its own; an effect of a lower turn is one by a router that lost the request to another,
told on a worker by the message's turn, on the gateway by who sends it; a gateway that lost it to
another has no effect on a worker either. What a router knows of prefix caches may be wrong at any
time, but not for long. A store without permission is one that begins although the
owner's records do not say FILLING for this very writer, epoch and generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from baton.core.ids import Peer, Role
from baton.core.lifecycles import BlockState, RequestState
from baton.core.prefix import numbers_of, short_names
from baton.ports.transport import Received
from baton.prefill.io import ChunkRow
from baton.wire.messages import RequestResumed, TokenChunk

if TYPE_CHECKING:
    from sim.cluster import Cluster
    from sim.process import Process

Held = list[tuple[str, object]]


class Nobodys:
    """Live records that name a process which is gone: somebody ends them, or takes them over,
    within the bound of ``baton audit``: that of any recovery, after its client's window."""

    LOOK_S = 0.5

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.since: dict[tuple[str, Peer], float] = {}

    def look(self) -> None:
        """Assert that none has stayed beyond its bound, from now on in every half second."""
        now, limits = self.cluster.clock.now(), self.cluster.limits
        leases, records = self.cluster.ledger.model.leases, self.cluster.ledger.model.records
        found = [
            (name, peer)
            for name, record in records.items()
            for peer in record.owners - leases.keys()
            # The KV is decode's once it is handed over: then prefill may go.
            if (record.state, peer) != (RequestState.DECODING, record.prefill)
        ]
        self.since = {key: self.since.get(key, now) for key in found}
        for (name, peer), since in self.since.items():
            window_ms = limits.recovery_ms + records[name].spec.resume_ms
            bound_s = (window_ms + limits.lease_ttl_ms) / 1000 + self.LOOK_S
            assert now - since <= bound_s, f"{name}: names {peer}, which is gone: {records[name]}"
        self.cluster.clock.call_later(self.LOOK_S, self.look)


def held(role: Role, machine: Any, event: object) -> Held:
    """Return what ``machine`` holds for each request of which ``event`` says something old."""
    if not isinstance(event, Received) or role not in (Role.DECODE, Role.GATEWAY):
        return []
    message = event.message
    says = message.runs if isinstance(message, TokenChunk) else (message,)
    return [
        (each.request_id, _state(role, machine, each.request_id))
        for each in says
        if hasattr(each, "request_id")
        and _is_old(role, _holder(role, machine, each.request_id), each, event.peer)
    ]


def _is_old(role: Role, holder: Any, said: Any, sender: Peer) -> bool:
    if holder is None:
        return False
    # At no epoch: a refusal of what nobody was placed for.
    if 0 < getattr(said, "epoch", 0) < holder.epoch:
        return True
    if isinstance(said, RequestResumed):
        return bool(said.turn <= holder.turn)
    if role is Role.GATEWAY:
        return sender.worker_id.startswith("router") and sender != holder.router
    if sender.worker_id.startswith("gateway"):
        return bool(sender != holder.gateway)
    return hasattr(said, "turn") and said.turn < holder.turn


def unchanged(role: Role, machine: Any, event: object, before: Held) -> None:
    """Assert that the old news of ``event`` changed nothing."""
    for request_id, state in before:
        now = _state(role, machine, request_id)
        assert now == state, f"{request_id}: effect of a lower epoch or turn, by {event}"


def may_store(cluster: Cluster, writer: Peer, rows: Sequence[ChunkRow]) -> None:
    """Assert that what is about to be stored may be stored, by the owner's own records."""
    arenas = {
        process.arena.ref.file_id: process
        for process in cluster.processes.values()
        if process.role is Role.DECODE and hasattr(process, "arena")
    }
    for row in rows:
        owner = arenas.get(row.row.arena)
        if owner is None:
            continue  # that arena's owner was replaced: nobody reads it any more
        for pair in row.targets:
            mark = owner.arena.marked(pair.block)
            found = (mark.state, mark.generation, mark.epoch, mark.writer)
            wanted = (BlockState.FILLING, pair.generation, row.epoch, writer.incarnation)
            assert found == wanted, f"{row.row.request_id}: a store without permission: {found}"


def wrong_index(cluster: Cluster, router: Process) -> list[str]:
    """Return what is wrong in the router's index of prefix caches, by the caches themselves."""
    found = []
    known = router.machine.state.placement.prefixes.known
    for process in cluster.processes.values():
        if process.role is not Role.DECODE or not process.alive:
            continue
        pool = process.machine.state.pool
        there = set(numbers_of(short_names(pool.named_in(0, pool.total))))
        about = f"{router.worker_id} on {process.me}"
        if process.me not in known:
            found.append(f"{about}: knows nothing of it")
        elif known[process.me].names != there or known[process.me].page is not None:
            wrong = len(known[process.me].names ^ there)
            found.append(f"{about}: does not know its blocks, {wrong} of {len(there)} are wrong")
    found += [
        f"{router.worker_id}: knows {peer}, who is over" for peer in known if not _up(cluster, peer)
    ]
    return found


def _up(cluster: Cluster, peer: Peer) -> bool:
    process = cluster.processes[peer.worker_id]
    return process.alive and process.me == peer


def _holder(role: Role, machine: Any, request_id: str) -> Any:
    holders = machine.state.sequences if role is Role.DECODE else machine.state.sessions
    return holders.get(request_id)


def _state(role: Role, machine: Any, request_id: str) -> object:
    holder = _holder(role, machine, request_id)
    if holder is None:
        return None
    if role is Role.DECODE:
        return id(holder), holder.stage, holder.length, holder.router
    return id(holder), holder.epoch, len(holder.ids), holder.router
