"""Plots as SVG text: lines and dots over linear or logarithmic axes.

Decides geometry and colours only. Colours are variables of the page, so that they fit light and
dark; the palette can be told apart by colour-blind readers, and lines are dashed differently too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 12, 44
COLOURS = 6
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis."""

    words: str
    log: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(slots=True)
class Plot:
    """One plot; what is added to it is drawn in that order."""

    title: str
    x: Axis
    y: Axis
    _lines: list[tuple[str, Points, bool]] = field(default_factory=list)
    _marks: list[tuple[float, str]] = field(default_factory=list)
    _bounds: list[tuple[float, str]] = field(default_factory=list)

    def line(self, name: str, points: Points, *, dots: bool = False) -> None:
        """Add a line (or its points alone), in the next colour."""
        self._lines.append((name, points, dots))

    def mark(self, x: float, words: str) -> None:
        """Add a vertical mark with a tooltip."""
        self._marks.append((x, words))

    def bound(self, x: float, words: str) -> None:
        """Add a vertical line with a caption."""
        self._bounds.append((x, words))

    def svg(self) -> str:
        """Return the drawing; empty when there is nothing to draw."""
        points = [point for _, line, _ in self._lines for point in line if self._shown(point)]
        if not points:
            return ""
        x = _Scale(self.x, [p[0] for p in points], LEFT, WIDTH - RIGHT)
        y = _Scale(self.y, [p[1] for p in points], HEIGHT - BOTTOM, TOP)
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">',
            *self._axes(x, y),
        ]
        for at, words in self._marks:
            if x.holds(at):
                parts.append(
                    f'<line class="mark" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" '
                    f'y2="{HEIGHT - BOTTOM}"><title>{escape(words)}</title></line>'
                )
        for at, words in self._bounds:
            if x.holds(at):
                parts.append(
                    f'<line class="bound" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" '
                    f'y2="{HEIGHT - BOTTOM}"/><text x="{x(at) + 4:.1f}" y="{TOP + 10}">'
                    f"{escape(words)}</text>"
                )
        for number, (name, line, dots) in enumerate(self._lines):
            shown = [(x(px), y(py)) for px, py in line if self._shown((px, py))]
            parts.append((_dots if dots else _path)(shown, number, name))
        return "\n".join([*parts, "</svg>"])

    def legend(self) -> str:
        """Return the names of the lines with their colours."""
        if len(self._lines) < 2:
            return ""
        items = [
            f'<li><svg viewBox="0 0 26 8" width="26" height="8"><path class="l{n % COLOURS}" '
            f'stroke-dasharray="{_dash(n)}" d="M0 4H26"/></svg>{escape(name)}</li>'
            for n, (name, _, _) in enumerate(self._lines)
        ]
        return f'<ul class="legend">{"".join(items)}</ul>'

    def figure(self) -> str:
        """Return the plot with its title and legend; empty when there is nothing to draw."""
        drawn = self.svg()
        if not drawn:
            return ""
        caption = f"<figcaption>{escape(self.title)}</figcaption>"
        return f"<figure>{caption}{self.legend()}{drawn}</figure>"

    def _shown(self, point: tuple[float, float]) -> bool:
        return (point[0] > 0 or not self.x.log) and (point[1] > 0 or not self.y.log)

    def _axes(self, x: _Scale, y: _Scale) -> list[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = []
        for at in x.ticks():
            parts.append(
                f'<line class="grid" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" y2="{bottom}"/>'
                f'<text class="tick" text-anchor="middle" x="{x(at):.1f}" y="{bottom + 15}">'
                f"{_words(at)}</text>"
            )
        for at in y.ticks():
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(at):.1f}" y2="{y(at):.1f}"/>'
                f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y(at) + 4:.1f}">'
                f"{_words(at)}</text>"
            )
        middle = (TOP + bottom) / 2
        return [
            *parts,
            f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>',
            f'<text text-anchor="middle" x="{(LEFT + right) / 2}" y="{HEIGHT - 8}">'
            f"{escape(self.x.words)}</text>",
            f'<text text-anchor="middle" transform="translate(14 {middle}) rotate(-90)">'
            f"{escape(self.y.words)}</text>",
        ]


class _Scale:
    """From values to the drawing's units."""

    def __init__(self, axis: Axis, values: Sequence[float], begin: float, end: float) -> None:
        low = axis.low if axis.low is not None else min(values)
        high = axis.high if axis.high is not None else max(values)
        if axis.log:
            low, high = math.log10(low), math.log10(high)
        if high - low < 1e-9:
            low, high = (low - 0.1, high + 0.1) if axis.log else (min(0.0, low), max(1.0, high * 2))
        self._log, self._low, self._high = axis.log, low, high
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        at = math.log10(value) if self._log else value
        share = (at - self._low) / (self._high - self._low)
        return self._begin + min(1.0, max(0.0, share)) * (self._end - self._begin)

    def holds(self, value: float) -> bool:
        """Whether a value lies on the axis."""
        if self._log and value <= 0:
            return False
        at = math.log10(value) if self._log else value
        return self._low <= at <= self._high

    def ticks(self) -> list[float]:
        """Return some five round values."""
        if not self._log:
            step = _round_step((self._high - self._low) / 5)
            first = math.ceil(self._low / step - 1e-9)
            last = math.floor(self._high / step + 1e-9)
            return [n * step for n in range(first, last + 1)]
        for steps in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)):
            found = [
                factor * 10.0**power
                for power in range(math.floor(self._low) - 1, math.ceil(self._high) + 1)
                for factor in steps
                if self._low - 1e-9 <= math.log10(factor * 10.0**power) <= self._high + 1e-9
            ]
            if len(found) >= 3:
                return found
        return found


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(f * power for f in (1.0, 2.0, 5.0, 10.0) if f * power >= step * 0.999)


def _path(points: Points, number: int, name: str) -> str:
    if not points:
        return ""
    drawn = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    title = f"<title>{escape(name)}</title>"
    ends = ""
    if len(points) <= 20:
        ends = "".join(
            f'<circle class="d{number % COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="3">{title}</circle>'
            for x, y in points
        )
    return (
        f'<path class="l{number % COLOURS}" stroke-dasharray="{_dash(number)}" d="M{drawn}">'
        f"{title}</path>{ends}"
    )


def _dots(points: Points, number: int, name: str) -> str:
    title = f"<title>{escape(name)}</title>"
    return "".join(
        f'<circle class="d{number % COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="2">{title}</circle>'
        for x, y in points
    )


def _dash(number: int) -> str:
    return _DASHES[number % len(_DASHES)]


def _words(value: float) -> str:
    if value and (abs(value) >= 10_000 or abs(value) < 0.01):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:,.10g}"
