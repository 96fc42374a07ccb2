"""What does not fit together in one look at a cluster, and how long it may stay so.

Decides the kinds and their bounds. While requests come and go, everything here is true for a
moment; it is a fault only if the very same thing is seen again after its bound (``audit.py``). So a
discrepancy's subject names all that makes it the same: block and generation, request and epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from baton.cli.records import Record
from baton.cli.sample import ArenaFile, Sample
from baton.core.ids import Peer, Role
from baton.core.lifecycles import BlockState, RequestState
from baton.core.limits import Limits
from baton.core.pauses import PAUSE_MAX_S
from baton.wire.holdings import HeldRequest, Holdings

#: Two looks at one instant are some milliseconds apart.
_SOON_MS = 1_000
#: A process that ended is started again after at most this, and takes its files over.
_RESTART_MS = int(PAUSE_MAX_S * 1000) + 5_000
#: Loading a large model takes its time; nobody registers before.
_START_S = 60.0


class Kind(StrEnum):
    """Every kind of discrepancy."""

    BLOCK_WITHOUT_HOLDER = "block_without_holder"
    BLOCK_DIFFERS = "block_differs"
    QUARANTINE_OVERDUE = "quarantine_overdue"
    TICKET_OF_ENDED = "ticket_of_ended_request"
    SEQUENCE_OF_ENDED = "sequence_of_ended_request"
    JOB_OF_ENDED = "job_of_ended_request"
    ENTRY_OF_ENDED = "entry_of_ended_request"
    END_UNHEARD = "end_unheard"
    RECORD_WITHOUT_OWNER = "record_without_owner"
    RECORD_UNKNOWN_TO_WORKER = "record_unknown_to_worker"
    RECORD_WITHOUT_SESSION = "record_without_session"
    OWNER_INDEX_DIFFERS = "owner_index_differs"
    SESSION_WITHOUT_RECORD = "session_without_record"
    SESSION_WITHOUT_WORK = "session_without_work"
    LEASE_OF_THE_DEAD = "lease_of_the_dead"
    MEMBER_WITHOUT_LEASE = "member_without_lease"
    PROCESS_WITHOUT_LEASE = "process_without_lease"
    STRAY_PROCESS = "stray_process"
    ARENA_WITHOUT_OWNER = "arena_without_owner"
    ARENA_LOCK_OF_UNKNOWN = "arena_lock_of_unknown"
    SOCKET_OF_THE_DEAD = "socket_of_the_dead"
    LOCK_FILE_OF_THE_DEAD = "lock_file_of_the_dead"


Bound = Callable[[Limits], int]


def _soon(limits: Limits) -> int:
    return _SOON_MS


def _notice(limits: Limits) -> int:
    """A lost lease or link is noticed, said, and acted upon."""
    return 2 * limits.lease_ttl_ms + _SOON_MS


def _recovery(limits: Limits) -> int:
    """Somebody else has taken over, or the request has failed."""
    return limits.recovery_ms + limits.lease_ttl_ms


def _kept(limits: Limits) -> int:
    return limits.terminal_ttl_ms + _SOON_MS


def _restart(limits: Limits) -> int:
    return _RESTART_MS


#: Kind -> what it means, and for how many milliseconds it may be so.
KINDS: dict[Kind, tuple[str, Bound]] = {
    Kind.BLOCK_WITHOUT_HOLDER: ("a block's references or holds are not its users'", _soon),
    Kind.BLOCK_DIFFERS: ("an arena's record of a block is not what its owner's table says", _soon),
    Kind.QUARANTINE_OVERDUE: ("blocks wait for a writer that neither stops nor dies", _notice),
    Kind.TICKET_OF_ENDED: ("a ticket is not revoked, and its request is over", _notice),
    Kind.SEQUENCE_OF_ENDED: ("decode computes for a request or epoch that is over", _notice),
    Kind.JOB_OF_ENDED: ("prefill holds work of a request or epoch that is over", _notice),
    Kind.ENTRY_OF_ENDED: ("a router sees to a request that is over", _notice),
    Kind.END_UNHEARD: ("an answer or a verdict waits for a gateway that never speaks", _kept),
    Kind.RECORD_WITHOUT_OWNER: ("a live record names a process that is gone", _recovery),
    Kind.RECORD_UNKNOWN_TO_WORKER: ("the decode worker of a live record does not know it", _notice),
    Kind.RECORD_WITHOUT_SESSION: ("the gateway of a live record does not know it", _notice),
    Kind.OWNER_INDEX_DIFFERS: ("the ledger's index of owners is not what its records say", _notice),
    Kind.SESSION_WITHOUT_RECORD: ("a gateway's request has no record, or is over there", _recovery),
    Kind.SESSION_WITHOUT_WORK: ("a client waits for a request that nobody works on", _recovery),
    Kind.LEASE_OF_THE_DEAD: ("a lease is overdue, or its process is not there", _notice),
    Kind.MEMBER_WITHOUT_LEASE: ("registry and leases do not name the same processes", _notice),
    Kind.PROCESS_WITHOUT_LEASE: ("a process runs and is not registered", _restart),
    Kind.STRAY_PROCESS: ("a process of this cluster is not supervisor's", _restart),
    Kind.ARENA_WITHOUT_OWNER: ("nobody holds the owner's lock of an arena", _restart),
    Kind.ARENA_LOCK_OF_UNKNOWN: ("a process that is not registered has an arena mapped", _restart),
    Kind.SOCKET_OF_THE_DEAD: ("nobody listens on a socket in the run directory", _restart),
    Kind.LOCK_FILE_OF_THE_DEAD: ("nobody holds the lock beside a socket", _restart),
}


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """One thing that does not fit."""

    kind: Kind
    subject: str
    """What it is about, beyond doubt: seen again, it is the same."""
    text: str = ""
    """For people."""
    window_ms: int = 0
    """How much longer than others of its kind it may be so: a client may still come back."""

    @property
    def key(self) -> tuple[Kind, str]:
        return self.kind, self.subject


def bound_ms(what: Discrepancy, limits: Limits) -> int:
    """Return for how long this may be so."""
    return KINDS[what.kind][1](limits) + what.window_ms


def discrepancies(sample: Sample) -> list[Discrepancy]:
    """Return everything that does not fit in ``sample``."""
    view = _View(sample)
    return [
        *_blocks(view),
        *_tickets(view),
        *_requests(view),
        *_records(view),
        *_index(view),
        *_sessions(view),
        *_leases(view),
        *_files(view),
    ]


class _View:
    """One sample, with what several rules ask of it."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.ledger = sample.ledger
        self.members = sample.ledger.members
        self.sessions: dict[str, HeldRequest] = {}
        self.ends: set[str] = set()
        for _, held in self.of(Role.GATEWAY):
            self.sessions.update({each.request_id: each for each in held.requests})
            self.ends.update(held.ends)
        self.windows: dict[str, int] = {}
        """For how long whoever sees to a request waits for its client to come back."""
        for role in (Role.ROUTER, Role.DECODE):
            for _, held in self.of(role):
                for each in held.requests:
                    known = self.windows.get(each.request_id, 0)
                    self.windows[each.request_id] = max(known, each.window_ms)

    def of(self, role: Role) -> Iterator[tuple[Peer, Holdings]]:
        for peer, held in self.sample.holdings.items():
            if self.members[peer].role is role:
                yield peer, held

    def record(self, request_id: str) -> Record | None:
        return self.ledger.records.get(request_id)

    def epoch(self, request_id: str) -> int | None:
        """Return the epoch at which the request is now; ``None``: it is over, or never was.

        A ledger that was emptied has no record of a request that runs: its gateway knows it.
        """
        record, session = self.record(request_id), self.sessions.get(request_id)
        epochs = []
        if record is not None and record.live:
            epochs.append(record.epoch)
        if session is not None and (record is None or record.live):
            epochs.append(session.epoch)
        return max(epochs, default=None)

    def is_past(self, request_id: str, epoch: int) -> str | None:
        """Return why nobody should hold that attempt any more, if so."""
        now = self.epoch(request_id)
        if now is None:
            return "the request is over"
        return f"epoch {now} is current" if epoch < now else None


# --- memory -------------------------------------------------------------------------------------


def _blocks(view: _View) -> Iterator[Discrepancy]:
    arenas = {arena.owner: arena for arena in view.sample.arenas}
    for peer, held in view.of(Role.DECODE):
        yield from miscounted(peer, held)
        arena = arenas.get(peer)
        if arena is not None:
            yield from _differing(peer, held, arena)


def miscounted(peer: Peer, held: Holdings) -> Iterator[Discrepancy]:
    """Yield the blocks of one decode worker whose users are not those that it counts."""
    uses = Counter(number for each in held.requests for number in each.blocks)
    uses.update(held.pinned)
    holds = Counter(number for each in held.tickets for number in each.blocks)
    for block in held.blocks:
        found = (uses[block.number], holds[block.number])
        if found == (block.references, block.holds) and any(found):
            continue
        yield Discrepancy(
            Kind.BLOCK_WITHOUT_HOLDER,
            f"{peer} block {block.number} generation {block.generation}",
            f"{BlockState(block.state).name}, {block.references} references and {block.holds} "
            f"holds counted, {found[0]} and {found[1]} known",
        )


def _differing(peer: Peer, held: Holdings, arena: ArenaFile) -> Iterator[Discrepancy]:
    table = {
        block.number: (BlockState(block.state), block.generation)
        for block in held.blocks
        if block.state != BlockState.CACHED
    }
    marks = {number: (mark.state, mark.generation) for number, mark in arena.marks.items()}
    for number in sorted((table.keys() | marks.keys()) - arena.moving):
        if table.get(number) != marks.get(number):
            said, stored = _words(table.get(number)), _words(marks.get(number))
            yield Discrepancy(
                Kind.BLOCK_DIFFERS,
                f"{arena.path} block {number}: {stored}, {peer} says {said}",
            )


def _words(found: tuple[BlockState, int] | None) -> str:
    return "free or cached" if found is None else f"{found[0].name} generation {found[1]}"


def _tickets(view: _View) -> Iterator[Discrepancy]:
    for peer, held in view.of(Role.DECODE):
        for ticket in held.tickets:
            name = f"{peer} ticket {ticket.request_id} epoch {ticket.epoch}"
            words = f"{len(ticket.blocks)} blocks, writer {ticket.writer}"
            if ticket.revoked:
                yield Discrepancy(Kind.QUARANTINE_OVERDUE, name, words)
            elif why := view.is_past(ticket.request_id, ticket.epoch):
                yield Discrepancy(Kind.TICKET_OF_ENDED, name, f"{why}; {words}")


# --- requests -----------------------------------------------------------------------------------

_HOLDERS = {
    Role.DECODE: Kind.SEQUENCE_OF_ENDED,
    Role.PREFILL: Kind.JOB_OF_ENDED,
    Role.ROUTER: Kind.ENTRY_OF_ENDED,
}
#: Stages in which a holder only waits for the gateway's word.
_WAITING_FOR_WORD = frozenset({"finished", "closing"})
#: Stages of a router in which the attempt of the record is over.
_OVER_HERE = frozenset({"fencing", "retrying"})


def _requests(view: _View) -> Iterator[Discrepancy]:
    for role, kind in _HOLDERS.items():
        for peer, held in view.of(role):
            for each in held.requests:
                name = f"{peer} {each.request_id} epoch {each.epoch}"
                if each.stage in _WAITING_FOR_WORD:
                    yield Discrepancy(Kind.END_UNHEARD, name, each.stage, each.window_ms)
                elif why := view.is_past(each.request_id, each.epoch):
                    # A router of which its client's new gateway knows nothing waits for the client.
                    # It holds nothing but the entry; decode would hold blocks.
                    window_ms = each.window_ms if role is Role.ROUTER else 0
                    yield Discrepancy(kind, name, f"{each.stage}; {why}", window_ms)
            for early in held.early:
                if why := view.is_past(early.request_id, early.epoch):
                    name = f"{peer} ticket {early.request_id} epoch {early.epoch}"
                    yield Discrepancy(Kind.JOB_OF_ENDED, name, why)


_WITH_DECODE = frozenset(
    {
        RequestState.PLACED,
        RequestState.PREFILLING,
        RequestState.COMMITTED,
        RequestState.DECODING,
    }
)


def _records(view: _View) -> Iterator[Discrepancy]:
    for record in view.ledger.records.values():
        if not record.live:
            continue
        name = f"{record.request_id} epoch {record.epoch}"
        for role, peer in record.owners.items():
            # The KV is decode's once it is handed over: then prefill may go.
            done = role == "prefill" and record.state is RequestState.DECODING
            if peer not in view.members and not done:
                text = f"{record.state}; its {role} is gone"
                subject, window_ms = f"{name}: {peer}", view.windows.get(record.request_id, 0)
                yield Discrepancy(Kind.RECORD_WITHOUT_OWNER, subject, text, window_ms)
        lost = record.state in _WITH_DECODE and not _knows(view, record.decode, record.request_id)
        if lost and not _is_orphan(view, record) and not _is_fenced(view, record):
            text = f"{record.state} at {record.decode}"
            yield Discrepancy(Kind.RECORD_UNKNOWN_TO_WORKER, f"{name}: {record.decode}", text)
        waits = record.request_id in view.ends
        if not waits and not _knows(view, record.gateway, record.request_id):
            text = f"{record.state} for {record.gateway}"
            yield Discrepancy(Kind.RECORD_WITHOUT_SESSION, f"{name}: {record.gateway}", text)


def _knows(view: _View, peer: Peer | None, request_id: str) -> bool:
    """Whether that process holds the request; true if it could not be asked."""
    held = view.sample.holdings.get(peer) if peer is not None else None
    return held is None or any(each.request_id == request_id for each in held.requests)


def _is_orphan(view: _View, record: Record) -> bool:
    """Whether its gateway is gone, and its router is or has forgotten it: routers' sweep ends it,
    and it is said above that it has no owner."""
    if record.gateway in view.members:
        return False
    known = record.router in view.members and _knows(view, record.router, record.request_id)
    return not known


def _is_fenced(view: _View, record: Record) -> bool:
    """Whether its router knows that its attempt is over, and waits for its gateway to be
    fenced, at most for ``recovery_ms``."""
    held = view.sample.holdings.get(record.router) if record.router is not None else None
    requests = held.requests if held is not None else ()
    mine = (each for each in requests if each.request_id == record.request_id)
    return any(each.stage in _OVER_HERE for each in mine)


def _index(view: _View) -> Iterator[Discrepancy]:
    wanted = {
        (peer, record.request_id)
        for record in view.ledger.records.values()
        if record.live
        for peer in record.owners.values()
    }
    for peer, request_id in sorted(wanted - view.ledger.owners):
        text = "not in the index: nobody would find it when that process dies"
        yield Discrepancy(Kind.OWNER_INDEX_DIFFERS, f"{peer} {request_id}", text)
    for peer, request_id in sorted(view.ledger.owners - wanted):
        text = "in the index, but no live record says so"
        yield Discrepancy(Kind.OWNER_INDEX_DIFFERS, f"{peer} {request_id}", text)


def _sessions(view: _View) -> Iterator[Discrepancy]:
    worked_on = {
        each.request_id
        for role in (Role.DECODE, Role.ROUTER)
        for _, held in view.of(role)
        for each in held.requests
    }
    for request_id, session in view.sessions.items():
        record = view.record(request_id)
        name = f"{session.gateway} {request_id} epoch {session.epoch}"
        if record is None or not record.live:
            text = f"{session.stage}; " + ("no record" if record is None else str(record.state))
            yield Discrepancy(Kind.SESSION_WITHOUT_RECORD, name, text)
        if request_id not in worked_on:
            yield Discrepancy(Kind.SESSION_WITHOUT_WORK, name, session.stage)


# --- processes and files ------------------------------------------------------------------------


def _leases(view: _View) -> Iterator[Discrepancy]:
    sample = view.sample
    for peer, left_ms in view.ledger.leases.items():
        if left_ms < 0:
            yield Discrepancy(Kind.LEASE_OF_THE_DEAD, f"{peer} overdue")
        elif peer in sample.dead:
            pid = view.members[peer].pid
            yield Discrepancy(Kind.LEASE_OF_THE_DEAD, f"{peer} pid {pid}", "no such process")
    for peer in sorted(view.members.keys() ^ view.ledger.leases.keys()):
        has = "a lease only" if peer in view.ledger.leases else "an entry only"
        yield Discrepancy(Kind.MEMBER_WITHOUT_LEASE, f"{peer} has {has}")
    registered = {peer.worker_id for peer in view.members}
    for worker_id, age_s in sample.supervised.items():
        if age_s > _START_S and worker_id not in registered:
            yield Discrepancy(Kind.PROCESS_WITHOUT_LEASE, worker_id, f"runs for {age_s:.0f} s")
    for words in sample.strays:
        yield Discrepancy(Kind.STRAY_PROCESS, words)


def _files(view: _View) -> Iterator[Discrepancy]:
    incarnations = {peer.incarnation for peer in view.members}
    for arena in view.sample.arenas:
        if not arena.owned:
            yield Discrepancy(Kind.ARENA_WITHOUT_OWNER, arena.path, f"was {arena.owner}'s")
        for holder in arena.holders:
            if holder not in incarnations:
                yield Discrepancy(Kind.ARENA_LOCK_OF_UNKNOWN, f"{arena.path} incarnation {holder}")
    for path in view.sample.dead_sockets:
        yield Discrepancy(Kind.SOCKET_OF_THE_DEAD, path)
    for path in view.sample.dead_locks:
        yield Discrepancy(Kind.LOCK_FILE_OF_THE_DEAD, path)
