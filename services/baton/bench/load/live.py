"""The progress bar with live figures, while a run goes on.

Decides what is shown, twice a second at most: drawing costs the cores that are being measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from baton.bench.figures import quantile
from baton.bench.load.generator import LoadPlan, Measured
from baton.bench.load.reckoning import state

DRAWN_EVERY_S = 0.5
#: Live figures are of the newest requests.
NEWEST = 200


@contextmanager
def live(
    label: str, plan: LoadPlan, measured: Callable[[], Measured], *, quiet: bool
) -> Iterator[None]:
    """Draw on standard error meanwhile; nothing where that is no terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    progress = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(24),
        TextColumn("{task.fields[words]}"),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    task = progress.add_task(label, total=plan.warmup_s + plan.duration_s, words="")
    loop, began = asyncio.get_running_loop(), monotonic()
    handle: asyncio.TimerHandle | None = None

    def draw() -> None:
        nonlocal handle
        progress.update(task, completed=monotonic() - began, words=words(measured()))
        progress.refresh()
        handle = loop.call_later(DRAWN_EVERY_S, draw)

    with progress:
        draw()
        try:
            yield
        finally:
            if handle is not None:
                handle.cancel()


def words(measured: Measured) -> str:
    """Return the figures of the newest requests in a few words."""
    newest = measured.asked[-NEWEST:]
    ok = [each.answer for each in newest if each.answer and state(each) == "ok"]
    trouble = sum(state(each) in ("failed", "refused") for each in measured.asked)
    parts = [f"{len(measured.asked)} asked, {measured.in_flight} running"]
    if ok:
        ttft = quantile([answer.arrivals[0] - answer.sent_at for answer in ok], 0.5)
        parts.append(f"TTFT p50 {ttft * 1e3:.0f} ms")
        gaps = [
            (a.arrivals[-1] - a.arrivals[0]) / (len(a.arrivals) - 1)
            for a in ok
            if len(a.arrivals) > 1
        ]
        if gaps:
            parts.append(f"ITL {quantile(gaps, 0.5) * 1e3:.1f} ms")
    if trouble:
        parts.append(f"[red]{trouble} errors[/red]")
    return ", ".join(parts)
