"""Foreign sockets at the inbox: whatever they send is counted, and nobody else notices."""

from __future__ import annotations

import asyncio
import pickle
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop
import zmq

from baton.core.ids import Peer
from baton.core.limits import Limits
from baton.wire import frames
from baton.wire.frames import Frame, Hello, Kind, Refusal
from support.transport_worlds import COMPAT, Node, ZmqWorld, numbered

LIMITS = Limits(frame_bytes_max=100_000)


class Inbox:
    """One process with a good link, and a raw DEALER that sends what it likes."""

    def __init__(self, directory: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.world = ZmqWorld(directory, loop)
        self.node = self.world.add("decode-0", limits=LIMITS)
        self.friend = self.world.add("friend", limits=LIMITS)
        self.friend.transport.dial(self.node.member)
        self.world.until(lambda: bool(self.friend.ups()))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sent = 0

    def stranger(self, identity: bytes | None = None) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        if identity is not None:
            socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.connect(self.node.member.endpoint)
        return socket

    def counted(self, reason: str, socket: zmq.Socket[bytes], parts: list[bytes]) -> None:
        """Send ``parts``; they must be counted under ``reason``."""
        before = self.node.counts[reason]
        socket.send_multipart(parts)
        self.world.until(lambda: self.node.counts[reason] == before + 1)

    def refusal(self, socket: zmq.Socket[bytes]) -> Refusal:
        answers: list[list[bytes]] = []

        def answered() -> bool:
            if socket.poll(0):
                answers.append(socket.recv_multipart())
            return bool(answers)

        self.world.until(answered)
        frame = frames.unpack(answers[0], 10_000)
        assert frame.kind is Kind.REFUSED
        return frames.decode_refusal(frame.body)

    def unharmed(self) -> None:
        """The good link goes on."""
        expected = len(self.node.received()) + 10
        self.friend.send_all(self.node.peer, numbered(10))
        self.world.until(lambda: len(self.node.received()) == expected)
        assert self.node.losses() == self.friend.losses() == []
        self.world.check()


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    loop = uvloop.new_event_loop()
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        inbox = Inbox(Path(directory), loop)
        try:
            yield inbox
        finally:
            inbox.context.destroy(linger=0)
            inbox.world.end()
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


def member_bytes(node: Node, peer: Peer) -> bytes:
    return frames.encode_hello(msgspec.structs.replace(node.member, peer=peer))


def test_malformed_frames_are_counted_by_reason(inbox: Inbox) -> None:
    """Parts, sizes, magic, kind, identity: each has its own counter, none does harm."""
    stranger = inbox.stranger()
    good = frames.pack(Frame(Kind.DATA, 1, inbox.node.peer.incarnation, 1, 1))
    inbox.counted("frame_parts", stranger, [b"alone"])
    inbox.counted("frame_parts", stranger, [good, b"", b"more"])
    inbox.counted("frame_truncated", stranger, [b"", b""])
    inbox.counted("frame_truncated", stranger, [good[:-3], b""])
    inbox.counted("frame_magic", stranger, [b"GET / HTTP/1.1\r\nHost: x", b""])
    inbox.counted("frame_magic", stranger, [pickle.dumps({"a": 1}), b""])
    inbox.counted("frame_kind", stranger, [good[:6] + b"\xff" + good[7:], b""])
    inbox.counted("frame_version", stranger, [good[:4] + b"\0\x09" + good[6:], b""])
    inbox.counted("frame_oversized", stranger, [good, b"x" * LIMITS.frame_bytes_max])
    inbox.counted("frame_identity", stranger, [good, b""])
    inbox.unharmed()


def test_a_huge_frame_costs_only_its_own_connection(inbox: Inbox) -> None:
    """ZeroMQ drops what is far over the limit before it is read."""
    stranger = inbox.stranger()
    stranger.send_multipart([b"x" * 50_000_000, b""])
    after = inbox.stranger()
    inbox.counted("frame_parts", after, [b"alone"])
    inbox.unharmed()


def test_a_hello_of_another_version_is_refused_with_both_versions(inbox: Inbox) -> None:
    """Whatever its header looks like beyond the first eight bytes, it gets a readable answer."""
    stranger = inbox.stranger(b"prefill-9/7")
    header = struct.pack("!4sHBx", frames.MAGIC, 99, Kind.HELLO) + b"a header of the future"
    inbox.counted("frame_version", stranger, [header, b"?"])
    refusal = inbox.refusal(stranger)
    assert refusal.code == "version"
    mine = f"decode-0/1 speaks protocol version {frames.PROTOCOL_VERSION}"
    assert f"{mine}, prefill-9/7 speaks 99" in refusal.text
    (reported,) = inbox.node.refusals()
    assert (reported.worker_id, reported.text) == ("prefill-9", refusal.text)
    inbox.unharmed()


@pytest.mark.parametrize("field", [*Hello.__struct_fields__])
def test_a_hello_without_a_field_is_refused(inbox: Inbox, field: str) -> None:
    """A missing field refuses the hello; an additional one is ignored."""
    peer = Peer("prefill-9", 7)
    stranger = inbox.stranger(frames.identity_of(peer))
    header = frames.pack(Frame(Kind.HELLO, 7, inbox.node.peer.incarnation, 1))
    hello = msgspec.msgpack.decode(member_bytes(inbox.node, peer))
    del hello[field]
    inbox.counted("hello_malformed", stranger, [header, msgspec.msgpack.encode(hello)])
    assert inbox.refusal(stranger).code == "malformed"
    hello = {**msgspec.msgpack.decode(member_bytes(inbox.node, peer)), "hobby": "golf"}
    stranger.send_multipart([header, msgspec.msgpack.encode(hello)])
    inbox.world.until(lambda: peer in inbox.node.ups())
    inbox.unharmed()


def test_a_hello_under_a_false_name_is_refused(inbox: Inbox) -> None:
    """The hello, the header and the socket's identity must name the same incarnation."""
    stranger = inbox.stranger(b"prefill-9/7")
    for source, peer, reason in (
        (7, Peer("prefill-8", 7), "hello_malformed"),
        (8, Peer("prefill-9", 8), "frame_identity"),
    ):
        header = frames.pack(Frame(Kind.HELLO, source, inbox.node.peer.incarnation, 1))
        inbox.counted(reason, stranger, [header, member_bytes(inbox.node, peer)])
        assert inbox.refusal(stranger).code == "malformed"
    inbox.unharmed()


def test_a_frame_for_another_incarnation_is_refused(inbox: Inbox) -> None:
    """What was meant for the process that died is never obeyed by its successor."""
    stranger = inbox.stranger(b"prefill-9/7")
    data = frames.pack(Frame(Kind.DATA, 7, inbox.node.peer.incarnation + 1, 1, 1))
    inbox.counted("frame_stale", stranger, [data, b""])
    refusal = inbox.refusal(stranger)
    assert refusal.code == "stale"
    assert refusal.text == "decode-0/2 is gone, here is decode-0/1"
    inbox.unharmed()


def test_a_frame_without_a_link_is_refused(inbox: Inbox) -> None:
    """Data before any hello is dropped, and its sender is told that there is no link."""
    stranger = inbox.stranger(b"prefill-9/7")
    data = frames.pack(Frame(Kind.DATA, 7, inbox.node.peer.incarnation, 1, 1))
    inbox.counted("frame_no_link", stranger, [data, b""])
    assert inbox.refusal(stranger).code == "over"
    inbox.unharmed()


def test_an_incompatible_stranger_is_told_what_differs(inbox: Inbox) -> None:
    """The answer names both sides and the field."""
    peer = Peer("prefill-9", 7)
    stranger = inbox.stranger(frames.identity_of(peer))
    member = msgspec.structs.replace(
        inbox.node.member, peer=peer, compat=msgspec.structs.replace(COMPAT, dtype="bfloat16")
    )
    header = frames.pack(Frame(Kind.HELLO, 7, inbox.node.peer.incarnation, 1))
    inbox.counted("hello_incompatible", stranger, [header, frames.encode_hello(member)])
    refusal = inbox.refusal(stranger)
    assert refusal.text == ("decode-0/1 and prefill-9/7 differ: dtype: 'float32' != 'bfloat16'")
    inbox.unharmed()


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**63 - 1, -(2**63)])
def test_a_hello_of_a_process_that_cannot_be_does_no_harm(inbox: Inbox, pid: int) -> None:
    """A pid that the kernel has no process for, or that is not even a pid: silence will tell."""
    peer = Peer("prefill-9", 7)
    stranger = inbox.stranger(frames.identity_of(peer))
    member = msgspec.structs.replace(inbox.node.member, peer=peer, pid=pid)
    header = frames.pack(Frame(Kind.HELLO, 7, inbox.node.peer.incarnation, 1))
    stranger.send_multipart([header, frames.encode_hello(member)])
    inbox.world.until(lambda: peer in inbox.node.ups())
    inbox.unharmed()


def test_an_inbox_whose_path_was_removed_is_found_again(inbox: Inbox) -> None:
    """Somebody cleans up old files: links go on, and who comes later gets one as well."""
    path = Path(inbox.node.member.endpoint.removeprefix("ipc://"))
    for _ in range(2):
        path.unlink()
        inbox.world.until(path.exists)
    assert path.stat().st_mode & 0o777 == 0o600
    inbox.unharmed()
    late = inbox.world.add("late", limits=LIMITS)
    late.transport.dial(inbox.node.member)
    inbox.world.until(lambda: inbox.node.peer in late.ups())
    inbox.unharmed()
