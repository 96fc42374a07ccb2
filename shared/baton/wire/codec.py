"""Bytes to messages and back: msgpack, typed, nothing executable.

Decides nothing about transport; a body that is not a known message raises
:class:`MessageError`, which the caller counts and drops.
"""

from __future__ import annotations

import msgspec

from baton.wire.messages import AnyMessage

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class MessageError(ValueError):
    """The bytes are not a message of this protocol version."""


def encode(message: AnyMessage) -> bytes:
    """Return the msgpack body of ``message``."""
    return _encoder.encode(message)


def decode(body: bytes | memoryview) -> AnyMessage:
    """Return the message in ``body``.

    Raises:
        MessageError: truncated, of an unknown type, or with a field of the wrong type.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise MessageError(str(error)) from None
