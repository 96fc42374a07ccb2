"""Ops to scripts and back: which script, which keys, which arguments, what the reply means.

Decides the arguments of every script in ``lua/``; the rules themselves are in the scripts. Legal
moves are passed to them from ``baton.core.lifecycles``, so there is one table.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import assert_never

import msgspec

from baton.core.ids import Member, Peer
from baton.core.lifecycles import RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Outcome
from baton.ledger.keys import Keys
from baton.ledger.resp import RespReply, append_words
from baton.ports.ledger import (
    AcquireLease,
    AdmitRequest,
    Adopted,
    AdoptRequest,
    AdvanceRequest,
    AnyOp,
    ClaimResumable,
    CloseResumable,
    Conflict,
    Denial,
    Denied,
    Done,
    EndRequest,
    FindOrphans,
    FindOwned,
    LeaseHeld,
    LeaseLost,
    LeaveRole,
    Leaving,
    OpenResumable,
    Orphans,
    Owned,
    PlaceRequest,
    ReleaseLease,
    RenewLease,
    Repeated,
    Reply,
    RequestOp,
    RestoreResumable,
    Resumable,
    RetryRequest,
    op_id,
    sources_of,
    target_of,
)
from baton.wire.messages import RequestSpec

#: A replaced incarnation that was frozen must find its seat taken when it thaws.
SEAT_TTL_MS = 3_600_000
SEAT_INCARNATIONS_MAX = 8
#: Longer than anybody lets a change of roles settle.
LEAVING_TTL_MS = 3_600_000

_SCRIPTS: tuple[tuple[type[AnyOp], str, str], ...] = (
    (AcquireLease, "lease_prelude", "acquire_lease"),
    (RenewLease, "lease_prelude", "renew_lease"),
    (ReleaseLease, "lease_prelude", "release_lease"),
    (FindOrphans, "lease_prelude", "find_orphans"),
    (FindOwned, "", "find_owned"),
    (LeaveRole, "", "leave_role"),
    (AdmitRequest, "request_prelude", "admit_request"),
    (AdoptRequest, "request_prelude", "adopt_request"),
    (PlaceRequest, "request_prelude", "place_request"),
    (AdvanceRequest, "request_prelude", "advance_request"),
    (RetryRequest, "request_prelude", "retry_request"),
    (EndRequest, "request_prelude", "end_request"),
    (OpenResumable, "resumable_prelude", "open_resumable"),
    (ClaimResumable, "resumable_prelude", "claim_resumable"),
    (RestoreResumable, "resumable_prelude", "restore_resumable"),
    (CloseResumable, "resumable_prelude", "close_resumable"),
)

_encode = msgspec.msgpack.Encoder().encode
_outcome_decoder = msgspec.msgpack.Decoder(Outcome)
_strings_decoder = msgspec.msgpack.Decoder(tuple[str, ...])
_member_decoder = msgspec.msgpack.Decoder(Member)

Word = bytes | str | int


class Script:
    """One script: its source and the name the server knows it by."""

    def __init__(self, name: str, prelude: str) -> None:
        folder = files("baton.ledger") / "lua"
        parts = [(folder / f"{each}.lua").read_text() for each in (prelude, name) if each]
        self.name = name
        self.source = "\n".join(parts).encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


class ReplyBroken(Exception):
    """A script answered what no script of ours answers: a bug."""


def load_scripts() -> dict[type[AnyOp], Script]:
    """Read every script, by the op it executes."""
    return {op: Script(name, prelude) for op, prelude, name in _SCRIPTS}


class Scribe:
    """Writes commands for one pool."""

    def __init__(self, pool: str, limits: Limits) -> None:
        self.keys = Keys(pool)
        self.scripts = load_scripts()
        self._limits = limits
        self._sources: dict[tuple[type, str], str] = {}

    def command(self, op: AnyOp) -> bytes:
        """Return the EVALSHA command that executes ``op``."""
        keys, arguments = self._words(op)
        parts = [b"*%d\r\n" % (3 + len(keys) + len(arguments))]
        append_words(parts, (b"EVALSHA", self.scripts[type(op)].sha, len(keys)))
        append_words(parts, keys)
        append_words(parts, arguments)
        return b"".join(parts)

    def _words(self, op: AnyOp) -> tuple[Sequence[Word], Sequence[Word]]:
        """Return KEYS and ARGV."""
        own: tuple[Word, ...]
        match op:
            case AcquireLease(member=member, ttl_ms=ttl_ms):
                peer = member.peer
                own = (peer.incarnation, peer.worker_id, _encode(member), SEAT_INCARNATIONS_MAX)
                return self._lease(peer, ttl_ms, own)
            case RenewLease(peer=peer, ttl_ms=ttl_ms):
                return self._lease(peer, ttl_ms, ())
            case ReleaseLease(peer=peer):
                return self._lease(peer, self._limits.lease_ttl_ms, (peer.incarnation,))
            case FindOrphans(peer=peer, ttl_ms=ttl_ms, count_max=count_max):
                own = (count_max, self.keys.requests, *map(str, op.workers))
                return self._lease(peer, ttl_ms, own)
            case FindOwned(peer=peer, count_max=count_max):
                return (self.keys.owners,), (str(peer), count_max)
            case LeaveRole(peer=peer, others=others):
                own = (str(peer), op.hold_ms, op.settle_ms, LEAVING_TTL_MS)
                return (self.keys.leases, self.keys.leaving), (*own, *map(str, others))
            case AdmitRequest(spec=spec, router=router):
                own = (str(router), str(spec.gateway), _encode(spec), spec.resume_ms)
                own = (*own, self._backstop_ms(spec))
                return self._request(op, spec.request_id, 1, "", own)
            case AdoptRequest(spec=spec, router=router, turn=turn):
                placed = op.decode is not None
                workers = (str(op.decode or ""), str(op.prefill or "") if placed else "")
                own = (str(router), turn, str(spec.gateway), _encode(spec), spec.resume_ms)
                own = (*own, *workers, self._backstop_ms(spec))
                return self._request(op, spec.request_id, op.epoch, "", own)
            case PlaceRequest(router=router, decode=decode, prefill=prefill):
                own = (str(router), str(decode), str(prefill or ""))
                return self._request(op, op.request_id, op.epoch, op_id(op), own)
            case AdvanceRequest(by=by):
                return self._request(op, op.request_id, op.epoch, op_id(op), (str(by),))
            case RetryRequest(router=router, failures=failures):
                own = (str(router), failures)
                return self._request(op, op.request_id, op.epoch, op_id(op), own)
            case EndRequest(outcome=outcome, by=by):
                own = (str(by), _encode(outcome), self._limits.terminal_ttl_ms, op.turn)
                return self._request(op, op.request_id, op.epoch, "", own)
            case OpenResumable():
                requests = _encode(op.requests)
                own = (str(op.gateway), op.token, op.owner, requests, op.recipe, op.window_ms)
                own = (*own, op.life_ms, op.repeat, op.body, int(op.anew))
                return self._resumable(op.resumable_id, op.repeat, own)
            case ClaimResumable():
                own = (str(op.gateway), op.claim, op.owner, op.token, op.repeat, op.new_token)
                return self._resumable(op.resumable_id, op.repeat, (*own, int(op.again)))
            case RestoreResumable():
                requests = _encode(op.requests)
                own = (str(op.gateway), op.turn, op.again, op.token, op.owner, requests, op.recipe)
                own = (*own, op.window_ms, op.life_ms, op.repeat, op.body)
                return self._resumable(op.resumable_id, op.repeat, own)
            case CloseResumable():
                own = (op.turn, op.keep_ms, op.answer, op.closed.value)
                return self._resumable(op.resumable_id, op.repeat, own)
            case _:
                assert_never(op)

    def _resumable(
        self, resumable_id: str, repeat: str, own: Sequence[Word]
    ) -> tuple[Sequence[Word], Sequence[Word]]:
        return (self.keys.resumable(resumable_id), self.keys.repeat(repeat)), (resumable_id, *own)

    def _backstop_ms(self, spec: RequestSpec) -> int:
        return spec.deadline_ms + self._limits.terminal_ttl_ms

    def _lease(
        self, peer: Peer, ttl_ms: int, own: Sequence[Word]
    ) -> tuple[Sequence[Word], Sequence[Word]]:
        keys = self.keys
        names = (keys.meta, keys.leases, keys.members, keys.seat(peer.worker_id), keys.owners)
        return (*names, keys.gone), (str(peer), ttl_ms, secrets.token_hex(8), SEAT_TTL_MS, *own)

    def _request(
        self, op: RequestOp, request_id: str, epoch: int, op_id: str, own: Sequence[Word]
    ) -> tuple[Sequence[Word], Sequence[Word]]:
        names: tuple[Word, ...] = (self.keys.request(request_id), self.keys.owners)
        if isinstance(op, EndRequest):
            names = (*names, self.keys.leases)
        target = target_of(op).value
        legal = self._sources.get((type(op), target))
        if legal is None:
            # As the scripts look for them: " a b ".
            legal = "".join(f" {source}" for source in sorted(sources_of(op))) + " "
            self._sources[type(op), target] = legal
        return names, (request_id, epoch, op_id, legal, target, *own)


@lru_cache(maxsize=512)
def _member(data: bytes) -> Member | None:
    # Every renewal of every process brings all members: the same bytes again and again.
    try:
        return _member_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _peer(word: RespReply) -> Peer | None:
    worker_id, _, incarnation = _text(word).rpartition("/")
    return Peer(worker_id, int(incarnation)) if incarnation.isdecimal() else None


def _text(word: RespReply) -> str:
    assert isinstance(word, bytes)
    return word.decode(errors="replace")


def read_reply(reply: RespReply) -> Reply:
    """Return what a script's reply means.

    Raises:
        ReplyBroken: no script of ours answers that.
    """
    try:
        return _read(reply)
    except (AssertionError, IndexError, ValueError, msgspec.MsgspecError) as error:
        raise ReplyBroken(f"{error!r} in the reply {str(reply)[:200]}") from error


def _read(reply: RespReply) -> Reply:
    assert isinstance(reply, list)
    match reply:
        case [b"done", int(epoch), state, int(attempts)]:
            return Done(epoch, RequestState(_text(state)), attempts)
        case [b"adopted", int(epoch), state, int(attempts), int(failures), decode, prefill]:
            workers = _peer(decode), _peer(prefill)
            return Adopted(epoch, RequestState(_text(state)), attempts, failures, *workers)
        case [b"orphans", *found]:
            windows = zip(found[::2], found[1::2], strict=True)
            return Orphans({_text(name): int(_text(window)) for name, window in windows})
        case [b"owned", *found]:
            return Owned(tuple(_text(each) for each in found))
        case [b"leaving", int(granted), by]:
            return Leaving(bool(granted), _peer(by))
        case [b"conflict"]:
            return Conflict(0, None)
        case [b"conflict", int(epoch), state, bytes(outcome), int(turn)]:
            ended = _outcome_decoder.decode(outcome) if outcome else None
            return Conflict(epoch, RequestState(_text(state)), ended, turn)
        case [
            b"resumable",
            int(turn),
            int(former),
            int(again),
            int(window_ms),
            repeat,
            bytes(requests),
            bytes(recipe),
            int(closed),
            bytes(answer),
            body,
        ]:
            ids = _strings_decoder.decode(requests)
            head = (turn, former, again, window_ms, _text(repeat), ids, recipe)
            return Resumable(*head, bool(closed), answer, _text(body))
        case [b"repeated", resumable_id, int(same)]:
            return Repeated(_text(resumable_id), bool(same))
        case [b"denied", denial]:
            return Denied(Denial(_text(denial)))
        case [b"lost", ledger_id]:
            return LeaseLost(_text(ledger_id))
        case [b"held", ledger_id, int(rebuilding), int(lost_len), *rest]:
            # Who cannot be read is of another version, or nobody: no peer of ours, and no reason
            # for all who can be read to end.
            lost = (_peer(word) for word in rest[:lost_len])
            words = (word for word in rest[lost_len:] if isinstance(word, bytes))
            members = [member for word in words if (member := _member(word)) is not None]
            members.sort(key=lambda member: member.peer)
            return LeaseHeld(
                _text(ledger_id),
                bool(rebuilding),
                tuple(members),
                tuple(sorted(peer for peer in lost if peer is not None)),
            )
        case _:
            raise ValueError("unknown form")
