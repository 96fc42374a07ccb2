"""What holds for all tests: they hear Ctrl-C, and so does what they start; a SIGTERM is one too."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let both end a run in order, clusters and all.

    A shell has what it runs in the background ignore Ctrl-C, and so would all that it starts; and a
    run that `timeout` ends would leave its clusters.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
