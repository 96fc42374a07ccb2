"""What a request would take, and what it would cost others, on one way: one decode worker, and a
prefill worker or none.

Decides how the figures that workers tell are put together, and what of that counts as lost; which
way is taken is decided in ``choice.py``. No estimate is ever a promise: decode's own reservation
has the last word, and its own schedule keeps the steps short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from baton.core.ids import Peer
from baton.core.slo import Slo
from baton.core.step_times import StepCurve, chunk_beside, pairs_of
from baton.router.workers import WorkerView

#: A second by which running streams are delayed within their SLO, against one of waiting.
DELAY_WEIGHT = 0.25
#: Prompts of so much time may wait at a worker: it never runs dry, and what waits at the router
#: instead may still go another way.
AHEAD_S = 0.25


@dataclass(frozen=True, slots=True)
class Need:
    """What has to be computed for a request, on one decode worker."""

    tokens: int
    cached: int
    """Leading tokens whose KV is there; the last one is always computed."""
    waited_s: float
    """Since its router has it."""

    @property
    def rest(self) -> int:
        return self.tokens - self.cached


@dataclass(frozen=True, slots=True)
class Speed:
    """How long a worker's steps take."""

    alone: StepCurve
    """With its own cores."""
    now: StepCurve
    """As it is now: if those whose cores it borrows compute nothing, with these."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One way, and what is expected of it."""

    decode: Peer
    prefill: Peer | None
    """``None``: decode computes the prompt in chunks."""
    ready: bool
    """Whether it may start now; else it is a way to wait for."""
    raw_s: float
    """From now to the first token, by the workers' figures alone."""
    ttft_s: float
    """From the request's arrival to its first token, as experience corrects that."""
    step_s: float
    """Longest step that the running streams see meanwhile."""
    delay_s: float
    """By which the running streams are delayed, all together."""
    late: bool
    """Its own first token would come too late."""
    stalled: int
    """Running streams whose tokens would come too far apart while the prompt is computed."""
    crowded: int
    """Running streams whose tokens would come too far apart because there is one more."""
    risked: float
    """Running streams that some step, longer than usual, will make such while the prompt is
    computed: so many on average."""
    cost_s: float
    """What its own time, that of others and what is risked come to."""

    @property
    def lost(self) -> int:
        """Requests that would not be good any more."""
        return self.late + self.stalled + self.crowded

    @property
    def kind(self) -> str:
        return "local" if self.prefill is None else "remote"

    def words(self) -> str:
        """For people."""
        who = self.decode.worker_id
        if self.prefill is not None:
            who = f"{self.prefill.worker_id} for {who}"
        text = f"{who} {self.ttft_s * 1e3:.0f} ms"
        if self.delay_s >= 0.001:
            text += f", delays others by {self.delay_s * 1e3:.0f} ms"
        if self.risked >= 0.05:
            text += f", risks {self.risked:.1f} others"
        if self.lost:
            text += f", loses {self.lost}"
        return text if self.ready else f"{text}, once there is room"


#: Slopes that a line may have.
SLOPES = (1.0, 0.9, 1.1, 0.8, 1.25, 0.7, 1.4, 0.6, 1.6, 0.5, 1.8, 2.0, 2.5, 3.0)


class Line:
    """What first tokens really took against what was expected: the line from which the last
    outcomes are the least away, each by its share of what it was (least absolute errors). One that
    something else has disturbed moves it no more than any other does, and that there is nothing to
    correct counts as much as some outcomes."""

    #: The last so many requests count: a machine's speed changes with what else it does.
    MEMORY = 24
    #: Until there are so many, the last ones of other ways fill their places: what slows one way
    #: mostly slows all.
    ENOUGH = 12
    #: So many outcomes stand for figures that are right as they are.
    BELIEF = 3.0
    #: What is expected beyond a day is not expected: nothing is learned from it but that.
    EXPECTED_MAX_S = 86_400.0

    def __init__(self) -> None:
        self._outcomes: deque[tuple[float, float]] = deque(maxlen=self.MEMORY)
        self._others: deque[tuple[float, float]] = deque(maxlen=self.ENOUGH)
        self._more_s, self._slope = 0.0, 1.0

    @property
    def count(self) -> int:
        """Return how many outcomes are remembered."""
        return len(self._outcomes)

    def learn(self, expected_s: float, actual_s: float) -> None:
        """``expected_s`` by the workers' figures, ``actual_s`` in truth."""
        self._outcomes.append(self._bounded(expected_s, actual_s))
        self._draw()

    def learn_other(self, expected_s: float, actual_s: float) -> None:
        """The same of a request that went another way."""
        if len(self._outcomes) < self.ENOUGH:
            self._others.append(self._bounded(expected_s, actual_s))
            self._draw()

    def _bounded(self, *seconds: float) -> tuple[float, float]:
        expected_s, actual_s = (min(max(each, 0.001), self.EXPECTED_MAX_S) for each in seconds)
        return expected_s, actual_s

    def _draw(self) -> None:
        missing = max(0, self.ENOUGH - len(self._outcomes))
        filled = list(self._others)[-missing:] if missing else []
        outcomes, best = [*filled, *self._outcomes], float("inf")
        for slope in SLOPES:
            more_s, wrong = self._through(slope, outcomes)
            if wrong < best:
                best, self._more_s, self._slope = wrong, more_s, slope

    def corrected(self, expected_s: float) -> float:
        """Return what ``expected_s`` will really be. Without evidence of the contrary what is more
        does not depend on the length."""
        return max(0.25 * expected_s, self._more_s + self._slope * expected_s)

    def _through(
        self, slope: float, outcomes: Sequence[tuple[float, float]]
    ) -> tuple[float, float]:
        """Return what every request takes more if this is the slope, and how wrong that is."""
        rests = [(actual - slope * expected, 1 / actual) for expected, actual in outcomes]
        whole = sum(weight for _, weight in rests)
        believed = self.BELIEF * whole / len(rests)
        rests.append((0.0, believed))
        rests.sort()
        below = accumulate(weight for _, weight in rests)
        half = (whole + believed) / 2
        more_s = next(
            rest for (rest, _), weight in zip(rests, below, strict=True) if weight >= half
        )
        wrong = sum(weight * abs(rest - more_s) for rest, weight in rests)
        return more_s, wrong + self.BELIEF * abs(slope - 1.0)


class Estimator:
    """Puts estimates together; keeps what was learned from outcomes, a few numbers."""

    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.lines = {"local": Line(), "remote": Line()}

    def local(self, view: WorkerView, speed: Speed, need: Need, ahead: int) -> Estimate:
        """Decode computes the prompt, in chunks beside its streams; ``ahead`` prompts of a chunk's
        length may wait there."""
        status, curve = view.status, speed.now
        rows, context = status.running, status.context_tokens
        middle = (need.cached + need.tokens) // 2
        calm = curve.seconds(rows, context) if rows else 0.0
        chunk = self.local_chunk(view, speed, middle)
        queued = status.queued_tokens + view.placed_tokens
        queued_s = curve.prompt_seconds(0, queued, chunk, rows, context)
        raw = calm / 2 + queued_s
        raw += curve.prompt_seconds(need.cached, need.tokens, chunk, rows, context)
        once = min(chunk, need.rest)
        pairs = pairs_of(middle, once)
        step = curve.seconds(rows + once, context, pairs)
        steps = -(-need.rest // chunk)
        # The cores may be wanted back at any time.
        borne = self.slo.keeps(step, curve.spread) and not self.slo.broken(
            speed.alone.seconds(rows + once, context, pairs)
        )
        streams = 0 if self.slo.broken(calm) else rows + view.joining
        kept = (1 - self.slo.risk(step, curve.spread)) ** steps
        return self._estimate(
            view,
            None,
            need,
            speed,
            raw_s=raw,
            step_s=step,
            delay_s=rows * max(0.0, step - calm) * steps,
            stalled=0 if borne else streams,
            risked=streams * (1 - kept) if borne else 0.0,
            ready=queued == 0 or (queued_s < AHEAD_S and queued < ahead * status.chunk_tokens),
        )

    def local_chunk(self, view: WorkerView, speed: Speed, begin: int) -> int:
        """Return how many tokens of a prompt, from ``begin`` on, decode will put into a step."""
        status = view.status
        most = max(1, status.block_size, status.chunk_tokens)
        if not status.running and not view.joining:
            return most
        return chunk_beside(
            self.slo,
            speed.alone,
            speed.now,
            begin,
            most=most,
            unit=max(1, status.block_size),
            rows=status.running,
            context=status.context_tokens,
        )

    def remote(
        self,
        view: WorkerView,
        prefill: WorkerView,
        speeds: tuple[Speed, Speed],
        need: Need,
        *,
        ahead: int,
        promised: int,
    ) -> Estimate:
        """``prefill`` computes the prompt into decode's arena; ``speeds`` are decode's and its,
        ``promised`` tokens wait here for it before this request."""
        status = prefill.status
        speed, prefill_curve = speeds[0], speeds[1].now
        chunk = max(1, status.chunk_tokens or status.block_size)
        jobs = status.waiting + prefill.placed
        queued = status.queued_tokens + prefill.placed_tokens + promised
        each = queued // max(1, jobs)
        queued_s = max(1, jobs) * prefill_curve.prompt_seconds(0, each, chunk)
        own_s = prefill_curve.prompt_seconds(need.cached, need.tokens, chunk)
        rows, context = view.status.running, view.status.context_tokens
        # Decode has its own cores again meanwhile.
        calm, alone = speed.now.seconds(rows, context), speed.alone.seconds(rows, context)
        slower = max(0.0, 1 - calm / alone) if rows and alone else 0.0
        return self._estimate(
            view,
            prefill,
            need,
            speed,
            # The first token goes out with those of the step in flight.
            raw_s=queued_s + own_s + view.status.handover_us * 1e-6 + (alone / 2 if rows else 0.0),
            step_s=speed.alone.seconds(rows + 1, context + need.tokens),
            delay_s=rows * slower * own_s,
            stalled=0,
            risked=0.0,
            ready=jobs < ahead and (jobs < 2 or queued_s < AHEAD_S),
        )

    def learn(self, kind: str, raw_s: float, actual_s: float) -> None:
        """The first token came ``actual_s`` after the request was placed."""
        for each, line in self.lines.items():
            if each == kind:
                line.learn(raw_s, actual_s)
            else:
                line.learn_other(raw_s, actual_s)

    def _estimate(
        self,
        view: WorkerView,
        prefill: WorkerView | None,
        need: Need,
        speed: Speed,
        *,
        raw_s: float,
        step_s: float,
        delay_s: float,
        stalled: int,
        risked: float,
        ready: bool,
    ) -> Estimate:
        slo, status, curve = self.slo, view.status, speed.alone
        kind = "local" if prefill is None else "remote"
        ttft_s = need.waited_s + self.lines[kind].corrected(raw_s)
        # What is on its way there will be a row as well.
        context, held = status.context_tokens, status.running + status.waiting + view.placed
        before = curve.seconds(held, context) if held else 0.0
        after = curve.seconds(held + 1, context + need.tokens)
        crowded = held if held and before <= slo.itl_s < after else 0
        return Estimate(
            decode=view.peer,
            prefill=None if prefill is None else prefill.peer,
            ready=ready,
            raw_s=raw_s,
            ttft_s=ttft_s,
            step_s=step_s,
            delay_s=delay_s,
            late=ttft_s > slo.ttft_s,
            stalled=stalled,
            crowded=crowded,
            risked=risked,
            cost_s=ttft_s + DELAY_WEIGHT * delay_s + slo.ttft_s * risked,
        )
