"""What attention that is registered with transformers works on: a module has no other way to it.

Decides that it is one step at a time and thread, and none outside of one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar, cast

Step = TypeVar("Step")


class Attending(Generic[Step]):
    """The step of each thread."""

    def __init__(self) -> None:
        self._of = threading.local()

    @property
    def step(self) -> Step | None:
        """Return this thread's, if one runs."""
        return cast("Step | None", getattr(self._of, "step", None))

    @contextmanager
    def __call__(self, step: Step) -> Iterator[None]:
        """Make ``step`` this thread's within the block."""
        self._of.step = step
        try:
            yield
        finally:
            self._of.step = None
