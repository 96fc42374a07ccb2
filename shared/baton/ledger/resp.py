"""The Redis protocol (RESP2), as much of it as scripted transitions need.

Decides how commands and replies look on the wire; knows nothing of sockets. The redis package's
asyncio connection costs twice the processor time a reply, and it retries and reads in places of its
own choosing; here a reply is read by the one it belongs to, or the connection ends.
"""

from __future__ import annotations

from collections.abc import Iterable

#: A longer reply is not one of ours: the stream is out of step.
REPLY_BYTES_MAX = 64 * 2**20


class RespError(Exception):
    """An error reply. As a value in a stream of replies, it is returned and not raised."""

    @property
    def text(self) -> str:
        return str(self.args[0])


class ProtocolBroken(Exception):
    """The bytes are not RESP2: the connection is useless."""


RespReply = bytes | int | None | RespError | list["RespReply"]


class _Incomplete(Exception):
    """The rest has not arrived yet."""


def pack(*words: bytes | str | int) -> bytes:
    """Return one command."""
    parts = [f"*{len(words)}\r\n".encode()]
    append_words(parts, words)
    return b"".join(parts)


def append_words(parts: list[bytes], words: Iterable[bytes | str | int]) -> None:
    """Append the encoding of ``words`` to ``parts``, for a header written by the caller."""
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))


class RespReader:
    """Cuts a byte stream into replies."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0

    def feed(self, data: bytes) -> list[RespReply]:
        """Return the replies completed by ``data``, in order.

        Raises:
            ProtocolBroken: not RESP2, or too long.
        """
        self._buffer += data
        replies: list[RespReply] = []
        done = 0
        try:
            while done < len(self._buffer):
                self._at = done
                replies.append(self._read())
                done = self._at
        except _Incomplete:
            pass
        del self._buffer[:done]
        if len(self._buffer) > REPLY_BYTES_MAX:
            raise ProtocolBroken("a reply is too long")
        return replies

    def _line(self) -> bytes:
        end = self._buffer.find(b"\r\n", self._at)
        if end < 0:
            raise _Incomplete
        line = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return line

    def _read(self) -> RespReply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return RespError(rest.decode(errors="replace"))
        try:
            number = int(rest)
        except ValueError:
            raise ProtocolBroken(f"not a reply: {line[:80]!r}") from None
        if kind == b":":
            return number
        if kind == b"$":
            return self._bulk(number)
        if kind == b"*":
            return None if number < 0 else [self._read() for _ in range(number)]
        raise ProtocolBroken(f"not a reply: {line[:80]!r}")

    def _bulk(self, size: int) -> bytes | None:
        if size < 0:
            return None
        end = self._at + size
        if len(self._buffer) < end + 2:
            raise _Incomplete
        data = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return data
