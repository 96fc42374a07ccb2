"""The progress bar with live figures, while a run goes on.

Decides what is shown, twice a second at most: drawing costs the cores that are being measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from baton.bench.figures import quantile
from baton.bench.load.generator import LoadPlan, Measured
from baton.bench.load.reckoning import state

DRAWN_EVERY_S = 0.5
#: Live figures are of the newest requests.
NEWEST = 200


class Live:
    """Draws on standard error while it is entered; silent when that is no terminal."""

    def __init__(
        self, label: str, plan: LoadPlan, measured: Callable[[], Measured], *, quiet: bool
    ) -> None:
        self._plan = plan
        self._measured = measured
        self._loop = asyncio.get_running_loop()
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(24),
            TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        whole = plan.warmup_s + plan.duration_s
        self._task = self._progress.add_task(label, total=whole, words="")
        self._began = monotonic()
        self._handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> Live:
        self._progress.start()
        self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._progress.stop()

    def _draw(self) -> None:
        if self._progress.disable:
            return
        passed = monotonic() - self._began
        self._progress.update(self._task, completed=passed, words=words(self._measured()))
        self._progress.refresh()
        self._handle = self._loop.call_later(DRAWN_EVERY_S, self._draw)


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
