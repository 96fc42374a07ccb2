"""`baton bench run`: one run, made into a result."""

from __future__ import annotations

from baton.bench.load.results import Result
from baton.bench.load.running import RunPlan, run_blocking


def measure(plan: RunPlan) -> Result:
    """Run it and return the result, partial if Ctrl-C ended it.

    Raises:
        ResultError: a condition that no server tells is missing.
        ServerError: nobody answers as an OpenAI-compatible server.
    """
    done = run_blocking(plan)
    return Result(
        kind="run",
        title=f"{plan.workload.name} on {done.conditions.model}",
        conditions=done.conditions,
        runs=(done.run,),
        aborted=done.aborted,
    )
