"""The frame between two processes: a fixed header and a body, as two ZeroMQ parts.

Decides the bytes of the header, the hello and the refusal; what is done with a frame is decided by
``baton.wire.link`` and ``baton.transport.switchboard``.

Header, network byte order, 48 bytes::

    magic    4  b"BATN"
    version  2  PROTOCOL_VERSION of the sender
    kind     1  one of Kind
    zero     1
    seq      8  DATA: number of this message on the link, from 1; else 0
    ack      8  the sender has handled every message up to this number
    source   8  the sender's incarnation
    target   8  the incarnation it is meant for
    link     8  number of the link between the two, from 1; chosen by who dials

The first eight bytes, and the bodies of HELLO and REFUSED, mean the same in every version: two
processes that share no version can still tell each other so.
"""

from __future__ import annotations

import struct
from enum import IntEnum, StrEnum

import msgspec

from baton.core.ids import INCARNATION_MAX, Member, Peer

MAGIC = b"BATN"
PROTOCOL_VERSION = 4

_PREFIX = struct.Struct("!4sHBx")
_HEADER = struct.Struct("!4sHBxQQQQQ")
HEADER_BYTES = _HEADER.size

#: A longer name would not fit into the socket identity (255 bytes) beside its incarnation.
WORKER_ID_CHARS_MAX = 100


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    """Dialling side: who I am. Body: :class:`Hello`."""
    WELCOME = 2
    """Answering side: who I am, the link is open. Body: :class:`Hello`."""
    REFUSED = 3
    """No link. Body: :class:`Refusal`."""
    DATA = 4
    """A message. Body: ``baton.wire.codec``."""
    ACK = 5
    """Only the header's ``ack``."""
    PING = 6
    """Nothing to say, still here."""
    BYE = 7
    """The link is over, on purpose."""


_KINDS: dict[int, Kind] = {int(kind): kind for kind in Kind}


class Frame(msgspec.Struct, frozen=True):
    """One frame, as sent or as received."""

    kind: Kind
    source: int
    target: int
    link: int = 0
    seq: int = 0
    ack: int = 0
    body: bytes = b""


class Hello(msgspec.Struct, frozen=True):
    """What each side says of itself before anything else."""

    version: int
    member: Member


class RefusalCode(StrEnum):
    """Why there is no link, for the machine; the text is for people."""

    VERSION = "version"
    INCOMPATIBLE = "incompatible"
    MALFORMED = "malformed"
    STALE = "stale"
    """The addressed incarnation is not here (any more)."""
    OVER = "over"
    """That link has ended; another one may be opened."""
    ENDED = "ended"
    """These two incarnations will have no link any more."""


class Refusal(msgspec.Struct, frozen=True):
    """Body of a REFUSED frame. ``code`` is a plain string: a later version may know more."""

    code: str
    text: str
    target: int = 0
    """The incarnation that the refused frame was meant for, 0 if its header could not be read. A
    later incarnation answers for an earlier one, over a socket that may have been dialled since."""


class FrameError(ValueError):
    """Bytes that are no frame of ours. ``reason`` is a stable word for counting."""

    def __init__(self, reason: str, kind: Kind | None = None, version: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind
        """Known even if the version is not ours."""
        self.version = version
        """The sender's, where the magic was right."""


def pack(frame: Frame) -> bytes:
    """Return the header of ``frame``; its body is the second part as it is."""
    return _HEADER.pack(
        MAGIC,
        PROTOCOL_VERSION,
        frame.kind,
        frame.seq,
        frame.ack,
        frame.source,
        frame.target,
        frame.link,
    )


def unpack(parts: list[bytes], bytes_max: int) -> Frame:
    """Return the frame in the two ``parts`` (header, body).

    Raises:
        FrameError: ``frame_parts`` (not two), ``frame_oversized``, ``frame_truncated``,
            ``frame_magic``, ``frame_version``, ``frame_kind``.
    """
    if len(parts) != 2:
        raise FrameError("frame_parts")
    header, body = parts
    if len(header) + len(body) > bytes_max:
        raise FrameError("frame_oversized")
    if len(header) < _PREFIX.size:
        raise FrameError("frame_truncated")
    magic, version, number = _PREFIX.unpack_from(header)
    if magic != MAGIC:
        raise FrameError("frame_magic")
    kind = _KINDS.get(number)
    if version != PROTOCOL_VERSION:
        raise FrameError("frame_version", kind, version)
    if kind is None:
        raise FrameError("frame_kind", None, version)
    if len(header) != HEADER_BYTES:
        raise FrameError("frame_truncated", kind, version)
    _, _, _, seq, ack, source, target, link = _HEADER.unpack(header)
    return Frame(kind, source, target, link, seq, ack, body)


_hello = msgspec.msgpack.Decoder(Hello)
_refusal = msgspec.msgpack.Decoder(Refusal)


def encode_hello(member: Member) -> bytes:
    """Return the body of a HELLO or WELCOME."""
    return msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, member))


def decode_hello(body: bytes) -> Hello:
    """Return the hello in ``body``.

    Raises:
        FrameError: ``hello_malformed``.
    """
    try:
        return _hello.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise FrameError("hello_malformed", Kind.HELLO, PROTOCOL_VERSION) from None


def encode_refusal(code: RefusalCode, text: str, target: int) -> bytes:
    """Return the body of a REFUSED frame."""
    return msgspec.msgpack.encode(Refusal(code.value, text, target))


def decode_refusal(body: bytes) -> Refusal:
    """Return the refusal in ``body``.

    Raises:
        FrameError: ``refusal_malformed``.
    """
    try:
        return _refusal.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise FrameError("refusal_malformed", Kind.REFUSED, PROTOCOL_VERSION) from None


def identity_of(peer: Peer) -> bytes:
    """Return the ZeroMQ socket identity of ``peer``: ``worker_id/incarnation``."""
    return str(peer).encode()


def peer_of(identity: bytes) -> Peer | None:
    """Return who ``identity`` names, ``None`` if it names nobody (a foreign socket)."""
    name, slash, digits = identity.rpartition(b"/")
    if not slash or not name or len(name) > WORKER_ID_CHARS_MAX:
        return None
    if not (name.isascii() and digits.isdigit() and len(digits) <= 19):
        return None
    incarnation = int(digits)
    if incarnation > INCARNATION_MAX:
        return None
    peer = Peer(name.decode("ascii"), incarnation)
    return peer if peer.worker_id.isprintable() and identity_of(peer) == identity else None
