"""What a change of roles takes, and what automatic changes are worth when the work drifts.

Two prefill and two decode workers with the fake engine, whose steps take a given time whatever else
the machine does: what is measured is who does the work, not how fast it is done. First roles are
changed by command, under load, again and again. Then the same drift, from long prompts with short
answers to short prompts with long answers, comes to a cluster whose roles stay and to one whose
routers change them. After the drift two decode workers have more to do than they can, three have
not. A request is good if its first token and 99 % of its gaps keep the SLOs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from baton.bench.cluster import BenchCluster, BenchError, bench_cluster
from baton.bench.figures import quantile, spread_ms, table
from baton.bench.load.answer import Answer
from baton.bench.rolling import Arrivals
from baton.bench.streams import Streams, streams

TTFT_S, ITL_S = 1.0, 0.1
CHUNK_MS, STEP_MS, PLACES = 80, 40, 6
SETTINGS = {
    "BATON_CLUSTER_MODE": "split",
    "BATON_ENGINE_KIND": "fake",
    "BATON_CLUSTER_PREFILL": "2",
    "BATON_CLUSTER_DECODE": "2",
    "BATON_FAKE_PREFILL_MS": str(CHUNK_MS),
    "BATON_FAKE_STEP_MS": str(STEP_MS),
    "BATON_LIMITS_BATCH_SEQUENCES_MAX": str(PLACES),
    "BATON_ARENA_SIZE_MB": "32",
    "BATON_SLO_TTFT_MS": str(round(TTFT_S * 1000)),
    "BATON_SLO_ITL_MS": str(round(ITL_S * 1000)),
}


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of load."""

    name: str
    prompt_tokens: int
    answer_tokens: int
    rate: float
    """Requests a second, at random times (Poisson)."""

    def arrivals(self, asked: Streams, seed: int) -> Arrivals:
        return Arrivals(
            asked,
            self.rate,
            seed,
            prompt_tokens=self.prompt_tokens,
            answer_tokens=self.answer_tokens,
            prompts=_prompt,
        )


#: Two thirds of what two prefill workers can do (6 chunks a prompt), a fifth of what decode can.
PROMPTS = Work("prompt-heavy", 1_536, 20, 2.8)
#: An eighth, and of what two decode workers can do 1.1 as steps are told to be, 1.3 as they are on
#: a slow machine; so three of them have a tenth to spare at least.
ANSWERS = Work("answer-heavy", 100, 120, 2.75)
CHANGES = (
    ("decode-1", "prefill"),
    ("decode-1", "decode"),
    ("prefill-1", "decode"),
    ("prefill-1", "prefill"),
)


def _prompt(tokens: int, seed: int) -> list[int]:
    """Return a prompt that no cache has seen: random letters, of which the fake model is made."""
    chance = random.Random(seed)
    return [chance.randrange(33, 127) for _ in range(tokens)]


def measure(*, rounds: int, before_s: float, after_s: float) -> dict[str, object]:
    """Return what changes by command took, and both drifts."""
    return {
        "slo": {"ttft_s": TTFT_S, "itl_s": ITL_S},
        "changes": _changes(rounds),
        "drifts": {auto: _drift(auto, before_s, after_s) for auto in ("off", "on")},
    }


# --- changes by command ---------------------------------------------------------------------------


def _changes(rounds: int) -> dict[str, object]:
    steps: list[dict[str, object]] = []
    work = Work("some of both", 512, 40, 3.0)
    with bench_cluster(**SETTINGS) as cluster, streams(cluster) as asked:
        asked.complete(_prompt(64, 1), 4)
        load = work.arrivals(asked, 1_000_000)
        time.sleep(5.0)
        began = time.monotonic()
        for _ in range(rounds):
            for worker, role in CHANGES:
                steps.append(_change(cluster, worker, role))
                time.sleep(2.0)
        ended = time.monotonic()
        answers = [answer for _, answer in load.stop()]
    gaps = [gap for answer in answers for gap in _gaps(answer)]
    return {
        "work": f"{work.prompt_tokens} prompt and {work.answer_tokens} answer tokens, "
        f"{work.rate} requests/s",
        "steps": steps,
        "seconds": round(ended - began, 1),
        "requests": len(answers),
        "errors": [answer.error for answer in answers if answer.error],
        "incomplete": _incomplete(answers, work),
        "gap_ms": spread_ms(gaps),
    }


def _change(cluster: BenchCluster, worker: str, role: str) -> dict[str, object]:
    """Have one worker change; return how long it was away: from its word to ready as another."""
    done = cluster.baton("role", worker, role)
    if done.returncode != 0:
        raise BenchError(f"the change failed:\n{done.stdout}{done.stderr}")
    taken = _times(cluster, worker, "role_taken")[-1]
    ready = _times(cluster, worker, "process_ready")[-1]
    started = _times(cluster, worker, "process_starting")[-1]
    return {
        "worker": worker,
        "role": role,
        "drain_s": round(started - taken, 3),
        "start_s": round(ready - started, 3),
        "away_s": round(ready - taken, 3),
    }


def _times(cluster: BenchCluster, worker: str, event: str) -> list[float]:
    found = cluster.events(worker, event)
    return [datetime.fromisoformat(str(entry["ts"])).timestamp() for entry in found]


# --- a drift --------------------------------------------------------------------------------------


def _drift(auto: str, before_s: float, after_s: float) -> dict[str, object]:
    settings = {"BATON_ROLES_AUTO": auto, "BATON_ROLES_SETTLE_S": "15"}
    with bench_cluster(**SETTINGS, **settings) as cluster, streams(cluster) as clients:
        clients.complete(_prompt(64, 1), 4)
        first = PROMPTS.arrivals(clients, 2_000_000)
        time.sleep(5.0)
        began = time.monotonic()
        time.sleep(before_s)
        first.stop_asking()
        drifted, wall = time.monotonic(), time.time()
        second = ANSWERS.arrivals(clients, 3_000_000)
        time.sleep(after_s)
        over = time.monotonic()
        second.stop_asking()
        before = [answer for _, answer in first.stop()]
        after = [answer for _, answer in second.stop()]
        asked = cluster.events("router-0", "role_change_asked")
    half = drifted + after_s / 2
    return {
        "before": _seen(before, PROMPTS, began, drifted),
        "after": _seen(after, ANSWERS, drifted, half),
        "later": _seen(after, ANSWERS, half, over),
        "changes": [
            {
                "s_after_drift": round(_at(entry) - wall, 1),
                **{key: entry[key] for key in ("wanted", "prefill", "decode")},
            }
            for entry in asked
        ],
    }


def _at(entry: dict[str, object]) -> float:
    return datetime.fromisoformat(str(entry["ts"])).timestamp()


def _seen(answers: Sequence[Answer], work: Work, begin: float, end: float) -> dict[str, Any]:
    """Return the figures of what came between ``begin`` and ``end``."""
    mine = [answer for answer in answers if begin <= answer.sent_at < end]
    good = [answer for answer in mine if _is_good(answer, work)]
    return {
        "work": work.name,
        "requests": len(mine),
        "good": len(good),
        "goodput_per_s": round(len(good) / (end - begin), 2),
        "attainment": round(len(good) / max(1, len(mine)), 3),
        "ttft_ms": spread_ms([_ttft_s(answer) for answer in mine if answer.arrivals]),
        "gap_ms": spread_ms([gap for answer in mine for gap in _gaps(answer)]),
        "errors": [answer.error for answer in mine if answer.error],
        "incomplete": _incomplete(mine, work),
    }


def _is_good(answer: Answer, work: Work) -> bool:
    whole = not answer.error and answer.tokens == work.answer_tokens
    return (
        whole
        and bool(answer.arrivals)
        and _ttft_s(answer) <= TTFT_S
        and quantile(_gaps(answer), 0.99) <= ITL_S
    )


def _incomplete(answers: Sequence[Answer], work: Work) -> int:
    return sum(not a.error and a.tokens != work.answer_tokens for a in answers)


def _ttft_s(answer: Answer) -> float:
    return answer.arrivals[0] - answer.sent_at


def _gaps(answer: Answer) -> list[float]:
    return [b - a for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]


# --- the page -------------------------------------------------------------------------------------


def page(result: dict[str, Any]) -> str:
    """Return the tables."""
    changes, drifts = result["changes"], result["drifts"]
    lines = [
        "## Changes by command, under load",
        "",
        table(("change", "times", "drain s", "start s", "away s, median and most"), _rows(changes)),
        "",
        f"{changes['work']}; {len(changes['steps'])} changes in {changes['seconds']} s: "
        f"{len(changes['errors'])} errors and {changes['incomplete']} incomplete answers in "
        f"{changes['requests']} requests; gaps p50/p99/max {_spread(changes['gap_ms'])} ms.",
        "",
        "## A drift, with automatic changes off and on",
        "",
        table(
            (
                "automatic",
                "load",
                "requests",
                "goodput/s",
                "good",
                "first token p50/p99/max ms",
                "gap p50/p99/max ms",
                "errors",
            ),
            [
                _line(auto, name, drift[part])
                for auto, drift in drifts.items()
                for part, name in (
                    ("before", "before the drift"),
                    ("after", "after it, first half"),
                    ("later", "second half"),
                )
            ],
        ),
        "",
    ]
    for auto, drift in drifts.items():
        told = "; ".join(
            f"a worker was asked to be {each['wanted']} {each['s_after_drift']} s after the drift "
            f"(strain {each['prefill']} at prefill, {each['decode']} at decode)"
            for each in drift["changes"]
        )
        lines.append(f"- automatic {auto}: {told or 'no change'}.")
    slo = result["slo"]
    lines += ["", f"SLO: first token {slo['ttft_s']} s, gap {slo['itl_s']} s."]
    return "\n".join(lines)


def _rows(changes: dict[str, Any]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for worker, role in CHANGES:
        mine = [s for s in changes["steps"] if (s["worker"], s["role"]) == (worker, role)]
        median = [quantile([s[k] for s in mine], 0.5) for k in ("drain_s", "start_s", "away_s")]
        most = max(s["away_s"] for s in mine)
        rows.append((f"{worker} to {role}", len(mine), *median[:2], f"{median[2]}, {most}"))
    return rows


def _line(auto: str, name: str, seen: dict[str, Any]) -> tuple[object, ...]:
    return (
        auto,
        f"{name} ({seen['work']})",
        seen["requests"],
        seen["goodput_per_s"],
        f"{seen['attainment']:.0%}",
        _spread(seen["ttft_ms"]),
        _spread(seen["gap_ms"]),
        len(seen["errors"]) + seen["incomplete"],
    )


def _spread(spread: dict[str, float]) -> str:
    return f"{spread['p50']:.0f} / {spread['p99']:.0f} / {spread['max']:.0f}"
