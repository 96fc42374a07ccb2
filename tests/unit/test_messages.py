"""What the wire refuses: numbers that count nothing, bytes that are no ids."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from baton.core.ids import Peer
from baton.core.outcomes import Ending, Outcome
from baton.core.sampling import SamplingParams
from baton.core.step_times import CELLS, StepCurve
from baton.gateway.kept import CLAIMS_MAX
from baton.gateway.session import TURN_BITS
from baton.wire import codec
from baton.wire.fields import STEP_ROWS_MAX, WRITERS_MAX
from baton.wire.handover import BlockSum, ChunkAnnounced, PrefillCommitted
from baton.wire.messages import (
    AnyMessage,
    AssignPrefill,
    AttemptId,
    BlocksChanged,
    BlocksListed,
    BlocksWanted,
    LastStep,
    RequestEnded,
    RequestFenced,
    RequestMoved,
    RequestSpec,
    ReserveDecode,
    SubmitRequest,
    TokenChunk,
    TokenRun,
    TokensWanted,
    WorkerStatus,
)

ID = b"\x07\0\0\0"
GATEWAY, DECODE = Peer("gateway-0", 1), Peer("decode-0", 2)
NAN, INF = float("nan"), float("inf")
NO_COUNTS = [2**60, NAN, INF, 1e300, "1", None, []]
ENDED = Outcome(Ending.COMPLETED)
#: A worker's status in which no field has its default.
STATUS = WorkerStatus(
    accepting=True,
    running=1,
    waiting=2,
    joining=1,
    queued_tokens=1,
    blocks_total=9,
    blocks_free=8,
    block_size=16,
    writers=(Peer("prefill-0", 1),),
    curve=StepCurve((1, 2, 3), (5, 6, 7), 1),
    curve_borrowed=StepCurve((1, 2, 3), (3, 4, 5), 1),
    chunk_tokens=128,
    context_tokens=1,
    growth_blocks=1,
    handover_us=1,
)


def spec() -> RequestSpec:
    return RequestSpec(
        request_id="r",
        gateway=GATEWAY,
        prompt=ID,
        sampling=SamplingParams(seed=1, logit_bias={3: 1.0}),
        max_tokens=4,
        deadline_ms=1_000,
    )


def altered(message: AnyMessage, path: str, value: Any) -> bytes:
    """Return the bytes of ``message`` with another value at ``path``."""
    built = msgspec.msgpack.decode(codec.encode(message))
    *parents, last = path.split(".")
    place = built
    for name in parents:
        place = place[int(name)] if name.isdigit() else place[name]
    place[int(last) if last.isdigit() else last] = value
    return msgspec.msgpack.encode(built)


CASES: list[tuple[AnyMessage, str, list[Any]]] = [
    (TokensWanted("r", 1, 0), "epoch", [-1, 2**31]),
    (TokensWanted("r", 1, 0), "index", [-1, 2**60]),
    (TokensWanted("r", 1, 0), "request_id", ["", "r" * 1_000]),
    (TokenChunk((TokenRun("r", 1, 0, (7,)),)), "runs.0.ids", [[-1], [2**31]]),
    (ChunkAnnounced("r", 1, (BlockSum(0, 1, 16, 9),)), "sums.0.0", [-1, 2**31]),
    (ChunkAnnounced("r", 1, (BlockSum(0, 1, 16, 9),)), "sums.0.1", [-1, 2**32]),
    (ChunkAnnounced("r", 1, (BlockSum(0, 1, 16, 9),)), "sums.0.2", [-1, 0]),
    (PrefillCommitted("r", 1, 7), "first_id", [-1, 2**31]),
    (STATUS, "waiting", [-1, STATUS.joining - 1, *NO_COUNTS]),
    (STATUS, "joining", [-1, STATUS.waiting + 1, *NO_COUNTS]),
    (STATUS, "running", [-1, *NO_COUNTS]),
    (STATUS, "queued_tokens", [-1, *NO_COUNTS]),
    (STATUS, "context_tokens", [-1, *NO_COUNTS]),
    (STATUS, "growth_blocks", [-1, *NO_COUNTS]),
    (STATUS, "chunk_tokens", [-1, *NO_COUNTS]),
    (STATUS, "blocks_total", [-1, 2**31, *NO_COUNTS]),
    (STATUS, "blocks_free", [-1, STATUS.blocks_total + 1, 2**31, *NO_COUNTS]),
    (STATUS, "block_size", [-1, 2**20, *NO_COUNTS]),
    (STATUS, "handover_us", [-1, 2**50, *NO_COUNTS]),
    (STATUS, "writers", [[["prefill-0", n] for n in range(WRITERS_MAX + 1)]]),
    (STATUS, "curve.0", [[0, 2, 3], [-1, 2, 3], [1, 2, 2], [3, 2, 1], [1, 2], [1, 2, 2**31]]),
    (STATUS, "curve.0", [[1.0, 2.0, NAN], [1, 2, INF], list(range(1, CELLS + 2))]),
    (STATUS, "curve.1", [[0, 6, 7], [-5, 6, 7], [7, 6, 5], [5, 6], [5, 6, 2**40], [5, 6, NAN]]),
    (STATUS, "curve.1", [[5, 6, INF], list(range(1, CELLS + 2)), []]),
    (STATUS, "curve.2", [-1, 2**50, *NO_COUNTS]),
    (STATUS, "curve_borrowed.0", [[0, 2, 3], [1, 2, 2], [1, 2], list(range(1, CELLS + 2))]),
    (STATUS, "curve_borrowed.1", [[7, 6, 5], [5, 6, NAN], []]),
    (LastStep(DECODE, (AttemptId("r", 1),)), "attempts", [[["r", 1]] * (STEP_ROWS_MAX + 1)]),
    (RequestEnded("r", 1, ENDED, ttft_ms=5.0), "ttft_ms", [-1.0, 1e300, NAN, INF]),
    (PrefillCommitted("r", 1, 7, prefill_ms=5.0), "prefill_ms", [-1.0, 1e300, NAN, INF]),
    (PrefillCommitted("r", 1, 7, ended_ns=5), "ended_ns", [-1, 2**63, NAN]),
    (PrefillCommitted("r", 1, 7, last_write_ns=5), "last_write_ns", [-1, 2**63, NAN]),
    (BlocksChanged(1, b"12345678"), "number", [0, -1, 2**60]),
    (BlocksChanged(1, b"12345678"), "stored", [b"1234567", b"12345678" * 2**17]),
    (BlocksChanged(1, b"", b"12345678"), "removed", [b"123456789"]),
    (BlocksWanted(1), "start", [-1, 2**31]),
    (BlocksListed(1, 0, b"12345678", 1), "stored", [b"1"]),
    (BlocksListed(1, 0, b"12345678", 1), "next", [-1, 2**31]),
    (RequestFenced("r", 2, ID), "output", [b"123", b"\0\0\0\x80"]),
    (ReserveDecode(spec(), 1, None, ID), "output", [b"12345"]),
    (AssignPrefill(spec(), 1, DECODE, ID), "output", [b"1"]),
    (AssignPrefill(spec(), 1, DECODE), "decode", [["decode-0", -1], ["decode-0", 2**62]]),
    (SubmitRequest(spec()), "turn", [0, -1, *NO_COUNTS]),
    (SubmitRequest(spec()), "spec.prompt", [b"", b"12345", b"\xff\xff\xff\xff"]),
    (SubmitRequest(spec()), "spec.max_tokens", [0, -1, 2**31]),
    (SubmitRequest(spec()), "spec.deadline_ms", [-1, 2**53]),
    (SubmitRequest(spec()), "spec.sampling.seed", [2**63]),
    (SubmitRequest(spec()), "spec.sampling.logit_bias", [{-1: 1.0}, {3: float("nan")}]),
    (SubmitRequest(spec()), "spec.sampling.temperature", [-1.0, float("nan"), float("inf")]),
    (SubmitRequest(spec()), "spec.sampling.stop_token_ids", [[2**40]]),
]


def test_the_turn_of_the_latest_claim_is_a_turn() -> None:
    """A claim's turn grows by the millisecond and stands above those of routers: whoever comes back
    after an hour must still be heard of."""
    latest = (CLAIMS_MAX << TURN_BITS) + 2**TURN_BITS - 1
    for message in (SubmitRequest(spec(), turn=latest), RequestMoved("r", latest)):
        assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    ("message", "path", "values"), CASES, ids=[f"{type(m).__name__}.{p}" for m, p, _ in CASES]
)
def test_a_number_outside_what_it_counts_is_no_message(
    message: AnyMessage, path: str, values: list[Any]
) -> None:
    """It is refused where it is decoded: no machine, script or array ever meets it."""
    assert codec.decode(codec.encode(message)) == message
    for value in values:
        with pytest.raises(codec.MessageError):
            codec.decode(altered(message, path, value))


def _kinds() -> list[type]:
    return list(get_args(AnyMessage))


def _example(kind: Any) -> dict[str, Any]:
    """Return the least that is a message of ``kind``: its required fields, as on the wire."""
    made: dict[str, Any] = {"type": kind.__name__}
    for field in msgspec.structs.fields(kind):
        if field.required:
            made[field.name] = _value(field.name, field.type)
    return made


def _value(name: str, wanted: Any) -> Any:
    samples: dict[str, Any] = {
        "request_id": "r",
        "reason": "internal",
        "message": "text",
        "role": "decode",
        "spec": msgspec.msgpack.decode(msgspec.msgpack.encode(spec())),
        "outcome": {"ending": "failed"},
        "decode": ["decode-0", 2],
        "peer": ["decode-0", 1],
        "gateway": ["gateway-0", 1],
        "arena": {
            "path": "/a",
            "device": 1,
            "inode": 2,
            "file_id": "f",
            "owner": ["decode-0", 2],
        },
    }
    if name in samples:
        return samples[name]
    words = str(wanted)
    for part, sample in (("tuple", []), ("bytes", b""), ("bool", True), ("str", "x")):
        if part in words:
            return sample
    return 1


@pytest.mark.parametrize("kind", _kinds(), ids=lambda kind: kind.__name__)
def test_a_field_more_is_ignored_and_one_less_is_refused(kind: Any) -> None:
    """(38) A rolling update mixes versions: nothing raises where messages are handled."""
    least = _example(kind)
    message = codec.decode(msgspec.msgpack.encode(least))
    assert type(message) is kind
    assert codec.decode(msgspec.msgpack.encode(least | {"of_tomorrow": [1]})) == message
    for name in least.keys() - {"type"}:
        fewer = {key: value for key, value in least.items() if key != name}
        with pytest.raises(codec.MessageError):
            codec.decode(msgspec.msgpack.encode(fewer))
    with pytest.raises(codec.MessageError):
        codec.decode(msgspec.msgpack.encode(least | {"type": f"{kind.__name__}Two"}))
