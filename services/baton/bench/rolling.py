"""What clients notice while every process is replaced, one after the other, under load.

First eight clients in a closed loop tell what the cluster can do. Then requests come at random
times (Poisson), at 70 % of that: an undisturbed while, then `baton restart --rolling`, with more
coming. What counts: errors, the gaps between tokens, the time to the first one, and whether the
answers that lived through a restart are the ones that an undisturbed cluster gives.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from baton.bench.asker import random_prompt
from baton.bench.cluster import BenchError, bench_cluster
from baton.bench.figures import gaps_within, spread_ms, table
from baton.bench.load.answer import Answer
from baton.bench.streams import Stream, Streams, streams

LOAD = 0.7
CLIENTS = 8
PROMPT_TOKENS, ANSWER_TOKENS = 200, 100
#: So many answers that lived through a restart are asked for again.
ASKED_AGAIN = 12
_STEP = re.compile(r"\[\d+/\d+\] (\S+): (\w+), ([0-9.]+) s")


class Arrivals:
    """Requests that come at random times, at a mean rate, whatever became of those before."""

    def __init__(
        self,
        asked: Streams,
        rate: float,
        seed: int,
        *,
        prompt_tokens: int = PROMPT_TOKENS,
        answer_tokens: int = ANSWER_TOKENS,
        prompts: Callable[[int, int], list[int]] = random_prompt,
    ) -> None:
        self._asked = asked
        self._prompt_tokens, self._answer_tokens = prompt_tokens, answer_tokens
        self._prompts = prompts
        self._rate = rate
        self._chance = random.Random(seed)
        self._seed = seed
        self._stopped = threading.Event()
        self._streams: list[tuple[list[int], Stream]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._chance.expovariate(self._rate)):
            prompt = self._prompts(self._prompt_tokens, self._seed + len(self._streams) + 1)
            self._streams.append((prompt, self._asked.begin(prompt, self._answer_tokens)))

    def stop_asking(self) -> None:
        """Let no more come."""
        self._stopped.set()
        self._thread.join()

    def stop(self) -> list[tuple[list[int], Answer]]:
        """Let each request that came be answered; return all."""
        self.stop_asking()
        return [(prompt, stream.wait()) for prompt, stream in self._streams]


def measure(*, capacity_s: float, calm_s: float) -> dict[str, object]:
    """Return what clients saw before and during a rolling restart of 1 prefill and 1 decode."""
    with bench_cluster(BATON_CLUSTER_MODE="split") as cluster, streams(cluster) as asked:
        asked.complete(random_prompt(64, 1), 4)
        capacity = _capacity(asked, capacity_s)
        arrivals = Arrivals(asked, LOAD * capacity, seed=4_000_000)
        time.sleep(10.0)  # as many run as will at this rate
        calm_from = time.monotonic()
        time.sleep(calm_s)
        calm_until = time.monotonic()
        done = cluster.baton("restart", "--rolling")
        if done.returncode != 0:
            raise BenchError(f"the restart failed:\n{done.stdout}{done.stderr}")
        disturbed_until = time.monotonic()
        came = arrivals.stop()
        answers = [answer for _, answer in came]
        survived = [
            (prompt, answer)
            for prompt, answer in came
            if answer.arrivals
            and answer.sent_at < disturbed_until
            and answer.arrivals[-1] > calm_until
        ][:ASKED_AGAIN]
        others = [
            index
            for index, (prompt, answer) in enumerate(survived)
            if "".join(asked.complete(prompt, ANSWER_TOKENS).text) != "".join(answer.text)
        ]
    during = [a for a in answers if calm_until <= a.sent_at <= disturbed_until]
    before = [a for a in answers if calm_from <= a.sent_at < calm_until]
    return {
        "capacity_requests_per_s": round(capacity, 3),
        "rate_requests_per_s": round(LOAD * capacity, 3),
        "restart_s": round(disturbed_until - calm_until, 1),
        "steps": _STEP.findall(done.stdout),
        "undisturbed": _seen(before, answers, calm_from, calm_until),
        "restarting": _seen(during, answers, calm_until, disturbed_until),
        "requests": len(answers),
        "errors": [answer.error for answer in answers if answer.error],
        "incomplete": sum(not a.error and a.tokens != ANSWER_TOKENS for a in answers),
        "asked_again": len(survived),
        "answered_otherwise": len(others),
    }


def _capacity(asked: Streams, seconds: float) -> float:
    """Return how many requests a second eight clients get answered."""
    clients = asked.background(
        CLIENTS,
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=ANSWER_TOKENS,
        seed=2_000_000,
    )
    time.sleep(5.0)
    began = time.monotonic()
    time.sleep(seconds)
    ended = time.monotonic()
    answers = clients.stop()
    tokens = sum(began <= at <= ended for answer in answers for at in answer.arrivals)
    return tokens / ANSWER_TOKENS / (ended - began)


def _seen(
    asked: Sequence[Answer], answers: Sequence[Answer], begin: float, end: float
) -> dict[str, object]:
    gaps = [
        after - before
        for answer in answers
        for before, after in pairwise(answer.arrivals)
        if begin <= after <= end
    ]
    whole = gaps_within([answer.arrivals for answer in answers], begin, end)
    return {
        "requests": len(asked),
        "gap_ms": spread_ms(gaps),
        "ttft_ms": spread_ms([a.arrivals[0] - a.sent_at for a in asked if a.arrivals]),
        "tokens_per_s": round(len(whole) / (end - begin), 1),
        "pauses_over_half_a_second": sum(gap > 0.5 for gap in gaps),
    }


def page(result: dict[str, object]) -> str:
    """Return the tables."""
    rows = []
    for name in ("undisturbed", "restarting"):
        seen = result[name]
        assert isinstance(seen, dict)
        gap, ttft = seen["gap_ms"], seen["ttft_ms"]
        rows.append(
            (
                name,
                seen["requests"],
                f"{gap['p50']} / {gap['p99']} / {gap['max']}",
                f"{ttft['p50']} / {ttft['p99']} / {ttft['max']}",
                seen["tokens_per_s"],
                seen["pauses_over_half_a_second"],
            )
        )
    header = (
        "",
        "requests that came",
        "gap p50/p99/max ms",
        "time to first token p50/p99/max ms",
        "tokens/s",
        "gaps > 0.5 s",
    )
    steps = result["steps"]
    errors = result["errors"]
    assert isinstance(steps, list) and isinstance(errors, list)
    calm, hit = result["undisturbed"], result["restarting"]
    assert isinstance(calm, dict) and isinstance(hit, dict)
    ratio = hit["gap_ms"]["p99"] / calm["gap_ms"]["p99"]
    lines = [
        table(header, rows),
        "",
        f"Gap p99 {ratio:.2f} times the undisturbed one. {len(errors)} errors and "
        f"{result['incomplete']} incomplete answers in {result['requests']} requests; "
        f"{result['answered_otherwise']} of {result['asked_again']} answers that lived through a "
        "restart differ from the one given afterwards.",
        "",
        f"{CLIENTS} clients in a closed loop got {result['capacity_requests_per_s']} requests/s "
        f"({PROMPT_TOKENS} prompt and {ANSWER_TOKENS} answer tokens each); requests then came at "
        f"{result['rate_requests_per_s']} a second, {LOAD:.0%} of it.",
        "",
        table(("process", "done", "s"), steps),
    ]
    return "\n".join(lines)
