"""The simulator's records of resumable requests: what the scripts of the ledger do, in memory.

Decides what ``lua/*_resumable.lua`` decide, and is held to it by the same tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.ids import Peer
from baton.ports.ledger import (
    ClaimResumable,
    CloseResumable,
    Closing,
    Denial,
    Denied,
    OpenResumable,
    Repeated,
    Reply,
    RestoreResumable,
    Resumable,
    ResumableRecord,
)

ResumableOp = OpenResumable | ClaimResumable | RestoreResumable | CloseResumable


@dataclass(slots=True)
class _Record:
    op: ResumableRecord
    token: str
    gateway: Peer
    opened_at: int
    expires_at: int
    turn: int = 0
    former: int = 0
    claim: str = ""
    again: int = 0
    closed: Closing | None = None
    answer: bytes = b""

    def given(self) -> Resumable:
        op = self.op
        head = (self.turn, self.former, self.again, op.window_ms, op.repeat, op.requests, op.recipe)
        return Resumable(*head, bool(self.closed), self.answer, op.body)


@dataclass(slots=True)
class _Repeat:
    resumable_id: str
    body: str
    expires_at: int


class ResumableModel:
    """All resumables of one ledger."""

    def __init__(self) -> None:
        self.records: dict[str, _Record] = {}
        self.repeats: dict[str, _Repeat] = {}

    def execute(self, op: ResumableOp, now: int) -> Reply:
        """Make one transition."""
        for key in [k for k, record in self.records.items() if record.expires_at <= now]:
            del self.records[key]
        for key in [k for k, repeat in self.repeats.items() if repeat.expires_at <= now]:
            del self.repeats[key]
        match op:
            case OpenResumable():
                return self._open(op, now)
            case ClaimResumable():
                return self._claim(op, now)
            case RestoreResumable():
                return self._restore(op, now)
            case CloseResumable():
                return self._close(op, now)

    def _open(self, op: OpenResumable, now: int) -> Reply:
        record = self.records.get(op.resumable_id)
        if record is not None:
            return record.given()
        known = self.repeats.get(op.repeat) if op.repeat and not op.anew else None
        if known is not None:
            return Repeated(known.resumable_id, known.body == op.body)
        record = _Record(op, op.token, op.gateway, now, now + op.life_ms)
        self.records[op.resumable_id] = record
        if op.repeat:
            self.repeats[op.repeat] = _Repeat(op.resumable_id, op.body, now + op.life_ms)
        return record.given()

    def _claim(self, op: ClaimResumable, now: int) -> Reply:
        record = self.records.get(op.resumable_id)
        if record is None:
            return Denied(Denial.UNKNOWN)
        mine = record.op.owner == op.owner
        repeated = record.claim == op.claim
        by_token = bool(op.token) and op.token == record.token
        by_repeat = bool(op.repeat) and op.repeat == record.op.repeat
        if not (mine if repeated else by_token or by_repeat):
            return Denied(Denial.UNKNOWN)
        if not mine:
            return Denied(Denial.FOREIGN)
        if record.closed is Closing.OVER:
            return Denied(Denial.OVER)
        if repeated:
            return record.given()
        record.former, record.turn = record.turn, max(record.turn + 1, now - record.opened_at)
        if not record.answer and (op.again or record.closed):
            record.again, record.closed = record.turn, None
            record.expires_at = now + record.op.life_ms
            if (repeat := self._repeat_of(op)) is not None:
                repeat.expires_at = record.expires_at
        record.gateway, record.claim = op.gateway, op.claim
        record.token = op.new_token or record.token
        return record.given()

    def _restore(self, op: RestoreResumable, now: int) -> Reply:
        record = self.records.get(op.resumable_id)
        if record is not None and (record.turn >= op.turn or record.closed):
            return record.given()
        expires_at = now + op.life_ms
        record = _Record(op, op.token, op.gateway, now - op.turn, expires_at)
        record.turn = record.former = op.turn
        record.again = op.again
        self.records[op.resumable_id] = record
        if op.repeat and op.repeat not in self.repeats:
            self.repeats[op.repeat] = _Repeat(op.resumable_id, op.body, expires_at)
        return record.given()

    def _close(self, op: CloseResumable, now: int) -> Reply:
        record = self.records.get(op.resumable_id)
        if record is None:
            return Denied(Denial.UNKNOWN)
        kept, complete = op.closed.keeps, op.closed is Closing.KEPT
        if not record.closed and not (op.turn < record.turn and not complete):
            record.closed, record.answer = op.closed, op.answer
            record.expires_at = now + op.keep_ms
            repeat = self._repeat_of(op)
            if repeat is not None and not kept:
                del self.repeats[op.repeat]
            elif repeat is not None:
                repeat.expires_at = record.expires_at
        return record.given() if op.turn == record.turn else Denied(Denial.CLAIMED)

    def _repeat_of(self, op: ClaimResumable | CloseResumable) -> _Repeat | None:
        repeat = self.repeats.get(op.repeat)
        return repeat if repeat is not None and repeat.resumable_id == op.resumable_id else None
