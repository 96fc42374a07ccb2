"""What holds for all tests: programs that they start hear Ctrl-C."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell has what it runs in the background ignore Ctrl-C, and so would all that it starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
