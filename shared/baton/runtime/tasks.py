"""Tasks whose errors are heard: the one way in which a service starts work beside itself.

asyncio keeps a task's error until somebody asks for it, and tells of it when the task is collected,
if ever. Whoever starts one says here who hears of its error, and keeps the task: the loop does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def begin(
    work: Coroutine[Any, Any, None], failed: Callable[[BaseException], None]
) -> asyncio.Task[None]:
    """Start ``work``; ``failed`` is called with the error that it ends with, if it does."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failed(error)

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(ended)
    return task
