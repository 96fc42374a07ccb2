"""How long an engine step takes: learned from steps, told in a few numbers, and what follows.

Decides how a step's time is put together: a base that depends on its tokens (all weights are read
however few there are), and what attention takes. A running sequence reads its whole context for one
token, the tokens of a prompt's chunk share what they read: so there is one share for each token of
context that a row reads, and another, many times smaller, for each pair of a prompt's token and one
that it attends to. All are measured, in cells of similar token counts with one slope for all of
them; what was never seen lies on the line through what was. Workers learn, routers only use what
they are told; both follow a prompt through its chunks with the same functions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.core.slo import ONE_OF, Slo

#: Cells are half octaves: 1, 2, 3, 4-5, 6-7, 8-11, 12-15 ... tokens; the last one is open.
CELLS = 26
#: The last so many steps of a cell count: a machine's speed changes with what else it does.
MEMORY = 16
#: A step that took longer than so many times its cell's mean counts as that much: the machine was
#: busy with something else.
OUTLIER = 3.0
#: Steps that tell the spread.
RATIOS = 200
#: What is taken for the spread until that many steps are known, and its bounds.
SPREAD_UNKNOWN, SPREAD_LEAST, SPREAD_MOST = 1.1, 1.1, 10.0
KNOWN_RATIOS = 20
#: What a rehearsed step tells counts as so many real ones: the first of these may be disturbed.
REHEARSALS = 3
#: How many times as long a real step takes: it waits for its core, which others use as well, and
#: stores where nothing was stored lately. Measured: 1.05 for the rows of four streams, 1.2 to 1.7
#: for chunks of a prompt. What real steps show takes the place of it.
REALITY = 1.3
#: From so many real steps of its cell on it is told by how much a step was longer than usual.
USUAL_FROM = 4
#: A step that had borrowed cores for this share of its time is one with them, and one that had none
#: for it one without.
MOSTLY = 0.9
#: With as many cores borrowed as there are own ones a step takes half the time at best.
UNSEEN = 2.0
#: Longer steps (some hours), and slower attention (a second a token), are told as this: no worker
#: lives to see them, and whoever reads a curve may rely on it.
MICROS_MAX = 10**10
PICOS_MAX = 10**12

_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Micros = Annotated[int, Meta(ge=1, le=MICROS_MAX)]


class StepCurve(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has learned of its steps; empty: nothing yet."""

    tokens: Annotated[tuple[_Tokens, ...], Meta(max_length=CELLS)] = ()
    """Tokens of a step, ascending."""
    micros: Annotated[tuple[_Micros, ...], Meta(max_length=CELLS)] = ()
    """How long such a step takes beside its attention, never descending."""
    pair_picos: Annotated[int, Meta(ge=0, le=PICOS_MAX)] = 0
    """For each pair of a prompt's token and one it attends to, in 10**-12 s."""
    context_picos: Annotated[int, Meta(ge=0, le=PICOS_MAX)] = 0
    """For each token of context that a row of one token reads, in 10**-12 s."""
    spread_percent: Annotated[int, Meta(ge=0, le=round(100 * SPREAD_MOST))] = 0
    """How long the longest steps take, in percent of what such steps usually do; 0: not known."""

    @property
    def spread(self) -> float:
        """Return how many times as long as planned some steps take."""
        return max(SPREAD_LEAST, self.spread_percent / 100 or SPREAD_UNKNOWN)

    def verify(self) -> None:
        """Look at a curve that somebody else made: everything else here divides by it.

        Raises:
            ValueError: it is none.
        """
        if len(self.tokens) != len(self.micros):
            raise ValueError(f"{len(self.tokens)} token counts with {len(self.micros)} times")
        if any(low >= high for low, high in pairwise(self.tokens)):
            raise ValueError("the token counts of a step curve do not ascend")
        if any(low > high for low, high in pairwise(self.micros)):
            raise ValueError("the times of a step curve descend")

    def seconds(self, tokens: float, context: float = 0.0, pairs: float = 0.0) -> float:
        """Return how long a step takes whose rows of one token read ``context`` tokens in all, and
        whose prompts make ``pairs``; outside of what was seen in proportion, at least as long as
        the shortest step that was seen."""
        return self._base(tokens) * 1e-6 + self._attention(context, pairs)

    def _attention(self, context: float, pairs: float) -> float:
        return (context * self.context_picos + pairs * self.pair_picos) * 1e-12

    def _base(self, tokens: float) -> float:
        xs, ys = self.tokens, self.micros
        if not xs or tokens <= xs[0]:
            return float(ys[0]) if ys else 0.0
        at = bisect_left(xs, tokens)
        if at < len(xs):
            x, y = xs[at - 1], ys[at - 1]
            return y + (tokens - x) * (ys[at] - y) / (xs[at] - x)
        x, y = xs[-1], ys[-1]
        if len(xs) == 1:
            return y * tokens / x
        # Between the slope of the last two and that of the ray through the origin, since a step of
        # few tokens says little about the slope: the steeper one.
        slope = max((y - ys[-2]) / (x - xs[-2]), y / x if x < 16 else 0.0)
        return y + (tokens - x) * slope

    def extended(self, other: StepCurve) -> StepCurve:
        """Return this curve, and beyond what was seen here that of ``other``, a worker with the
        same model: better than a guess from short steps."""
        last = self.tokens[-1] if self.tokens else 0
        more = [pair for pair in zip(other.tokens, other.micros, strict=True) if pair[0] > last]
        if not more:
            return self
        low = self.micros[-1] if self.micros else 0
        return StepCurve(
            (*self.tokens, *(tokens for tokens, _ in more)),
            (*self.micros, *(max(low, micros) for _, micros in more)),
            self.pair_picos or other.pair_picos,
            self.context_picos or other.context_picos,
            self.spread_percent,
        )

    def completed(self, other: StepCurve, factor: float) -> StepCurve:
        """Return this curve, and where nothing was seen here ``factor`` times ``other``: below the
        first token count, above the last one."""
        if not other.tokens:
            return self
        low, high = (self.tokens[0], self.tokens[-1]) if self.tokens else (0, 0)
        points = [
            (tokens, min(MICROS_MAX, max(1, round(factor * micros))))
            for tokens, micros in zip(other.tokens, other.micros, strict=True)
        ]
        before = [(n, min(us, self.micros[0])) for n, us in points if n < low]
        after = [(n, max(us, (self.micros or (0,))[-1])) for n, us in points if n > high]
        whole = [*before, *zip(self.tokens, self.micros, strict=True), *after]
        tokens, micros = zip(*whole[:CELLS], strict=True)
        return StepCurve(
            tuple(tokens),
            tuple(micros),
            self.pair_picos or min(PICOS_MAX, round(factor * other.pair_picos)),
            self.context_picos or min(PICOS_MAX, round(factor * other.context_picos)),
            self.spread_percent,
        )

    def prompt_seconds(
        self, begin: int, end: int, chunk: int, rows: int = 0, context: int = 0
    ) -> float:
        """Return how long it takes to compute tokens ``begin`` to ``end`` of a prompt in chunks,
        in steps with ``rows`` more tokens that attend to ``context`` tokens in all."""
        count = max(0, end - begin)
        full, rest = divmod(count, max(1, chunk))
        steps = full + (rest > 0)
        seconds = full * self.seconds(rows + chunk)
        if rest:
            seconds += self.seconds(rows + rest)
        pairs = (end * end - begin * begin) / 2 if count else 0.0
        return seconds + self._attention(steps * context, pairs)

    def chunk_within(
        self, limit_s: float, begin: int, *, most: int, unit: int, rows: int = 0, context: int = 0
    ) -> int:
        """Return the longest chunk, in whole ``unit`` tokens and at most ``most``, whose step with
        ``rows`` more tokens takes no longer than ``limit_s``; at least one unit."""
        low, high = 1, max(1, most // unit)
        while low < high:
            middle = (low + high + 1) // 2
            tokens = middle * unit
            if self.seconds(rows + tokens, context, pairs_of(begin, tokens)) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low * unit


@dataclass(frozen=True, slots=True)
class Step:
    """What an engine step was made of."""

    tokens: int
    context: float
    """Tokens that its rows of one token read, all together."""
    pairs: float
    """Of its prompts' tokens and those that each of them attends to."""

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int]]) -> Step:
        """``rows``: where each one begins, and how many tokens it has."""
        tokens, context, pairs = 0, 0.0, 0.0
        for start, count in rows:
            tokens += count
            if count == 1:
                context += start
            else:
                pairs += pairs_of(start, count)
        return cls(tokens, context, pairs)


#: Steps of one thread before the first request, and what each of them took, in s.
Rehearsed = tuple[tuple[Step, float], ...]


@dataclass(slots=True)
class _Cell:
    """Steps of similar token counts: moving means, and how time goes with attention within them."""

    count: int = 0
    tokens: float = 0.0
    means: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of context, pairs and seconds."""
    squares: list[float] = field(default_factory=lambda: [0.0] * 6)
    """Their variances and covariances: cc, cp, cs, pp, ps, ss."""

    def learn(self, step: Step, seconds: float) -> None:
        self.count = min(self.count + 1, MEMORY)
        if self.count > 3:
            seconds = min(seconds, OUTLIER * self.means[2])
        weight = 1 / self.count
        self.tokens += weight * (step.tokens - self.tokens)
        c, p, s = (
            new - old
            for new, old in zip((step.context, step.pairs, seconds), self.means, strict=True)
        )
        for at, product in enumerate((c * c, c * p, c * s, p * p, p * s, s * s)):
            self.squares[at] += weight * ((1 - weight) * product - self.squares[at])
        context, pairs, mean = self.means
        self.means = (context + weight * c, pairs + weight * p, mean + weight * s)


@dataclass(slots=True)
class StepTimes:
    """What one worker learns of its own steps. At most ``CELLS`` cells."""

    cells: dict[int, _Cell] = field(default_factory=dict)
    rehearsed: StepCurve = field(default_factory=StepCurve)
    """What steps took before the first request: how their time goes with their tokens. How long
    they really take, in proportion, is learned."""
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=RATIOS))
    """Of the last steps, each to the mean of its cell."""

    def learn(self, step: Step, seconds: float) -> None:
        """``step`` took ``seconds``."""
        if step.tokens < 1 or seconds <= 0:
            return
        self.cells.setdefault(_cell_of(step.tokens), _Cell()).learn(step, seconds)

    def compare(self, step: Step, seconds: float) -> None:
        """``step`` was one of these, or was to be one: see how much longer it took."""
        cell = self.cells.get(_cell_of(step.tokens)) if step.tokens > 0 else None
        if cell is not None and cell.count >= USUAL_FROM and seconds > 0:
            self.ratios.append(seconds / cell.means[2])

    def curve(self) -> StepCurve:
        """Return what was learned."""
        cells = [self.cells[number] for number in sorted(self.cells)]
        of_context, of_pairs = _slopes(cells)
        taken = [of_context * cell.means[0] + of_pairs * cell.means[1] for cell in cells]
        # No share of attention may take more than the whole step.
        most = [cell.means[2] / each for cell, each in zip(cells, taken, strict=True) if each > 0]
        part = min([1.0, *most])
        bases = [
            (cell.count, cell.means[2] - part * each)
            for cell, each in zip(cells, taken, strict=True)
        ]
        reality = 0.0
        if self.rehearsed.tokens:
            shape = [self.rehearsed.seconds(cell.tokens) for cell in cells]
            # As of a cell that has some, a step among the first ones counts as so much at most.
            bases = [
                (n, base if n >= USUAL_FROM else min(base, OUTLIER * REALITY * each))
                for (n, base), each in zip(bases, shape, strict=True)
            ]
            reality = _reality(bases, shape)
            bases = [
                (
                    count + REHEARSALS,
                    (count * base + REHEARSALS * reality * each) / (count + REHEARSALS),
                )
                for (count, base), each in zip(bases, shape, strict=True)
            ]
        micros = tuple(min(MICROS_MAX, max(1, round(base * 1e6))) for base in _ascending(bases))
        tokens = tuple(round(cell.tokens) for cell in cells)
        curve = StepCurve(
            tokens,
            micros,
            min(PICOS_MAX, round(part * of_pairs * 1e12)),
            min(PICOS_MAX, round(part * of_context * 1e12)),
            self._spread_percent(),
        )
        return curve.completed(self.rehearsed, reality) if reality else curve

    def _spread_percent(self) -> int:
        if len(self.ratios) < KNOWN_RATIOS:
            return 0
        longest = nlargest(1 + len(self.ratios) // ONE_OF, self.ratios)[-1]
        return round(100 * min(max(longest, SPREAD_LEAST), SPREAD_MOST))


@dataclass(slots=True)
class SharedStepTimes:
    """What a worker learns that sometimes borrows cores: its steps alone, and those with them.

    Each of the two is completed from the other one where only that has been seen, by how many times
    as long a step alone takes where both have. Before both have been seen anywhere the worst is
    assumed: alone ``UNSEEN`` times as long as with borrowed cores, with them no shorter than alone.
    """

    alone: StepTimes = field(default_factory=StepTimes)
    helped: StepTimes = field(default_factory=StepTimes)

    def learn(self, step: Step, seconds: float, borrowed: float = 0.0) -> None:
        """See :meth:`StepTimes.learn`; cores were borrowed for this share of the step. A step that
        was neither one nor the other for nearly all of its time says nothing of either's usual
        time; but it is one that was to have them."""
        (self.alone if 1 - borrowed >= MOSTLY else self.helped).compare(step, seconds)
        if borrowed >= MOSTLY:
            self.helped.learn(step, seconds)
        elif 1 - borrowed >= MOSTLY:
            self.alone.learn(step, seconds)

    def rehearsed(self, steps: Rehearsed) -> None:
        """Nothing was borrowed for these ``steps`` and the seconds each of them took."""
        times = StepTimes()
        for step, seconds in steps:
            times.learn(step, seconds)
        self.alone.rehearsed = times.curve()

    def borrowing_pays(self, tokens: int, context: float, limit_s: float) -> bool:
        """Return whether the longest steps of so many rows keep within ``limit_s`` with borrowed
        cores, or at least as well as without."""
        alone, helped = (
            curve.seconds(tokens, context) * curve.spread
            for curve in (self.curve(), self.curve_borrowed())
        )
        return helped <= max(alone, limit_s)

    def forget_borrowed(self) -> None:
        """Take nothing of how unevenly steps with borrowed cores went for what it is now."""
        self.helped.ratios.clear()

    def curve(self) -> StepCurve:
        """Return how long steps take without borrowed cores."""
        alone, helped = self.alone.curve(), self.helped.curve()
        return alone.completed(helped, _ratio(alone, helped) or UNSEEN)

    def curve_borrowed(self) -> StepCurve:
        """Return how long steps take with borrowed cores; empty: it has never had any."""
        alone, helped = self.alone.curve(), self.helped.curve()
        if not helped.tokens:
            return helped
        return helped.completed(alone, 1 / (_ratio(alone, helped) or 1.0))


def _reality(bases: Iterable[tuple[int, float]], shape: Iterable[float]) -> float:
    """Return how many times as long as rehearsed real steps take; ``bases``: how many there were of
    each cell and their mean, ``shape``: what was rehearsed."""
    seen, weight = REHEARSALS * REALITY, float(REHEARSALS)
    for (count, base), each in zip(bases, shape, strict=True):
        seen += count * min(OUTLIER, base / each)
        weight += count
    return seen / weight


def _ratio(alone: StepCurve, helped: StepCurve) -> float:
    """Return how many times as long a step takes alone, in the middle of the token counts at which
    both curves have been seen; 0: there are none."""
    low = max(alone.tokens[0], helped.tokens[0]) if alone.tokens and helped.tokens else 1
    high = min(alone.tokens[-1], helped.tokens[-1]) if alone.tokens and helped.tokens else 0
    counts = sorted({n for n in (*alone.tokens, *helped.tokens) if low <= n <= high})
    ratios = sorted(alone.seconds(n) / helped.seconds(n) for n in counts)
    return max(1.0, ratios[len(ratios) // 2]) if ratios else 0.0


def chunk_beside(
    slo: Slo,
    alone: StepCurve,
    now: StepCurve,
    begin: int,
    *,
    most: int,
    unit: int,
    rows: int,
    context: int,
) -> int:
    """Return how many tokens of a prompt, from ``begin`` on, go into a step with ``rows`` running
    sequences that attend to ``context`` tokens: the longest chunk that keeps the SLO as the worker
    is ``now``, and nearly keeps it should it be ``alone`` suddenly. At least one ``unit``."""
    calm_s = now.seconds(rows, context) if rows else 0.0
    limit_s = slo.step_s(calm_s, now.spread)
    found = now.chunk_within(limit_s, begin, most=most, unit=unit, rows=rows, context=context)
    if alone is now or slo.broken(calm_s):
        return found
    return alone.chunk_within(slo.itl_s, begin, most=found, unit=unit, rows=rows, context=context)


def pairs_of(start: int, tokens: int) -> float:
    """Return how many pairs ``tokens`` tokens from position ``start`` on attend to."""
    return tokens * (start + tokens / 2)


def _slopes(cells: Iterable[_Cell]) -> tuple[float, float]:
    """Return how many seconds a token of context and a pair take: the line that is nearest to all
    steps (least squares), each cell with a base of its own. Neither is negative, and each is drawn
    towards none by as much as chance may have made of it (James and Stein, positive part)."""
    cells = list(cells)
    free = sum(cell.count - 1 for cell in cells) - 2
    cc, cp, cs, pp, ps, ss = (
        sum(cell.count * cell.squares[at] for cell in cells) for at in range(6)
    )
    both = cc * pp - cp * cp
    if free < 1 or ss <= 0:
        return 0.0, 0.0
    found = (0.0, 0.0)
    left = (0.0, 0.0)
    if both > 1e-6 * cc * pp:
        found = ((cs * pp - ps * cp) / both, (ps * cc - cs * cp) / both)
        left = both / pp, both / cc
    if min(found) <= 0.0:
        # One of them alone, the one that says more.
        alone = [max(0.0, with_s) / own if own > 0 else 0.0 for own, with_s in ((cc, cs), (pp, ps))]
        context_says = alone[0] * cs >= alone[1] * ps
        found = (alone[0], 0.0) if context_says else (0.0, alone[1])
        left = cc, pp
    rest = max(0.0, ss - found[0] * cs - found[1] * ps) / free
    context, pairs = (
        slope * max(0.0, 1 - rest / (slope * slope * own)) if slope > 0 else 0.0
        for slope, own in zip(found, left, strict=True)
    )
    return context, pairs


def _cell_of(tokens: int) -> int:
    octave = tokens.bit_length() - 1
    upper = 2 * tokens >= 3 << octave
    return min(2 * octave + upper, CELLS - 1)


def _ascending(weighted: Iterable[tuple[int, float]]) -> list[float]:
    """Return the nearest values that never descend (pool adjacent violators): more tokens do not
    take less time, whatever chance says."""
    pools: list[tuple[int, float, int]] = []
    for weight, value in weighted:
        pools.append((weight, value, 1))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            (w1, v1, n1), (w2, v2, n2) = pools[-2:]
            pools[-2:] = [(w1 + w2, (w1 * v1 + w2 * v2) / (w1 + w2), n1 + n2)]
    values = [value for _, value, count in pools for _ in range(count)]
    assert all(low <= high for low, high in pairwise(values))
    return values
