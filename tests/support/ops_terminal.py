"""A terminal of one's own, for programs that behave differently in one."""

from __future__ import annotations

import os
import select
import sys
import time

from support.ops_cluster import wait_until


def read_until(terminal: int, text: str, seconds: float) -> str:
    """Return what the terminal showed until ``text``; or all of it at its end."""
    seen, deadline = "", time.monotonic() + seconds
    while text not in seen:
        left = deadline - time.monotonic()
        assert left > 0, f"not shown: {text!r}; shown: {seen}"
        if not select.select([terminal], [], [], left)[0]:
            continue
        try:
            seen += os.read(terminal, 4096).decode(errors="replace")
        except OSError:
            return seen
    return seen


def exit_code(pid: int, terminal: int) -> int:
    """Wait for make; return its exit code, or the negative number of its signal. What it still
    says is printed, for whoever asks why the code is another one."""
    codes: list[int] = []

    def ended() -> bool:
        # A terminal nobody reads would stop the one that writes.
        if select.select([terminal], [], [], 0)[0]:
            try:
                sys.stdout.write(os.read(terminal, 4096).decode(errors="replace"))
            except OSError:
                pass
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            codes.append(os.waitstatus_to_exitcode(status))
        return bool(done)

    wait_until(ended, 30.0, "make ends")
    return codes[0]
