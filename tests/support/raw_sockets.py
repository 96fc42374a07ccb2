"""Reading from a bare socket, for clients that no HTTP library would be."""

from __future__ import annotations

import socket


def read_until(raw: socket.socket, needle: bytes, count: int = 1) -> bytes:
    """Return what came until ``needle`` was there ``count`` times; fail if the peer closes."""
    data = b""
    while data.count(needle) < count:
        part = raw.recv(65536)
        assert part, data
        data += part
    return data
