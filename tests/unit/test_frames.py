"""baton.wire.frames: what is a frame, and what is counted as none."""

from __future__ import annotations

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import INCARNATION_MAX, Compat, Member, Peer, Role
from baton.wire import frames
from baton.wire.frames import Frame, FrameError, Kind, RefusalCode

BYTES_MAX = 1_000
u64 = st.integers(0, 2**64 - 1)


def parts_of(frame: Frame) -> list[bytes]:
    return [frames.pack(frame), frame.body]


@given(st.builds(Frame, st.sampled_from(Kind), u64, u64, u64, u64, u64, st.binary(max_size=50)))
def test_a_frame_survives_the_wire(frame: Frame) -> None:
    """What was packed is unpacked, field by field."""
    assert frames.unpack(parts_of(frame), BYTES_MAX) == frame


def reason_of(parts: list[bytes]) -> str:
    with pytest.raises(FrameError) as caught:
        frames.unpack(parts, BYTES_MAX)
    return caught.value.reason


def test_each_kind_of_damage_has_its_own_reason() -> None:
    """Every way to be no frame is told apart by a stable word."""
    header = frames.pack(Frame(Kind.DATA, 1, 2, 3, 4, 5))
    assert reason_of([]) == "frame_parts"
    assert reason_of([header]) == "frame_parts"
    assert reason_of([header, b"", b""]) == "frame_parts"
    assert reason_of([header, b"x" * BYTES_MAX]) == "frame_oversized"
    assert reason_of([b"", b""]) == "frame_truncated"
    assert reason_of([header[:7], b""]) == "frame_truncated"
    assert reason_of([header[:-1], b""]) == "frame_truncated"
    assert reason_of([header + b"\0", b""]) == "frame_truncated"
    assert reason_of([b"GET / HTTP/1.1\r\n", b""]) == "frame_magic"
    assert reason_of([header[:6] + b"\x63" + header[7:], b""]) == "frame_kind"


def test_another_version_still_says_what_kind_of_frame_it_is() -> None:
    """A hello of a later version can be answered: its kind and version are known."""
    header = struct.pack("!4sHB", frames.MAGIC, 7, Kind.HELLO) + b"\0 a longer header"
    with pytest.raises(FrameError) as caught:
        frames.unpack([header, b"?"], BYTES_MAX)
    error = caught.value
    assert (error.reason, error.kind, error.version) == ("frame_version", Kind.HELLO, 7)


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_any_bytes_are_a_frame_or_a_frame_error(parts: list[bytes]) -> None:
    """Nothing else than FrameError comes out of foreign bytes."""
    with contextlib.suppress(FrameError):
        assert frames.unpack(parts, BYTES_MAX).kind in Kind


COMPAT = Compat("m", "t", "float32", 16, "layout", "torch")


def test_a_hello_survives_the_wire() -> None:
    """The member comes out as it went in, with and without a compatibility digest."""
    for compat in (None, COMPAT):
        member = Member(Peer("decode-0", 5), Role.DECODE, "ipc:///x", 1, "boot", compat)
        hello = frames.decode_hello(frames.encode_hello(member))
        assert (hello.version, hello.member) == (frames.PROTOCOL_VERSION, member)


@given(st.binary(max_size=100))
def test_foreign_bytes_are_no_hello_and_no_refusal(body: bytes) -> None:
    """A body that is none is refused with a reason, never with another exception."""
    with pytest.raises(FrameError):
        frames.decode_hello(body)
    with pytest.raises(FrameError):
        frames.decode_refusal(body)


def test_a_refusal_with_an_unknown_code_can_be_read() -> None:
    """A later version may refuse for reasons this one does not know, and say more."""
    later = {"code": "mood", "text": "no", "more": 1}
    assert frames.decode_refusal(msgspec.msgpack.encode(later)).code == "mood"
    refusal = frames.decode_refusal(frames.encode_refusal(RefusalCode.STALE, "gone", 7))
    assert (refusal.code, refusal.text, refusal.target) == (RefusalCode.STALE, "gone", 7)


@pytest.mark.parametrize("peer", [Peer("decode-0", 0), Peer("a/b", INCARNATION_MAX)])
def test_an_identity_names_its_peer(peer: Peer) -> None:
    """The socket identity and the peer are two forms of the same thing."""
    assert frames.peer_of(frames.identity_of(peer)) == peer


@pytest.mark.parametrize(
    "identity",
    [
        b"",
        b"/1",
        b"x/",
        b"x/-1",
        b"x/1.5",
        b"x/01",
        b"\0abcd",
        b"x\n/1",
        "é/1".encode(),
        b"x/%d" % (INCARNATION_MAX + 1),
    ],
)
def test_a_foreign_identity_names_nobody(identity: bytes) -> None:
    """A socket that was not named by us is nobody."""
    assert frames.peer_of(identity) is None
