"""Comparing modes: each at its best, the same bounds for all, a break-even and one sentence."""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec
import pytest

from baton.bench.load import modes
from baton.bench.load.page import page
from baton.bench.load.results import Result, Row, Run, Slo
from support.bench_results import result

ITL_MS = 10.0
MULTIPLES = (1.5, 3.0)
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
    chosen = {"mode": mode, "rate": rate, "repeat": repeat, "way": "w", **settings}
    return msgspec.structs.replace(
        blank, label=f"{mode} {rate:g}/s", settings=chosen, rows=tuple(rows)
    )


def conclude(*runs: Run) -> dict[str, object]:
    return modes.conclude(runs, SLOS, ITL_MS, MULTIPLES)


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


def test_each_mode_is_taken_at_its_best_rate_and_configuration() -> None:
    """The median of the repeats; what was made for another SLO does not count."""
    runs = [
        run("colocated", 12.0, 8, rate=1.0),
        run("colocated", 12.0, 12, rate=2.0),
        run("colocated", 12.0, 6, repeat=1),
        run("colocated", 12.0, 20, repeat=2),
        run("adaptive", 12.0, 20, made_for_gap_ms=15.0),
        run("adaptive", 12.0, 10, made_for_gap_ms=30.0),
    ]
    assert modes.of_mode(runs, "colocated", SLOS[0]) == (0.6, 0.3, 1.0)
    assert modes.of_mode(runs, "adaptive", SLOS[1])[0] == 0.5
    found = conclude(*runs)
    assert str(found["advice"]).endswith(
        "the adaptive mode gave 0.83 to 1.67 of the better one of both."
    )


def test_the_highest_rate_needs_nine_of_ten() -> None:
    """Attainment counts there, not goodput."""
    runs = [
        run("split", 12.0, 20),
        run("split", 12.0, 18, rate=2.0),
        run("split", 12.0, 17, rate=4),
    ]
    assert modes.highest_rate(runs, "split", SLOS[0]) == 2.0
    assert modes.highest_rate(runs, "colocated", SLOS[0]) == 0.0


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
