"""What the benchmark of roles counts as good, and that its page tells everything it measured."""

from __future__ import annotations

import pytest

from baton.bench import roles
from baton.bench.load.answer import Answer
from baton.bench.roles import ANSWERS, CHANGES, page


def answer(at: float, *, ttft_s: float = 0.2, gap_s: float = 0.04, tokens: int = 120) -> Answer:
    made = Answer(at)
    made.arrivals = [at + ttft_s + number * gap_s for number in range(tokens)]
    made.usage_tokens = tokens
    return made


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (answer(2.0, ttft_s=1.1), "late"),
        (answer(2.0, gap_s=0.11), "slow"),
        (answer(2.0, tokens=60), "cut off"),
    ],
)
def test_only_a_whole_answer_that_keeps_both_slos_is_good(other: Answer, why: str) -> None:
    """Of two that came in the window; a third came after it."""
    seen = roles._seen([answer(1.0), other, answer(10.5)], ANSWERS, 0.0, 10.0)
    assert (seen["requests"], seen["good"], seen["goodput_per_s"]) == (2, 1, 0.1)
    assert seen["incomplete"] == (why == "cut off")


def test_the_page_tells_each_change_and_each_part_of_both_drifts() -> None:
    """Also an error, wherever it came."""
    failed = answer(2.0)
    failed.error = "gone"
    seen = roles._seen([answer(1.0), failed], ANSWERS, 0.0, 10.0)
    change = {"wanted": "decode", "s_after_drift": 7.5, "prefill": 0.1, "decode": 1.4}
    drift = {"before": seen, "after": seen, "later": seen}
    steps = [
        {"worker": worker, "role": role, "drain_s": 0.5, "start_s": 0.25, "away_s": 0.75}
        for worker, role in CHANGES
    ]
    gaps = {"p50": 40.0, "p99": 60.0, "max": 90.0}
    told = page(
        {
            "slo": {"ttft_s": 1.0, "itl_s": 0.1},
            "changes": {
                "work": "some",
                "steps": steps,
                "seconds": 9.0,
                "requests": 2,
                "errors": [],
                "incomplete": 0,
                "gap_ms": gaps,
            },
            "drifts": {"off": {**drift, "changes": []}, "on": {**drift, "changes": [change]}},
        }
    )
    assert "| decode-1 to prefill | 1 | 0.5 | 0.25 | 0.75, 0.75 |" in told
    assert told.count("| off |") == told.count("| on |") == 3
    rows = [line for line in told.splitlines() if line.startswith("| on |")]
    assert all(line.endswith(" 50% | 200 / 200 / 200 | 40 / 40 / 40 | 1 |") for line in rows)
    assert "- automatic off: no change." in told
    assert "asked to be decode 7.5 s after the drift" in told
