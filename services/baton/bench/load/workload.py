"""What is asked: sessions of one or more turns, from a trace or of fixed lengths.

Decides lengths, contents and order; a seed repeats all three, a *salt* the contents alone. Contents
are random ids that no cache has seen before (with a new salt), except where the trace itself says
that two prompts begin alike. Rows without such names never share anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

import numpy as np
from numpy.random import Generator, default_rng

from baton.bench.figures import quantile
from baton.bench.load import arrivals, traces
from baton.bench.load.arrivals import Arrivals
from baton.bench.load.traces import MOONCAKE_BLOCK_TOKENS, Row


class WorkloadName(StrEnum):
    """The workloads there are."""

    FIXED = "fixed"
    AZURE_CODE = "azure-code"
    AZURE_CONV = "azure-conv"
    MOONCAKE = "mooncake"
    SERVEGEN = "servegen"
    SHAREGPT = "sharegpt"


#: Streams of chance that must not depend on each other: more lengths drawn, same arrivals.
_ARRIVALS, _LENGTHS, _THINKING, _CONTENTS, _SHARED = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadPlan:
    """What decides a workload; all of it stands in the result."""

    name: WorkloadName = WorkloadName.FIXED
    seed: int = 0
    salt: int = 0
    """Of the contents: another salt, other texts."""
    prompt_tokens: int = 512
    """Of ``fixed``."""
    output_tokens: int = 128
    """Of ``fixed``."""
    prompt_scale: float = 1.0
    """Prompts of a trace are so many times as long."""
    output_scale: float = 1.0
    prompt_max: int = 1_000_000
    """Longer ones are cut to it, and counted."""
    output_max: int = 1_000_000
    context_max: int = 1_000_000
    """Prompt and output together; a longer prompt is cut from its end, and counted."""
    think_s: float = 1.0
    """Mean pause (exponential) before a conversation's next turn."""
    ids: tuple[int, int] = (300, 4_000)
    """Range of the token ids of contents: ordinary words, no special ids."""
    intruder_tokens: int = 0
    """0: none. Else prompts so long come in between, each asking for one token."""
    intruder_every_s: float = 6.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    new_ids: list[int]
    """What is asked in this turn; the prompt is everything before it, and this."""
    output_tokens: int
    think_s: float = 0.0
    """Pause before it, after the answer before."""


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that one client takes one after the other; most have one."""

    number: int
    at_s: float
    """When it begins, after the run's start. In a closed loop: as soon as a client is free."""
    turns: tuple[Turn, ...]
    intruder: bool = False


@dataclass(slots=True)
class Told:
    """What happened while the lengths were fitted to the server; part of the result."""

    sessions: int = 0
    clipped: int = 0
    laps: int = 1
    """How often the trace was gone through; more than once says that it was too short."""


@dataclass(slots=True)
class Workload:
    """Sessions, endlessly, in the order of their arrival."""

    plan: WorkloadPlan
    kind: Arrivals
    rate: float | None
    burstiness: float = 1.0
    told: Told = field(default_factory=Told)
    _rows: Sequence[Row] = ()
    _conversations: Sequence[Sequence[tuple[int, int]]] = ()

    def __post_init__(self) -> None:
        match self.plan.name:
            case WorkloadName.AZURE_CODE:
                self._rows = traces.azure("code")
            case WorkloadName.AZURE_CONV:
                self._rows = traces.azure("conv")
            case WorkloadName.MOONCAKE:
                self._rows = traces.mooncake()
            case WorkloadName.SHAREGPT:
                self._conversations = traces.sharegpt()
            case _:
                pass
        if self.kind is Arrivals.TRACE and not self.has_times:
            raise ValueError(f"{self.plan.name} has no arrival times of its own")

    @property
    def has_times(self) -> bool:
        """Whether the trace knows when its requests came."""
        return bool(self._rows) or self.plan.name is WorkloadName.SERVEGEN

    def stretch(self) -> float:
        """Return by how much the trace's own time is stretched (1: as it was)."""
        if self.kind is not Arrivals.TRACE:
            return 1.0
        if self.plan.name is WorkloadName.SERVEGEN:
            return arrivals.window_stretch(traces.servegen()[0], self.rate)
        return arrivals.stretch([row.at_s for row in self._rows], self.rate)

    def sessions(self) -> Iterator[Session]:
        """Yield the sessions; intruders stand in between, at their times."""
        times = self._times()
        every, number = self.plan.intruder_every_s, 0
        intrude_at = every if self.plan.intruder_tokens else float("inf")
        for turns in self._lengths():
            at_s = next(times)
            while intrude_at <= at_s:
                number += 1
                yield self._intruder(number, intrude_at)
                intrude_at += every
            self.told.sessions += 1
            yield Session(self.told.sessions, at_s, turns)

    def long_prompt(self) -> int:
        """Return the tokens from which a prompt of this workload counts as an intruding one."""
        if self.plan.intruder_tokens:
            return self.plan.intruder_tokens
        sample = [row.prompt_tokens * self.plan.prompt_scale for row in self._rows]
        if not sample:
            return 1_000_000
        return max(256, int(quantile([min(x, self.plan.prompt_max) for x in sample], 0.95)))

    # --- times ----------------------------------------------------------------------------------

    def _times(self) -> Iterator[float]:
        chance = self._chance(_ARRIVALS)
        match self.kind:
            case Arrivals.CLOSED:
                return (0.0 for _ in count())
            case Arrivals.POISSON:
                return arrivals.gamma_times(self.rate or 1.0, 1.0, chance)
            case Arrivals.GAMMA:
                return arrivals.gamma_times(self.rate or 1.0, self.burstiness, chance)
            case Arrivals.TRACE:
                if self.plan.name is WorkloadName.SERVEGEN:
                    windows, _, _ = traces.servegen()
                    return arrivals.window_times(windows, self.plan.seed, self.rate, chance)
                return arrivals.trace_times([row.at_s for row in self._rows], self.rate)

    # --- lengths and contents -------------------------------------------------------------------

    def _lengths(self) -> Iterator[tuple[Turn, ...]]:
        match self.plan.name:
            case WorkloadName.FIXED:
                prompt, output = self.plan.prompt_tokens, self.plan.output_tokens
                for number in count(1):
                    yield (self._turn(number, 0, prompt, output),)
            case WorkloadName.SERVEGEN:
                yield from self._servegen()
            case WorkloadName.SHAREGPT:
                yield from self._conversing()
            case _:
                for number in count():
                    lap, place = divmod(number, len(self._rows))
                    self.told.laps = lap + 1
                    yield (self._of_row(lap, number + 1, self._rows[place]),)

    def _of_row(self, lap: int, number: int, row: Row) -> Turn:
        prompt = max(1, round(row.prompt_tokens * self.plan.prompt_scale))
        output = max(1, round(row.output_tokens * self.plan.output_scale))
        if not row.blocks:
            return self._turn(number, 0, prompt, output)
        prompt, output = self._fit(prompt, output)
        # A name stands for 512 tokens of the source; scaled prompts have scaled blocks.
        size = max(1, round(MOONCAKE_BLOCK_TOKENS * self.plan.prompt_scale))
        ids: list[int] = []
        for name in row.blocks:
            if len(ids) >= prompt:
                break
            ids += self._contents(size, _SHARED, lap, name)
        ids += self._contents(max(0, prompt - len(ids)), _CONTENTS, number, 0)
        return Turn(ids[:prompt], output)

    def _servegen(self) -> Iterator[tuple[Turn, ...]]:
        _, prompts, outputs = traces.servegen()
        chance = self._chance(_LENGTHS)
        for number in count(1):
            prompt = prompts[int(chance.integers(len(prompts)))] * self.plan.prompt_scale
            output = outputs[int(chance.integers(len(outputs)))] * self.plan.output_scale
            yield (self._turn(number, 0, max(1, round(prompt)), max(1, round(output))),)

    def _conversing(self) -> Iterator[tuple[Turn, ...]]:
        thinking = self._chance(_THINKING)
        for number in count():
            lap, place = divmod(number, len(self._conversations))
            self.told.laps = lap + 1
            turns: list[Turn] = []
            before = 0
            for asked, answered in self._conversations[place]:
                asked = max(1, round(asked * self.plan.prompt_scale))
                answered = max(1, round(answered * self.plan.output_scale))
                asked, answered = (
                    min(asked, self.plan.prompt_max),
                    min(answered, self.plan.output_max),
                )
                if turns and before + asked + answered > self.plan.context_max:
                    self.told.clipped += 1
                    break
                think_s = float(thinking.exponential(self.plan.think_s)) if turns else 0.0
                if not turns:
                    asked, answered = self._fit(asked, answered)
                ids = self._contents(asked, _CONTENTS, number + 1, len(turns))
                turns.append(Turn(ids, answered, think_s))
                before += asked + answered
            yield tuple(turns)

    def _turn(self, number: int, turn: int, prompt: int, output: int) -> Turn:
        prompt, output = self._fit(prompt, output)
        return Turn(self._contents(prompt, _CONTENTS, number, turn), output)

    def _intruder(self, number: int, at_s: float) -> Session:
        prompt, _ = self._fit(self.plan.intruder_tokens, 1)
        ids = self._contents(prompt, _CONTENTS, number, 1_000_000)
        return Session(-number, at_s, (Turn(ids, 1),), intruder=True)

    def _fit(self, prompt: int, output: int) -> tuple[int, int]:
        """Cut what the server could not take, and count it."""
        asked = (prompt, output)
        output = min(output, self.plan.output_max, self.plan.context_max - 1)
        prompt = min(prompt, self.plan.prompt_max, self.plan.context_max - output)
        self.told.clipped += asked != (prompt, output)
        return prompt, output

    def _contents(self, length: int, *stream: int) -> list[int]:
        low, high = self.plan.ids
        chance = default_rng((self.plan.salt, *stream))
        found: list[int] = chance.integers(low, high, length, dtype=np.int64).tolist()
        return found

    def _chance(self, stream: int) -> Generator:
        return default_rng((self.plan.seed, stream))
