"""Ops to commands and replies to answers, without a server."""

from __future__ import annotations

import pytest

from baton.core.ids import Peer
from baton.core.lifecycles import REQUEST_MOVES, RequestState
from baton.ledger.keys import Keys
from baton.ledger.resp import RespReader, RespReply
from baton.ledger.scripts import ReplyBroken, Scribe, load_scripts, read_reply
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
    Done,
    EndRequest,
    FindOrphans,
    FindOwned,
    LeaseHeld,
    LeaseLost,
    LeaveRole,
    OpenResumable,
    Orphans,
    Owned,
    PlaceRequest,
    ReleaseLease,
    RenewLease,
    RestoreResumable,
    RetryRequest,
)
from support.ledger_bench import COMPLETED, DECODE, GATEWAY, LIMITS, PREFILL, ROUTER, member, spec

S = RequestState
OPS: list[AnyOp] = [
    AcquireLease(member(DECODE), 2_000),
    RenewLease(DECODE, 2_000),
    ReleaseLease(DECODE),
    FindOrphans(ROUTER, 2_000, 10, (DECODE, PREFILL)),
    FindOwned(GATEWAY, 10),
    LeaveRole(DECODE, 1_000, (ROUTER,), 500),
    AdmitRequest(spec(), ROUTER),
    AdoptRequest(spec(), ROUTER, 2, 3, DECODE, PREFILL),
    PlaceRequest("r1", 1, ROUTER, DECODE, PREFILL),
    AdvanceRequest("r1", 1, S.DECODING, DECODE),
    RetryRequest("r1", 1, ROUTER),
    EndRequest("r1", 1, COMPLETED, GATEWAY),
    OpenResumable("c1", GATEWAY, "t", "k", ("c1",), b"recipe", 1_000, 2_000, "i", "b"),
    ClaimResumable("c1", GATEWAY, "n", "k", "t"),
    RestoreResumable(
        *("c1", GATEWAY, "t", "k", ("c1",), b"recipe", 1_000, 2_000, "i", "b"), turn=3, again=0
    ),
    CloseResumable("c1", 0, 1_000, b"answer"),
]


def words(op: AnyOp) -> list[bytes]:
    (command,) = RespReader().feed(Scribe("blue", LIMITS).command(op))
    assert isinstance(command, list)
    return [word for word in command if isinstance(word, bytes)]


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
def test_every_key_is_declared_and_in_the_pools_slot(op: AnyOp) -> None:
    """Keys are passed as KEYS and share one hash tag, so a Cluster runs the script."""
    evalsha, sha, keys_len, *rest = words(op)
    assert evalsha == b"EVALSHA"
    assert sha == load_scripts()[type(op)].sha
    keys = rest[: int(keys_len)]
    assert keys
    assert all(key.startswith(b"{baton:blue}:") for key in keys)


def test_no_script_makes_up_a_key() -> None:
    """Scripts touch what is in KEYS only: no key is composed inside."""
    for script in load_scripts().values():
        assert b"{baton" not in script.source
        assert script.source.count(b"KEYS[") >= 2


@pytest.mark.parametrize("target", [S.PREFILLING, S.COMMITTED, S.DECODING], ids=str)
def test_legal_moves_come_from_the_table(target: RequestState) -> None:
    """The states that a script accepts are those of REQUEST_MOVES."""
    legal = words(AdvanceRequest("r1", 1, target, DECODE))[8].decode()
    assert set(legal.split()) == {s for s, moves in REQUEST_MOVES.items() if target in moves}
    assert legal.startswith(" ")
    assert legal.endswith(" ")


def test_an_op_id_is_the_ops_content() -> None:
    """The same op has the same id; another worker's is another op."""
    mine = words(PlaceRequest("r1", 1, ROUTER, DECODE, None))
    again = words(PlaceRequest("r1", 1, ROUTER, DECODE, None))
    other = words(PlaceRequest("r1", 1, ROUTER, Peer("decode-9", 1), None))
    assert mine == again
    assert mine[7] != other[7]


@pytest.mark.parametrize("pool", ["", "a}b", "{"])
def test_a_pool_that_would_break_the_hash_tag_is_refused(pool: str) -> None:
    """The pool's name is part of the hash tag."""
    with pytest.raises(ValueError, match="pool"):
        Keys(pool)


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        ([b"done", 3, b"placed", 2], Done(3, S.PLACED, 2)),
        (
            [b"adopted", 3, b"placed", 2, 1, b"decode-0/7", b""],
            Adopted(3, S.PLACED, 2, 1, Peer("decode-0", 7), None),
        ),
        ([b"orphans", b"r1", b"0", b"r2", b"60000"], Orphans({"r1": 0, "r2": 60_000})),
        ([b"owned", b"r1", b"r2"], Owned(("r1", "r2"))),
        ([b"conflict"], Conflict(0, None)),
        ([b"conflict", 3, b"decoding", b"", 2], Conflict(3, S.DECODING, turn=2)),
        ([b"lost", b"abc"], LeaseLost("abc")),
        ([b"held", b"id", 0, 2, b"nobody", b"\xff/x"], LeaseHeld("id", False, (), ())),
        ([b"held", b"id", 0, 0, b"\xc1"], LeaseHeld("id", False, (), ())),
    ],
)
def test_replies_are_read(reply: RespReply, wanted: object) -> None:
    """Each form of reply has one meaning."""
    assert read_reply(reply) == wanted


@pytest.mark.parametrize(
    "reply",
    [
        None,
        b"OK",
        [],
        [b"done", 1],
        [b"done", b"1", b"placed", 1],
        [b"done", 1, b"napping", 1],
        [b"conflict", 1, b"completed", b"\xc1", 1],
    ],
)
def test_anything_else_is_a_bug_and_says_so(reply: RespReply) -> None:
    """A reply of no known form raises ReplyBroken, never something else."""
    with pytest.raises(ReplyBroken):
        read_reply(reply)
