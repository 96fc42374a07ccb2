"""Tells systemd how this process is: loading, ready, alive, stopping.

Decides nothing; without ``$NOTIFY_SOCKET`` every call does nothing. One datagram a message, as
sd_notify(3) describes, so no library is needed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """The service manager's ear."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    def ready(self, text: str) -> None:
        """The process can do its work."""
        self._tell(f"READY=1\nSTATUS={text}")

    def alive(self) -> None:
        """The guard does its work; whether its worker does is the guard's to see."""
        self._tell("WATCHDOG=1")

    def loading(self, more_s: float, text: str) -> None:
        """The start goes on; allow it ``more_s`` from now."""
        self._tell(f"EXTEND_TIMEOUT_USEC={int(more_s * 1e6)}\nSTATUS={text}")

    def stopping(self, more_s: float) -> None:
        """The end has begun and may take ``more_s``."""
        self._tell(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(more_s * 1e6)}")

    def _tell(self, message: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as ear:
            ear.setblocking(False)
            try:
                ear.sendto(message.encode(), self._address)
            except OSError:
                # A manager that is restarting misses a message; the next one says the same.
                return
