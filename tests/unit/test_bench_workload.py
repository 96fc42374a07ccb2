"""Workloads of the load generator: real lengths, honest prefixes, repeatable by their seed."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from numpy.random import default_rng

from baton.bench.load import arrivals, traces
from baton.bench.load.arrivals import Arrivals
from baton.bench.load.workload import Session, Workload, WorkloadName, WorkloadPlan


def sessions(
    count: int,
    kind: Arrivals = Arrivals.CLOSED,
    rate: float | None = None,
    burstiness: float = 1.0,
    **plan: object,
) -> tuple[list[Session], Workload]:
    made = Workload(WorkloadPlan(**plan), kind, rate, burstiness)  # type: ignore[arg-type]
    return list(islice(made.sessions(), count)), made


def variation(times: list[float]) -> float:
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    return (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean


def test_the_traces_are_the_sources_first_rows() -> None:
    """Numbers of rows and the first ones are the sources' own."""
    code, conv, mooncake = traces.azure("code"), traces.azure("conv"), traces.mooncake()
    assert (len(code), len(conv), len(mooncake)) == (3_000, 3_000, 1_500)
    assert (code[0].prompt_tokens, code[0].output_tokens, code[0].at_s) == (4808, 10, 0.0)
    assert code[1].at_s == pytest.approx(0.052)
    assert (conv[1].prompt_tokens, conv[1].output_tokens) == (396, 109)
    assert mooncake[1].blocks[:2] == (0, 14)
    windows, prompts, outputs = traces.servegen()
    assert len(windows) == 144 and windows[0].rate == pytest.approx(14.8633)
    assert prompts == sorted(prompts) and outputs[500] > prompts[500]
    conversations = traces.sharegpt()
    assert len(conversations) > 500 and conversations[0][0] == (33, 242)


def test_the_same_seed_and_salt_give_the_same_requests() -> None:
    """Another salt changes contents alone; another seed arrivals."""
    plan = {"name": WorkloadName.SERVEGEN, "kind": Arrivals.POISSON, "rate": 2.0}
    first, _ = sessions(20, seed=1, salt=5, **plan)  # type: ignore[arg-type]
    assert sessions(20, seed=1, salt=5, **plan)[0] == first  # type: ignore[arg-type]
    other, _ = sessions(20, seed=1, salt=6, **plan)  # type: ignore[arg-type]
    assert [s.at_s for s in other] == [s.at_s for s in first]
    assert [len(s.turns[0].new_ids) for s in other] == [len(s.turns[0].new_ids) for s in first]
    assert other[0].turns[0].new_ids != first[0].turns[0].new_ids
    seeded, _ = sessions(20, seed=2, salt=5, **plan)  # type: ignore[arg-type]
    assert [s.at_s for s in seeded] != [s.at_s for s in first]


def test_mooncakes_prompts_keep_their_chains_and_their_lengths() -> None:
    """Equal leading names are equal leading tokens, scaled; a prompt is as long as it says."""
    found, made = sessions(40, name=WorkloadName.MOONCAKE, prompt_scale=0.125)
    rows = traces.mooncake()[:40]
    prompts = [session.turns[0].new_ids for session in found]
    assert [len(p) for p in prompts] == [max(1, round(r.prompt_tokens / 8)) for r in rows]
    size = 64
    for mine, row in zip(prompts[1:], rows[1:], strict=True):
        shared = 0
        for a, b in zip(rows[0].blocks, row.blocks, strict=False):
            if a != b:
                break
            shared += size
        shared = min(shared, len(mine), len(prompts[0]))
        assert mine[:shared] == prompts[0][:shared]
        assert mine[shared : shared + size] != prompts[0][shared : shared + size]
    assert made.told.clipped == 0


def test_rows_without_names_share_nothing() -> None:
    """Prompts of traces without hashes begin differently, on a second lap as well."""
    found, made = sessions(3_002, name=WorkloadName.AZURE_CONV, prompt_scale=0.02)
    heads = {
        tuple(session.turns[0].new_ids[:8])
        for session in found
        if len(session.turns[0].new_ids) >= 8
    }
    assert len(heads) == sum(len(session.turns[0].new_ids) >= 8 for session in found)
    assert made.told.laps == 2


def test_what_the_server_cannot_take_is_cut_and_counted() -> None:
    """Prompt and output together fit the context; each cut is counted once."""
    found, made = sessions(100, name=WorkloadName.AZURE_CODE, context_max=2_048)
    turns = [session.turns[0] for session in found]
    assert all(len(turn.new_ids) + turn.output_tokens <= 2_048 for turn in turns)
    long = sum(r.prompt_tokens + r.output_tokens > 2_048 for r in traces.azure("code")[:100])
    assert made.told.clipped == long > 0


def test_conversations_have_turns_that_fit_the_context() -> None:
    """Later turns come after a pause; a conversation ends before it outgrows the context."""
    found, _ = sessions(50, name=WorkloadName.SHAREGPT, context_max=1_000, think_s=2.0)
    assert max(len(session.turns) for session in found) > 2
    for session in found:
        tokens = sum(len(turn.new_ids) + turn.output_tokens for turn in session.turns)
        assert tokens <= 1_000
        assert session.turns[0].think_s == 0.0
        assert all(turn.think_s > 0 for turn in session.turns[1:])


def test_intruders_come_in_between_at_their_times() -> None:
    """They do not change the others."""
    plain, _ = sessions(30, Arrivals.POISSON, 2.0, prompt_tokens=8)
    mixed, made = sessions(
        33, Arrivals.POISSON, 2.0, prompt_tokens=8, intruder_tokens=500, intruder_every_s=4.0
    )
    intruders = [session for session in mixed if session.intruder]
    assert [session.at_s for session in intruders[:3]] == [4.0, 8.0, 12.0]
    assert all(len(session.turns[0].new_ids) == 500 for session in intruders)
    others = [session for session in mixed if not session.intruder]
    assert others == plain[: len(others)]
    assert [s.at_s for s in mixed] == sorted(s.at_s for s in mixed)
    assert made.long_prompt() == 500


@pytest.mark.parametrize(("burstiness", "expected"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gamma_arrivals_have_their_rate_and_burstiness(burstiness: float, expected: float) -> None:
    """Shape b gives gaps with a coefficient of variation of 1 / sqrt(b), at the same rate."""
    times = list(islice(arrivals.gamma_times(5.0, burstiness, default_rng(3)), 20_000))
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.05)
    assert variation(times) == pytest.approx(expected, rel=0.05)


def test_a_traces_own_times_are_stretched_to_the_rate() -> None:
    """Its pattern stays, lap after lap; without a rate the times are as they were."""
    times = [10.0, 11.0, 15.0]
    assert list(islice(arrivals.trace_times(times, None), 4)) == [0.0, 1.0, 5.0, 7.5]
    stretched = list(islice(arrivals.trace_times(times, 0.2), 4))
    assert stretched == pytest.approx([0.0, 2.0, 10.0, 15.0])
    assert arrivals.stretch(times, 0.2) == pytest.approx(2.0)


def test_servegens_windows_keep_their_variation() -> None:
    """The mean rate is the wanted one, whatever the window's own."""
    windows = traces.servegen()[0]
    times = list(islice(arrivals.window_times(windows, 12, 4.0, default_rng(1)), 2_000))
    window = windows[12]
    mean = sum(each.rate for each in windows) / len(windows)
    assert len(times) / times[-1] == pytest.approx(4.0 * window.rate / mean, rel=0.15)
    assert variation(times) == pytest.approx(window.variation, rel=0.15)


def test_a_workload_without_times_has_no_trace_arrivals() -> None:
    """It is refused, not invented."""
    with pytest.raises(ValueError, match="no arrival times"):
        Workload(WorkloadPlan(), Arrivals.TRACE, 1.0)
