"""What the ledger holds of requests, read only, for `baton audit` and `baton explain`.

Decides nothing: fields become typed values, peers become names. A record of another version, or one
that somebody else wrote, is told as unreadable, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import redis

from baton.cli.reports import LedgerSilent
from baton.core.ids import Member, Peer
from baton.core.lifecycles import TERMINAL, RequestState
from baton.core.outcomes import Outcome
from baton.ledger.keys import Keys

_FIELDS = (
    "state",
    "epoch",
    "attempts",
    "router",
    "gateway",
    "decode",
    "prefill",
    "outcome",
    "ended_by",
)
_TIMEOUT_S = 5.0
_PAGE = 500


@dataclass(frozen=True, slots=True)
class Record:
    """One request's record."""

    request_id: str
    state: RequestState
    epoch: int
    attempts: int
    router: Peer | None
    gateway: Peer | None
    decode: Peer | None
    prefill: Peer | None
    outcome: Outcome | None = None
    ended_by: str = ""

    @property
    def live(self) -> bool:
        return self.state not in TERMINAL

    @property
    def owners(self) -> dict[str, Peer]:
        """Everybody it names, by what he does for it."""
        named = {
            "router": self.router,
            "gateway": self.gateway,
            "decode": self.decode,
            "prefill": self.prefill,
        }
        return {role: peer for role, peer in named.items() if peer is not None}


@dataclass(frozen=True, slots=True)
class LedgerPicture:
    """One pool, read in a few round trips: not one instant, so what matters is looked at twice."""

    members: Mapping[Peer, Member]
    leases: Mapping[Peer, int]
    """Milliseconds left; negative: overdue."""
    records: Mapping[str, Record]
    owners: frozenset[tuple[Peer, str]]
    """The index: who works on which live request."""
    unreadable: tuple[str, ...] = ()


def peer_of(text: str) -> Peer | None:
    """Return the peer that ``worker_id/incarnation`` names; ``None`` for anything else."""
    worker_id, _, incarnation = text.rpartition("/")
    return Peer(worker_id, int(incarnation)) if worker_id and incarnation.isdecimal() else None


def read_ledger(url: str, pool: str) -> LedgerPicture:
    """Return everything in the pool.

    Raises:
        LedgerSilent: the server does not answer, or not what it should.
    """
    keys = Keys(pool)
    try:
        with _open(url) as server:
            names = [
                name.decode() for name in server.scan_iter(match=keys.request("*"), count=_PAGE)
            ]
            records, unreadable = _records(server, names)
            pipe = server.pipeline(transaction=True)
            pipe.hgetall(keys.members)
            pipe.zrange(keys.leases, 0, -1, withscores=True)
            pipe.zrange(keys.owners, 0, -1)
            pipe.time()
            members, leases, owners, (seconds, micros) = pipe.execute()
    except (redis.RedisError, OSError, ValueError) as error:
        raise LedgerSilent(str(error)) from None
    now_ms = seconds * 1000 + micros // 1000
    found: dict[Peer, Member] = {}
    for name, body in members.items():
        try:
            member = msgspec.msgpack.decode(body, type=Member)
        except msgspec.MsgspecError:
            unreadable.append(f"member {name.decode(errors='replace')}")
        else:
            found[member.peer] = member
    held = {peer_of(name.decode()): int(score) - now_ms for name, score in leases}
    return LedgerPicture(
        members=found,
        leases={peer: left for peer, left in held.items() if peer is not None},
        records=records,
        owners=_index(owners),
        unreadable=tuple(unreadable),
    )


def read_record(url: str, pool: str, request_id: str) -> Record | None:
    """Return one record; ``None``: the ledger has none (any more).

    Raises:
        LedgerSilent: see there.
    """
    name = Keys(pool).request(request_id)
    try:
        with _open(url) as server:
            records, _ = _records(server, [name])
    except (redis.RedisError, OSError, ValueError) as error:
        raise LedgerSilent(str(error)) from None
    return records.get(request_id)


def _open(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)


def _records(server: redis.Redis, names: list[str]) -> tuple[dict[str, Record], list[str]]:
    found: dict[str, Record] = {}
    unreadable: list[str] = []
    for start in range(0, len(names), _PAGE):
        page = names[start : start + _PAGE]
        pipe = server.pipeline(transaction=False)
        for name in page:
            pipe.hmget(name, _FIELDS)
        for name, values in zip(page, pipe.execute(raise_on_error=False), strict=True):
            request_id = name.partition(":request:")[2]
            if isinstance(values, Exception):
                unreadable.append(f"record {request_id}: {values}")
                continue
            if values[0] is None:
                continue  # it expired between the two calls
            try:
                found[request_id] = _record(request_id, values)
            except (ValueError, msgspec.MsgspecError) as error:
                unreadable.append(f"record {request_id}: {error}")
    return found, unreadable


def _record(request_id: str, values: list[bytes | None]) -> Record:
    outcome = values[7]
    texts = [b"" if value is None else value for value in values]
    state, epoch, attempts, router, gateway, decode, prefill = (text.decode() for text in texts[:7])
    return Record(
        request_id=request_id,
        state=RequestState(state),
        epoch=int(epoch),
        attempts=int(attempts),
        router=peer_of(router),
        gateway=peer_of(gateway),
        decode=peer_of(decode),
        prefill=peer_of(prefill),
        outcome=msgspec.msgpack.decode(outcome, type=Outcome) if outcome else None,
        ended_by=texts[8].decode(),
    )


def _index(entries: Iterable[bytes]) -> frozenset[tuple[Peer, str]]:
    found = set()
    for entry in entries:
        name, _, request_id = entry.decode().partition(" ")
        peer = peer_of(name)
        if peer is not None:
            found.add((peer, request_id))
    return frozenset(found)
