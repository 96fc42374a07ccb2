"""`baton bench search`: the highest rate at which enough requests meet the SLO.

Decides which rates are tried. Attainment falls with the rate, but for chance; every probe is kept
in the result, so that chance can be seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import uvloop

from baton.bench.load.results import Result
from baton.bench.load.running import Done, RunPlan, run

#: The interval that is left is so small a part of the rate.
CLOSE_ENOUGH = 0.05

Probe = Callable[[float], Awaitable[float | None]]


async def highest_rate(probe: Probe, first: float, wanted: float, probes: int) -> float:
    """Return the highest rate that was seen to reach ``wanted``; 0: none did.

    ``probe`` returns the share of good requests at a rate, or ``None`` to stop.
    """
    low, high, rate = 0.0, float("inf"), first
    for _ in range(probes):
        share = await probe(rate)
        if share is None:
            break
        if share >= wanted:
            low = max(low, rate)
        else:
            high = min(high, rate)
        if high < float("inf") and high - low <= CLOSE_ENOUGH * high:
            break
        rate = low * 2 if high == float("inf") else (low + high) / 2
    return low


def search(plan: RunPlan, wanted: float, probes: int) -> Result:
    """Search from the plan's rate (1 a second without one), for the first SLO of the plan.

    Raises:
        ResultError: a condition that no server tells is missing.
        ServerError: nobody answers as an OpenAI-compatible server.
    """
    done: list[Done] = []

    async def probe(rate: float) -> float | None:
        if done and done[-1].aborted:
            return None
        label = f"{rate:.3g}/s"
        salt = plan.workload.salt + len(done)
        workload = replace(plan.workload, salt=salt)
        load = replace(plan.load, rate=rate)
        each = replace(plan, label=label, load=load, workload=workload, settings={"rate": rate})
        done.append(await run(each))
        return done[-1].run.figures.goodput[0].attainment

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rate = runner.run(highest_rate(probe, plan.load.rate or 1.0, wanted, probes))
    slo = plan.slos[0]
    words = (
        f"{rate:.3g} sessions/s is the highest rate tried at which {wanted:.0%} of the requests "
        f"had their first token in {slo.ttft_ms:g} ms and a p99 gap of {slo.gap_ms:g} ms or less."
        if rate
        else f"At no rate tried did {wanted:.0%} of the requests meet the SLO."
    )
    return Result(
        kind="search",
        title=f"highest rate of {plan.workload.name} on {done[0].conditions.model}",
        conditions=done[-1].conditions,
        runs=tuple(sorted((each.run for each in done), key=lambda r: float(r.settings["rate"]))),
        aborted=done[-1].aborted,
        findings={"rate": rate, "wanted": wanted, "advice": words},
    )
