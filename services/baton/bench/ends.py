"""How a benchmark hears of its end, so that nothing it started outlives it.

Decides that SIGTERM is what Ctrl-C is, and that what takes things away is not interrupted itself.
Signals are the main thread's; nothing here is for another one.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def term_interrupts() -> Iterator[None]:
    """SIGTERM raises ``KeyboardInterrupt``, as Ctrl-C does, so that ``finally`` is reached."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ends_call(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> Iterator[None]:
    """Either signal calls ``call`` in the loop."""
    before = {number: signal.getsignal(number) for number in ENDS}
    for number in ENDS:
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A signal waits until the block is over; then it raises ``KeyboardInterrupt``."""
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    before: dict[signal.Signals, Any] = {each: signal.signal(each, note) for each in ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt
