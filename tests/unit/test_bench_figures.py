"""Figures of the load generator: what counts, what is good, no result without conditions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from baton.bench.load import baton_target, reckoning, report
from baton.bench.load.answer import Answer
from baton.bench.load.baton_target import conditions_of, usual_limits
from baton.bench.load.generator import Asked
from baton.bench.load.results import (
    Conditions,
    Cost,
    Result,
    ResultError,
    Slo,
    read,
    spread,
    write,
)
from baton.bench.load.running import Target, cost
from baton.bench.load.search import highest_rate
from baton.bench.load.server import Metrics, kinds, server_figures
from baton.engine.kernels import TORCH
from baton.runtime.config import load
from baton.runtime.model import ServedModel
from support.bench_results import answered, conditions, figures, measured, result


def refused(due_at: float, status: int) -> Asked:
    asked = Asked(1, 0, due_at, 10, 4, False)
    answer = asked.answer = Answer(due_at)
    answer.status = status
    answer.feed(b'{"error":{"message":"too much"}}', due_at)
    answer.end(due_at + 0.001)
    return asked


def test_latencies_are_of_the_requests_due_in_the_window() -> None:
    """Warm-up counts for nothing but the tokens that arrive in the window."""
    warm = answered(99.0, 99.0, [99.5, 100.5])
    counted = answered(101.0, 101.002, [101.052, 101.062, 101.077], tokens=3)
    found = figures(measured(warm, counted))
    assert found.requests == found.ok == 1
    assert found.ttft.p50 == pytest.approx(50.0)
    assert found.ttft_from_due.p50 == pytest.approx(52.0)
    assert found.itl.max == pytest.approx(15.0) and found.itl.count == 2
    assert found.tpot.p50 == pytest.approx(12.5)
    assert found.e2e.p50 == pytest.approx(75.0)
    assert found.output_tokens_per_s == pytest.approx(0.4)
    assert found.requests_per_s == pytest.approx(0.2)
    assert found.cached_share == pytest.approx(0.4)
    assert found.generator.late.p50 == pytest.approx(2.0)


def test_a_good_request_meets_both_bounds() -> None:
    """Slow first token, one long gap, refused, failed, unfinished: none of them is good."""
    good = answered(101.0, 101.0, [101.05, 101.06, 101.07])
    slow = answered(101.0, 101.0, [101.15, 101.16])
    stalled = answered(101.0, 101.0, [101.05, 101.06, 101.09])
    hanging = Asked(1, 0, 105.0, 10, 4, False, Answer(105.0))
    found = figures(
        measured(good, slow, stalled, refused(102.0, 429), refused(103.0, 500), hanging)
    )
    assert (found.ok, found.refused, found.failed, found.unfinished) == (3, 1, 1, 1)
    (goodput,) = found.goodput
    assert (goodput.good, goodput.attainment, goodput.per_s) == (1, round(1 / 6, 4), 0.1)
    assert found.errors == {"HTTP 429: too much": 1, "HTTP 500: too much": 1}


def test_intruders_are_load_and_no_part_of_the_goodput() -> None:
    """A prompt that was put in to disturb others is not one of those whose SLO counts."""
    intruder = replace(answered(101.0, 101.0, [109.0]), intruder=True)
    found = figures(measured(answered(101.0, 101.0, [101.05]), intruder))
    assert found.goodput[0].attainment == 1.0


def test_a_late_generator_says_so() -> None:
    """Coordinated omission is told: its lateness beyond 5 ms and 5 % of the TTFT."""
    late = [answered(101.0 + n, 101.2 + n, [101.3 + n, 101.31 + n]) for n in range(5)]
    assert "late itself" in figures(measured(*late)).generator.verdict
    assert figures(measured(answered(101.0, 101.001, [101.1]))).generator.verdict == ""


def test_spreads_are_nearest_rank() -> None:
    """Every quantile is a value that was measured."""
    found = spread([n / 1e3 for n in range(1, 101)])
    assert (found.p50, found.p95, found.p99, found.max) == (50.0, 95.0, 99.0, 100.0)
    assert found.curve[0] == 1.0 and found.curve[-1] == 100.0
    assert spread([]).count == 0


def test_the_time_line_covers_the_window() -> None:
    """Tokens outside of it do not count, and no part is shorter than half a second."""
    moments = reckoning.series(measured(answered(99.0, 99.0, [99.5, 100.1, 100.2, 110.5])))
    assert len(moments) == 20
    assert moments[0].tokens_per_s == 4.0
    assert moments[0].gap_max_ms == pytest.approx(600.0)
    assert sum(moment.tokens_per_s for moment in moments) == 4.0


@pytest.mark.parametrize("name", Conditions.__struct_fields__)
def test_a_result_without_a_condition_cannot_be_written(name: str, tmp_path: Path) -> None:
    """Each of them is missed by its name, and nothing is written."""
    empty = "" if isinstance(getattr(conditions(), name), str) else {}
    with pytest.raises(ResultError, match=name):
        write(tmp_path / "r.json", result(**{name: empty}))
    assert not list(tmp_path.iterdir())


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Whole and typed; what is none says so."""
    write(tmp_path / "r.json", result())
    assert msgspec.to_builtins(read(tmp_path / "r.json")) == msgspec.to_builtins(result())
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ResultError, match="no result"):
        read(tmp_path / "x.json")
    with pytest.raises(ResultError, match="No such file"):
        read(tmp_path / "none.json")


def test_tables_compare_by_cost_and_name_what_differs() -> None:
    """Half the cores, the same figures: twice the figures per core."""
    one, other = result(), result(model="n")
    run = msgspec.structs.replace(other.runs[0], cost=Cost("core", 1.0, "the user"))
    other = msgspec.structs.replace(other, runs=(run,))
    figures_table, differing = report.compare(one, other)
    rows = {row[0]: row[3] for row in figures_table.rows}
    assert rows["TTFT p50 ms"] == "1.000"
    assert rows["output tokens/s per core"] == "2.000"
    assert differing.rows == (("model", "m", "n"),)


def judged(slo: Slo, *, rows: bool) -> Result:
    """Return a result with one request, TTFT 50 ms and gap 10 ms, that was judged by ``slo``."""
    given = result()
    (run,) = given.runs
    found = reckoning.goodput(run.rows, slo, run.figures.seconds)
    figures = msgspec.structs.replace(run.figures, goodput=(found,))
    run = msgspec.structs.replace(run, figures=figures, rows=run.rows if rows else ())
    return msgspec.structs.replace(given, runs=(run,))


def test_goodput_is_compared_at_the_same_bounds_only() -> None:
    """Each bound of either has its row; a result is judged by the other's from its requests, and
    where it has not kept them it says so, without a ratio. Differing bounds are conditions."""
    loose, strict = Slo(100.0, 20.0), Slo(100.0, 5.0)
    table, differing = report.compare(judged(loose, rows=True), judged(strict, rows=True))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["attainment (TTFT 100, gap 20 ms)"] == ("1", "1", "1.000")
    assert rows["attainment (TTFT 100, gap 5 ms)"] == ("0", "0", "-")
    assert differing.rows == (
        ("bounds (TTFT, gap p99)", "TTFT 100, gap 20 ms", "TTFT 100, gap 5 ms"),
    )
    table, _ = report.compare(judged(loose, rows=True), judged(strict, rows=False))
    rows = {row[0]: row[1:] for row in table.rows}
    for figure in ("goodput/s", "goodput/s per core", "attainment"):
        assert rows[f"{figure} (TTFT 100, gap 20 ms)"][1:] == ("not judged by them", "-")
    assert rows["attainment (TTFT 100, gap 5 ms)"] == ("0", "0", "-")


def test_figures_by_different_costs_are_not_compared() -> None:
    """Tokens per core stand beside no tokens per price."""
    one = other = result()
    run = msgspec.structs.replace(other.runs[0], cost=Cost("price", 4.0, "the user"))
    table, _ = report.compare(one, msgspec.structs.replace(other, runs=(run,)))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["output tokens/s per core"][1:] == ("-", "-")
    assert rows["output tokens/s per price"][::2] == ("-", "-")


def test_runs_of_one_result_are_shown_at_each_others_bounds() -> None:
    """No run's goodput stands in the row of another one's bounds."""
    loose, strict = judged(Slo(100.0, 20.0), rows=False), judged(Slo(100.0, 5.0), rows=False)
    both = msgspec.structs.replace(loose, runs=(*loose.runs, *strict.runs))
    (goodput,) = (each for each in report.tables(both) if each.title.startswith("goodput"))
    assert [row[2 - place] for place, row in enumerate(goodput.rows)] == ["not judged by them"] * 2


def test_only_limits_that_are_not_the_defaults_are_shown() -> None:
    """The file has all of them; a comparison names each that differs by itself."""
    usual = usual_limits()
    one = result(limits=usual)
    changed = {**usual, "arena_mib": 7, "router": {**usual["router"], "placement": "round-robin"}}
    other = result(limits=changed)
    shown = dict(report.conditions(one))["limits"]
    assert shown == "mode adaptive, others as by default"
    shown = dict(report.conditions(other))["limits"]
    assert shown == (
        "mode adaptive, arena_mib 7, router.placement round-robin, others as by default"
    )
    _, differing = report.compare(one, other)
    assert differing.rows == (
        ("limits.arena_mib", str(usual["arena_mib"]), "7"),
        ("limits.router.placement", "prefix", "round-robin"),
    )
    assert dict(report.conditions(result(limits={"chunk": 256})))["limits"] == "chunk 256"


def test_limits_told_in_words_are_kept_and_read(tmp_path: Path) -> None:
    """`--condition limits=defaults`, of a server that nobody else can ask."""
    given = result()
    told = msgspec.structs.replace(given.conditions, limits="defaults")
    write(tmp_path / "r.json", msgspec.structs.replace(given, conditions=told))
    assert dict(report.conditions(read(tmp_path / "r.json")))["limits"] == "defaults"


def test_the_form_of_the_weights_is_a_condition() -> None:
    """int4 computes something else than full weights do."""
    for weights in ("full", "int8", "int4"):
        environ = {"BATON_ENGINE_WEIGHTS": weights, "BATON_MODEL_DTYPE": "bfloat16"}
        assert conditions_of(load(None, environ))["dtype"] == f"bfloat16, weights {weights}"


def test_what_auto_stands_for_is_a_condition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told for the prepared model; what is not prepared stands for nothing yet."""
    environ = {"BATON_MODEL_DTYPE": "bfloat16", "BATON_MODEL_CACHE_DIR": str(tmp_path)}
    config = load(None, environ)
    assert conditions_of(config)["dtype"] == "bfloat16, weights auto"
    kernels = replace(TORCH, weights="int4")
    served = ServedModel(tmp_path, *(None,) * 3, kernels, "m")  # type: ignore[arg-type]
    monkeypatch.setattr(baton_target, "served_model", lambda *_: served)
    assert conditions_of(config)["dtype"] == "bfloat16, weights auto (int4)"


def test_the_highest_rate_is_found_by_bisection() -> None:
    """Doubled until it fails, then halved to within 5 %."""
    tried: list[float] = []

    async def probe(rate: float) -> float:
        tried.append(rate)
        return 1.0 if rate <= 6.3 else 0.2

    assert asyncio.run(highest_rate(probe, 1.0, 0.9, 12)) == pytest.approx(6.25)
    assert tried[:5] == [1.0, 2.0, 4.0, 8.0, 6.0]


def test_no_rate_is_found_where_none_is_good_enough() -> None:
    """Zero, after as many probes as were allowed."""

    async def probe(rate: float) -> float:
        return 0.1

    assert asyncio.run(highest_rate(probe, 4.0, 0.9, 5)) == 0.0


def test_batons_metrics_become_the_windows_figures() -> None:
    """Differences of two scrapes: shares, means and a quantile's bucket."""

    def scrape(n: int) -> Metrics:
        return Metrics(
            "# TYPE baton_handovers_total counter\n"
            f'baton_handovers_total{{worker="decode-0"}} {n}\n'
            "# TYPE baton_handover_seconds histogram\n"
            f'baton_handover_seconds_bucket{{worker="decode-0",le="+Inf"}} {n}\n'
            f'baton_handover_seconds_sum{{worker="decode-0"}} {n * 0.002}\n'
            f'baton_handover_seconds_count{{worker="decode-0"}} {n}\n'
            "# TYPE baton_time_to_first_token_seconds histogram\n"
            f'baton_time_to_first_token_seconds_bucket{{worker="gateway-0",le="+Inf"}} {n}\n'
            f'baton_time_to_first_token_seconds_sum{{worker="gateway-0"}} {n * 0.1}\n'
            f'baton_time_to_first_token_seconds_count{{worker="gateway-0"}} {n}\n'
            "# TYPE baton_request_queue_seconds histogram\n"
            f'baton_request_queue_seconds_bucket{{le="0.001"}} {n}\n'
            f'baton_request_queue_seconds_bucket{{le="+Inf"}} {n}\n'
            f"baton_request_queue_seconds_sum {n * 0.0005}\n"
            f"baton_request_queue_seconds_count {n}\n"
            "# TYPE process_cpu_seconds_total counter\n"
            f'process_cpu_seconds_total{{worker="decode-0"}} {n * 0.5}\n'
            f'process_cpu_seconds_total{{worker="gateway-0"}} {n * 0.1}\n'
            "# TYPE process_start_time_seconds gauge\n"
            'process_start_time_seconds{role="decode",worker="decode-0"} 5\n'
            'process_start_time_seconds{role="gateway",worker="gateway-0"} 5\n'
        )

    silent = server_figures(Metrics(""), scrape(30), 20.0)
    assert silent.handovers == 0 and silent.cpu_cores == {}
    found = server_figures(scrape(10), scrape(30), 20.0)
    assert found.handovers == 20
    assert found.handover_ms == pytest.approx(2.0)
    assert found.handover_share_of_ttft == pytest.approx(0.02)
    assert found.queue_ms == pytest.approx(0.5) and found.queue_p99_ms == pytest.approx(1.0)
    assert found.cpu_cores == {"decode-0": 0.5, "gateway-0": 0.1}
    assert found.prefix_hit_share == 0.0


def began(*processes: tuple[str, str, float]) -> Metrics:
    """Return a scrape that says when each process began, and has 1 CPU second a second of it."""
    return Metrics(
        "# TYPE process_start_time_seconds gauge\n"
        + "".join(
            f'process_start_time_seconds{{role="{role}",worker="{worker}"}} {since}\n'
            for worker, role, since in processes
        )
        + "# TYPE process_cpu_seconds_total counter\n"
        + "".join(
            f'process_cpu_seconds_total{{role="{role}",worker="{worker}"}} {1_000 - since}\n'
            for worker, role, since in processes
        )
    )


def test_a_worker_costs_what_it_did_not_what_it_is_called() -> None:
    """Prices go by roles over the window: a fourth of it as prefill, the rest as decode."""
    before = began(("decode-0", "decode", 10.0), ("prefill-1", "prefill", 10.0))
    after = began(("decode-0", "decode", 10.0), ("prefill-1", "decode", 125.0))
    workers = kinds(before, after, 100.0, 200.0)
    assert workers == pytest.approx({"decode": 1.75, "prefill": 0.25})
    target = Target(url="", prices={"decode": 2.0, "prefill": 4.0})
    assert cost(target, workers, {}) == Cost("price", pytest.approx(4.5), "the user")
    changed = began(("decode-0", "prefill", 10.0))
    assert kinds(changed, changed, 100.0, 200.0) == pytest.approx({"prefill": 1.0})


def test_who_answers_one_scrape_only_costs_all_the_same() -> None:
    """Its other role is not known; one that died and came back as what it was changed nothing."""
    both = ("prefill-0", "prefill", 10.0)
    found = kinds(began(both, ("decode-0", "decode", 10.0)), began(both), 100.0, 200.0)
    assert found == {"decode": 1.0, "prefill": 1.0}
    killed = ("prefill-0", "prefill", 150.0)
    assert kinds(began(both), began(killed), 100.0, 200.0) == {"prefill": 1.0}


def test_a_process_that_began_anew_is_in_no_figure() -> None:
    """Its counters began at nothing again: differences would be wrong, and negative."""
    stays = ("decode-0", "decode", 10.0)
    before = began(stays, ("decode-1", "decode", 10.0))
    after = began(stays, ("decode-1", "decode", 150.0))
    assert set(server_figures(before, after, 100.0).cpu_cores) == {"decode-0"}
