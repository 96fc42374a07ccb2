"""Comparing modes: each at its best, the same bounds for all, a break-even and one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from baton.bench.cluster import BenchError
from baton.bench.load import modes, report, verdict
from baton.bench.load.asking import AskPlan
from baton.bench.load.generator import LoadPlan
from baton.bench.load.page import page
from baton.bench.load.results import Result, ResultError, Row, Run, ServerFigures, Slo, Spread
from baton.bench.load.running import Done, RunPlan, Target
from baton.bench.load.slices import Slices
from baton.bench.load.workload import WorkloadPlan
from support.bench_results import result

ITL_MS = 10.0
MULTIPLES = (1.5, 3.0)
#: Nothing happened.
SERVER = {
    "handovers": 0,
    "handover_bytes": 0,
    "handover_ms": 0.0,
    "handover_share_of_ttft": 0.0,
    "prefix_hit_share": 0.0,
    "queue_ms": 0.0,
    "queue_p99_ms": 0.0,
    "refusals": {},
    "preemptions": 0,
    "cpu_cores": {},
}
SLOS = tuple(Slo(2_000.0, ITL_MS * multiple) for multiple in MULTIPLES)


def run(
    mode: str, gap_ms: float, good: int, *, rate: float = 1.0, repeat: int = 0, **settings: object
) -> Run:
    """A run of ten seconds whose ``good`` requests (of 20) have this p99 gap."""
    rows = [
        Row(n / 2, "ok", 10, 0, 5, 50.0, gap_ms if n < good else 1_000.0, 100.0, False)
        for n in range(20)
    ]
    blank = result().runs[0]
    told = {"way": "w", "made_for_gap_ms": None, **settings}
    chosen = {"mode": mode, "rate": rate, "repeat": repeat, **told}
    return msgspec.structs.replace(
        blank, label=f"{mode} {rate:g}/s", settings=chosen, rows=tuple(rows)
    )


def conclude(*runs: Run) -> dict[str, object]:
    return verdict.conclude(runs, SLOS, ITL_MS, MULTIPLES)


def test_the_split_wins_up_to_the_break_even() -> None:
    """Its gaps are short, colocated answers more with longer ones."""
    found = conclude(run("split", 12.0, 10), run("colocated", 26.0, 18))
    assert found["goodput_per_cost"] == {
        "1.5": {"split": 0.5, "colocated": 0.0},
        "3": {"split": 0.5, "colocated": 0.9},
    }
    assert found["break_even_ms"] == 25.0
    assert str(found["advice"]).startswith("Split only where gaps must stay within 25 ms (2.5 x")


def test_a_split_that_wins_nowhere_is_said_to() -> None:
    """No straw man, no comfort."""
    found = conclude(run("split", 12.0, 10), run("colocated", 12.0, 18))
    assert found["break_even_ms"] == 0.0
    assert str(found["advice"]).startswith("Do not split")


def test_a_split_that_wins_everywhere_is_said_to() -> None:
    """As far as it was looked."""
    found = conclude(run("split", 12.0, 18), run("colocated", 12.0, 10))
    assert found["break_even_ms"] == "beyond what was looked at"
    assert str(found["advice"]).startswith("Split:")


def test_each_mode_is_taken_at_its_best_way_and_rate() -> None:
    """By the median of the repeats; what was made for another SLO does not count."""
    runs = [
        run("colocated", 12.0, 8, rate=1.0),
        run("colocated", 12.0, 12, rate=2.0),
        run("colocated", 12.0, 6, rate=2.0, repeat=1),
        run("colocated", 12.0, 20, rate=2.0, repeat=2),
        run("adaptive", 12.0, 20, made_for_gap_ms=15.0),
        run("adaptive", 12.0, 10, made_for_gap_ms=30.0),
    ]
    found = verdict.points(runs)
    assert verdict.of_mode(found, "colocated", SLOS[0]) == (0.6, 0.3, 1.0)
    assert verdict.of_mode(found, "colocated", SLOS[0], rate=1.0) == (0.4, 0.4, 0.4)
    assert verdict.of_mode(found, "adaptive", SLOS[1])[0] == 0.5
    assert str(conclude(*runs)["advice"]).endswith(
        "the adaptive mode gave 1.25 to 2.50 of the better one of both, by rate and bound."
    )


def test_modes_are_compared_within_a_repeat() -> None:
    """What slows the machine for a while slows both; the median of the ratios counts."""
    runs = [
        *(run("split", 12.0, good, repeat=n) for n, good in enumerate((20, 10, 4))),
        *(run("colocated", 12.0, good, repeat=n) for n, good in enumerate((18, 9, 20))),
        *(
            run("adaptive", 12.0, good, repeat=n, made_for_gap_ms=15.0)
            for n, good in enumerate((18, 10, 5))
        ),
    ]
    found = verdict.points(runs)
    # Colocated has the better median (18 of 20), so it is compared with it alone.
    assert verdict.to_better_pure(found, SLOS[0], 1.0) == (1.0, 0.25, 10 / 9)
    assert verdict.to_better_pure(found, SLOS[0], 2.0) is None
    assert verdict.to_better_pure(verdict.points(runs[:6]), SLOS[0], 1.0) is None
    tables = conclude(*runs)["tables"]
    assert isinstance(tables, list)
    (by_rate,) = [each for each in tables if "by rate" in each["title"]]
    assert by_rate["rows"][0][-1] == "1 (0.25 - 1.11)"


def test_what_is_compared_takes_turns_side_by_side() -> None:
    """Each way once: adaptive beside the colocated way of its bound, split by the tightest."""
    split, tight, loose = (modes.Way("m", words, {}) for words in ("split", "tight", "loose"))
    slos = [Slo(1.0, gap) for gap in (1.0, 2.0, 3.0)]
    adaptive = [modes.Way("a", "adaptive", {}, slo) for slo in slos]
    best = dict(zip(slos, (tight, tight, loose), strict=True))
    made = [way.name for way in modes.in_turn(slos, split, best, adaptive)]
    assert made == [
        *("a adaptive for 1", "m split", "m tight"),
        *("a adaptive for 2", "a adaptive for 3", "m loose"),
    ]
    assert modes.in_turn(slos, split, best, []) == [split, tight, loose]


def test_where_nothing_was_good_there_is_no_advice() -> None:
    """And no best mode; several that are as good are named together."""
    found = conclude(run("split", 12.0, 0), run("colocated", 12.0, 0))
    assert str(found["advice"]).startswith("No advice: at no rate was a request good")
    tables = found["tables"]
    assert isinstance(tables, list)
    assert [row[-1] for row in tables[0]["rows"]] == ["-", "-"]
    even = conclude(run("split", 12.0, 9), run("colocated", 12.0, 9))["tables"]
    assert isinstance(even, list)
    assert [row[-1] for row in even[0]["rows"]] == ["split = colocated"] * 2


def test_slices_are_of_one_cluster_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of other settings, whichever, wherever they stand, they are those of another plan."""
    plan = RunPlan(
        target=Target(url=""),
        workload=WorkloadPlan(),
        load=LoadPlan(),
        ask=AskPlan(),
        slos=(),
    )
    made = modes.ModesPlan(run=plan, rates=(1.0,), ttft_ms=1.0)
    usual = made.told()
    monkeypatch.setenv("BATON_LIMITS_BATCH_SEQUENCES_MAX", "1")
    assert made.told() != usual
    monkeypatch.delenv("BATON_LIMITS_BATCH_SEQUENCES_MAX")
    other = tmp_path / "other.toml"
    other.write_text('[model]\npath = "another"\n')
    assert replace(made, settings={"BATON_CONFIG": str(other)}).told() != usual
    assert made.told() == usual


def test_the_best_of_many_lucky_repeats_is_no_figure() -> None:
    """Two ways, each good once: together they are not good always."""
    runs = [
        run("colocated", 12.0, 20, way="a"),
        run("colocated", 12.0, 6, way="a", repeat=1),
        run("colocated", 12.0, 4, way="a", repeat=2),
        run("colocated", 12.0, 4, way="b"),
        run("colocated", 12.0, 20, way="b", repeat=1),
        run("colocated", 12.0, 6, way="b", repeat=2),
    ]
    assert verdict.of_mode(verdict.points(runs), "colocated", SLOS[0])[0] == 0.3


def test_what_is_good_at_every_rate_is_the_best_way() -> None:
    """Where all are good at the low rate the high one decides, not who was tried first."""
    runs = [
        run("colocated", 12.0, 20, way="short"),
        run("colocated", 12.0, 4, way="short", rate=2.0),
        run("colocated", 26.0, 20, way="long"),
        run("colocated", 26.0, 18, way="long", rate=2.0),
    ]
    found = verdict.points(runs)
    assert verdict.tuned(found, SLOS[0]) == "short"
    assert verdict.tuned(found, SLOS[1]) == "long"


def test_the_forecasts_of_all_runs_are_taken_together() -> None:
    """Their buckets are added up; the quantile is its bucket's upper edge."""
    blank = run("adaptive", 12.0, 20)
    told = [{"0.05": 3, "0.4": 1}, {"0.15": 3, "0.4": 2, "5": 1}]
    runs = []
    for number, errors in enumerate(told):
        figures = msgspec.structs.replace(
            blank.figures,
            server=msgspec.convert({**SERVER, "forecast_errors": errors}, ServerFigures),
        )
        settings = {**blank.settings, "repeat": number}
        runs.append(msgspec.structs.replace(blank, figures=figures, settings=settings))
    found = conclude(*runs)["tables"]
    assert isinstance(found, list)
    (table,) = [each for each in found if each["title"].startswith("forecasts")]
    assert table["rows"] == [["10", "15%", "40%"]]
    server = [
        each
        for each in report.tables(msgspec.structs.replace(result(), runs=(runs[1],)))
        if "metrics" in each.title
    ]
    assert [row[1] for row in server[0].rows if row[0].startswith("TTFT forecasts")] == [
        "6, 15% / 500%"
    ]


def test_a_comparison_is_gone_on_with_from_its_slices(tmp_path: Path) -> None:
    """What was measured is found again, of the same plan alone, with the first part's texts."""
    made = result()
    done = Done(made.runs[0], made.conditions, False)
    first = Slices(tmp_path, {"rates": (1.0, 2.0)}, salt=7)
    first.put("repeat 0: split 1 prefill, 1 decode at 1/s", done)
    again = Slices(tmp_path, {"rates": (1.0, 2.0)}, salt=8)
    assert again.salt == 7
    assert again.get("repeat 0: split 1 prefill, 1 decode at 1/s") == done
    assert again.get("repeat 0: split 1 prefill, 1 decode at 2/s") is None
    assert again.all() == [done]
    with pytest.raises(ResultError, match=r"another plan \(rates differ\)"):
        Slices(tmp_path, {"rates": (1.0,)}, salt=7)
    once = Slices(None, {}, salt=9)
    once.put("x", done)
    assert once.salt == 9 and once.get("x") == done


def test_a_comparisons_conditions_say_what_is_told_by_its_runs() -> None:
    """Neither the workers nor the limits of the first run are those of all; words stay words."""
    made = result(server={"kind": "baton", "workers": {"prefill": 1}})
    done = Done(made.runs[0], msgspec.structs.replace(made.conditions, limits="chunk 256"), False)
    done.conditions = msgspec.structs.replace(
        done.conditions,
        load={"others_cores": 0.0, "load_average_at_start": [0.0], "load_average_at_end": [0.0]},
    )
    found = modes._of_all([done, done])
    assert found.server["workers"] == "see the runs' settings"
    assert report.limits_in_words(found.limits).endswith("told chunk 256")


def test_the_highest_rate_needs_nine_of_ten() -> None:
    """Attainment counts there, not goodput."""
    runs = [
        run("split", 12.0, 20),
        run("split", 12.0, 18, rate=2.0),
        run("split", 12.0, 17, rate=4),
    ]
    found = verdict.points(runs)
    assert verdict.highest_rate(found, "split", SLOS[0]) == 2.0
    assert verdict.highest_rate(found, "colocated", SLOS[0]) == 0.0


def test_without_an_undisturbed_gap_there_is_no_bound() -> None:
    """Multiples of nothing would be bounds that nobody can meet."""
    made = result().runs[0]
    assert modes.undisturbed_ms(made) == pytest.approx(10.0)
    empty = msgspec.structs.replace(made.figures, itl=Spread())
    with pytest.raises(BenchError, match="--undisturbed"):
        modes.undisturbed_ms(msgspec.structs.replace(made, figures=empty))


def test_configurations_are_tried_at_the_middle_rate_and_at_the_highest() -> None:
    """At a low one all of them are good."""
    assert modes.tuning_rates((3.0, 0.5, 1.5)) == (1.5, 3.0)
    assert modes.tuning_rates((2.0,)) == (2.0,)


def test_a_slower_machine_is_asked_for_less() -> None:
    """In proportion to its undisturbed gaps; without a machine that they are for rates stand."""
    plan = modes.ModesPlan(run=None, rates=(0.8, 2.6), ttft_ms=2_000.0, rates_for_ms=12.0)  # type: ignore[arg-type]
    assert plan.rates_at(24.0) == (0.4, 1.3)
    assert plan.rates_at(11.0) == (0.87, 2.8)
    assert replace(plan, rates_for_ms=None).rates_at(24.0) == (0.8, 2.6)


def test_colocated_gets_both_topologies_with_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker with all cores, one a core."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    ways = modes.colocated_ways((16, 2_048))
    assert [way.words for way in ways] == [
        "1 worker, 2 cores, chunk 16",
        "1 worker, 2 cores, chunk 2048",
        "2 workers, 1 core each, chunk 16",
        "2 workers, 1 core each, chunk 2048",
    ]
    assert len({tuple(sorted(way.settings.items())) for way in ways}) == 4
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert len(modes.colocated_ways((16,))) == 1


def test_the_page_of_a_comparison_is_whole_and_fetches_nothing() -> None:
    """Goodput against rate by mode, tables, advice; well-formed drawings; no address in it."""
    runs = tuple(
        run(mode, 12.0, good, rate=rate)
        for mode, good in (("split", 12), ("colocated", 8))
        for rate in (1.0, 2.0)
    )
    whole: Result = msgspec.structs.replace(
        result(), kind="modes", runs=runs, findings=conclude(*runs), title="a <b> & c"
    )
    text = page(whole)
    assert "Goodput against rate" in text and "Split:" in text and "a &lt;b&gt; &amp; c" in text
    assert "http" not in text.replace("http-equiv", "") and "<script" not in text
    drawings = text.split("<figure>")[1:]
    assert len(drawings) >= 4
    for drawing in drawings:
        inner = drawing.partition("</figure>")[0]
        ElementTree.fromstring(f"<figure>{inner}</figure>")
