"""The Redis protocol reader and writer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ledger.resp import ProtocolBroken, RespError, RespReader, RespReply, pack

REPLIES: list[RespReply] = [b"OK", 7, -1, None, b"", b"a\r\nb", [b"done", 1, [], [None, b"x"]]]


def encode(reply: RespReply) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, list):
        return b"*%d\r\n" % len(reply) + b"".join(encode(each) for each in reply)
    if isinstance(reply, RespError):
        return b"-" + reply.text.encode() + b"\r\n"
    return b"$%d\r\n%s\r\n" % (len(reply), reply)


LEAVES = st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=40)
ANY_REPLY = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4), max_leaves=12)


@given(st.lists(ANY_REPLY, max_size=8), st.randoms(use_true_random=False))
def test_replies_are_the_same_however_the_stream_is_cut(replies, random) -> None:  # type: ignore[no-untyped-def]
    """Every cut of the byte stream gives the same replies in the same order."""
    stream = b"".join(map(encode, replies))
    reader, read, at = RespReader(), [], 0
    while at < len(stream):
        size = random.randint(1, 9)
        read += reader.feed(stream[at : at + size])
        at += size
    assert read == replies


def test_an_error_is_a_value_in_the_stream() -> None:
    """An error reply takes its place among the others and keeps its text."""
    first, second, third = RespReader().feed(b"+OK\r\n-NOSCRIPT no\r\n:3\r\n")
    assert (first, third) == (b"OK", 3)
    assert isinstance(second, RespError)
    assert second.text == "NOSCRIPT no"


@pytest.mark.parametrize("junk", [b"HTTP/1.1 400 Bad\r\n", b":x\r\n", b"\r\n", b"$1x\r\n"])
def test_what_is_not_the_protocol_breaks_the_connection(junk: bytes) -> None:
    """Bytes of another protocol raise, instead of waiting for ever."""
    with pytest.raises(ProtocolBroken):
        RespReader().feed(junk)


def test_commands_are_arrays_of_bulk_strings() -> None:
    """Text is UTF-8, sizes count bytes, numbers are decimal."""
    assert pack("SET", "ä", 12, b"\r\n") == (
        b"*4\r\n$3\r\nSET\r\n$2\r\n\xc3\xa4\r\n$2\r\n12\r\n$2\r\n\r\n\r\n"
    )
