"""Results of `baton bench` for tests: made from answers that never came over a wire."""

from __future__ import annotations

import msgspec

from baton.bench.load import reckoning
from baton.bench.load.answer import Answer
from baton.bench.load.generator import Asked, Measured
from baton.bench.load.results import Conditions, Cost, Figures, Result, Run, Slo

SLO = Slo(ttft_ms=100.0, gap_ms=20.0)


def answered(
    due_at: float, sent_at: float, arrivals: list[float], *, tokens: int | None = None
) -> Asked:
    asked = Asked(1, 0, due_at, 10, len(arrivals), False)
    answer = asked.answer = Answer(sent_at)
    answer.status, answer.done, answer.arrivals = 200, True, arrivals
    answer.usage_tokens = tokens or len(arrivals)
    answer.prompt_tokens, answer.cached_tokens = 10, 4
    answer.ended_at = arrivals[-1]
    return asked


def measured(*asked: Asked) -> Measured:
    return Measured(began_at=100.0, ended_at=110.0, over_at=111.0, asked=list(asked))


def figures(run: Measured) -> Figures:
    return reckoning.figures(run, [SLO], connections=1, generator_cpu_cores=0.1, server=None)


def conditions(**changed: object) -> Conditions:
    known: dict[str, object] = {
        "time": "2026-01-01T00:00:00+00:00",
        "server": {"kind": "other"},
        "model": "m",
        "dtype": "bfloat16",
        "limits": "defaults",
        "cache_state": "cold",
        "workload": {"name": "fixed"},
        "arrivals": {"kind": "closed"},
        "concurrency": "1",
        "hardware": {"cpu": "c"},
        "pinning": {"generator": [0]},
        "versions": {"python": "3"},
        "commit": "abc",
        "load": {"others_cores": 0.0},
    }
    return msgspec.convert({**known, "limits": {"all": "defaults"}, **changed}, Conditions)


def result(**changed: object) -> Result:
    run_measured = measured(answered(101.0, 101.0, [101.05, 101.06]))
    run = Run(
        "run",
        {},
        figures(run_measured),
        Cost("core", 2.0, "the user"),
        0.0,
        reckoning.rows(run_measured),
        reckoning.series(run_measured),
        1_000,
    )
    return Result(kind="run", title="t", conditions=conditions(**changed), runs=(run,))
