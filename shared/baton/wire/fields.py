"""What messages are made of: their base class, and the bounds of what stands in them.

Every number has the bounds of what it counts: a message with one outside them is refused where it
is decoded, like one with a field of the wrong type, so no machine meets it. Whether a number fits
*this* request (its epoch, its blocks) is the machine's business.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.core.prefix import SHORT_BYTES

Count = Annotated[int, Meta(ge=0, le=2**53)]
Epoch = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Turn = Annotated[int, Meta(ge=1, le=2**53)]
"""Orders the routers of a request: its gateway raises it with each one it gives the request to. Its
upper bits are those of the client's last claim, which grow with time (milliseconds)."""
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
BlockNumber = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Generation = Annotated[int, Meta(ge=0, le=2**32 - 1)]
BlockCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Milliseconds = Annotated[int, Meta(ge=0, le=2**40)]
RequestId = Annotated[str, Meta(min_length=1, max_length=256)]
WorkerId = Annotated[str, Meta(max_length=64)]
MeasuredMs = Annotated[float, Meta(ge=0, le=2.0**40)]
"""Has an upper bound, so that it is finite."""
BootTimeNs = Annotated[int, Meta(ge=0, le=2**62)]

#: More prefill workers on one decode worker's arena than one pool has.
WRITERS_MAX = 1_024
#: More rows than any step has.
STEP_ROWS_MAX = 4_096
ShortNames = Annotated[bytes, Meta(max_length=SHORT_BYTES * 2**16)]
"""Beginnings of names of blocks (``baton.core.prefix.short_names``), one after the other."""

ID_BYTES = 4


def check_ids(raw: bytes) -> None:
    """Raise ``ValueError`` unless these are little-endian uint32 ids."""
    if len(raw) % ID_BYTES:
        raise ValueError(f"{len(raw)} bytes are not a whole number of ids")
    if max(raw[ID_BYTES - 1 :: ID_BYTES], default=0) >= 0x80:
        raise ValueError("an id is not below 2**31")


def check_names(raw: bytes) -> None:
    """Raise ``ValueError`` unless these are whole names of :data:`ShortNames`."""
    if len(raw) % SHORT_BYTES:
        raise ValueError(f"{len(raw)} bytes are not a whole number of names")


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True):
    """Base of all messages; the tag is the class name."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one emitted token and of the best alternatives, best first."""

    token_id: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()
