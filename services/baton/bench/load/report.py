"""Tables of results: what `baton bench show` and `baton bench compare` print.

Decides which figures stand in a table and how two are compared; draws nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.bench.figures import table
from baton.bench.load.baton_target import usual_limits
from baton.bench.load.reckoning import forecast_errors, goodput
from baton.bench.load.results import Conditions, Goodput, Result, Run, ServerFigures, Slo, Spread

#: In the place of a figure that a run does not have.
NOT_JUDGED = "not judged by them"


@dataclass(frozen=True, slots=True)
class Table:
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(result: Result) -> list[Table]:
    """Return everything worth reading of one result."""
    if result.kind == "modes":
        # So many runs that a column for each could not be read: the findings have rows.
        told = Table("conditions", ("", ""), tuple(conditions(result)))
        return [*findings(result.findings), *_errors(result.runs), told]
    runs = result.runs
    found = [
        Table("latencies, ms", ("", *_labels(runs)), _latencies(runs)),
        Table("throughput, and what became of the requests", ("", *_labels(runs)), _counts(runs)),
        Table("goodput: requests/s that met both bounds", ("", *_labels(runs)), _goodput(runs)),
        Table("the generator itself", ("", *_labels(runs)), _generator(runs)),
    ]
    if any(run.figures.server for run in runs):
        found.append(Table("from Baton's metrics", ("", *_labels(runs)), _server(runs)))
    found += _errors(runs)
    if result.findings:
        found += findings(result.findings)
    found.append(Table("conditions", ("", ""), tuple(conditions(result))))
    return found


def _errors(runs: Sequence[Run]) -> list[Table]:
    errors = [
        (run.label, str(count), words)
        for run in runs
        for words, count in run.figures.errors.items()
    ]
    return [Table("errors", ("run", "n", "words"), tuple(errors))] if errors else []


def markdown(result: Result) -> str:
    """Return sentences and tables as Markdown."""
    parts = [f"# {result.title}", *sentences(result)]
    parts += [in_markdown(each) for each in tables(result)]
    return "\n\n".join(parts) + "\n"


def in_markdown(each: Table) -> str:
    """Return one table as Markdown."""
    return f"## {each.title}\n\n{table(each.columns, each.rows)}"


def findings(found: Mapping[str, Any]) -> list[Table]:
    """Return the tables that a search or a comparison made beyond its runs."""
    made = []
    for each in found.get("tables", ()):
        rows = tuple(tuple(str(cell) for cell in row) for row in each["rows"])
        made.append(Table(each["title"], tuple(each["columns"]), rows))
    return made


def sentences(result: Result) -> list[str]:
    """Return what must be said beside the tables."""
    said = ["PARTIAL: not all that was to be measured"] if result.aborted else []
    if advice := result.findings.get("advice"):
        said.append(str(advice))
    verdicts = {run.label: run.figures.generator.verdict for run in result.runs}
    said += [f"{label}: {verdict}" for label, verdict in verdicts.items() if verdict]
    loaded: dict[str, float] = {}
    for run in result.runs:
        if run.others_cores > 0.1:
            loaded[run.label] = max(run.others_cores, loaded.get(run.label, 0.0))
    if loaded:
        words = ", ".join(f"{label} {cores:.2f}" for label, cores in loaded.items())
        said.append(f"others used the machine meanwhile, in cores: {words}")
    return said + list(result.notes)


def compare(a: Result, b: Result) -> list[Table]:
    """Return two results' runs side by side, each pair with b relative to a.

    Runs are paired by their labels, or by their places if the labels differ.
    """
    labels = {run.label: run for run in b.runs}
    pairs = [(run, labels[run.label]) for run in a.runs if run.label in labels]
    if not pairs:
        pairs = list(zip(a.runs, b.runs, strict=False))
    found = [
        Table(
            first.label if first.label == second.label else f"{first.label} | {second.label}",
            ("", "A", "B", "B to A"),
            tuple(_compared(first, second)),
        )
        for first, second in pairs
    ]
    return [*found, Table("conditions that differ", ("", "A", "B"), tuple(_differing(a, b)))]


def sentences_on_both(a: Result, b: Result) -> list[str]:
    """Return what must be said beside a comparison of two results."""
    partial = [name for name, each in (("A", a), ("B", b)) if each.aborted]
    said = [f"PARTIAL: not all of {' and '.join(partial)} was measured"] if partial else []
    if a.kind != b.kind:
        said.append(f"A is the result of a {a.kind}, B of a {b.kind}")
    return said


def _differing(a: Result, b: Result) -> list[tuple[str, str, str]]:
    """Return each condition that is not the same, by its own name, bounds among them."""
    left, right = (
        {"bounds (TTFT, gap p99)": _bounds(each), **_flat(each.conditions)} for each in (a, b)
    )
    return [
        (name, _words(left.get(name, "-")), _words(right.get(name, "-")))
        for name in left | right
        if left.get(name, "-") != right.get(name, "-")
    ]


def _bounds(result: Result) -> str:
    """Return what a result was judged by."""
    return "; ".join(_bound(slo) for slo in _slos(result.runs)) or "-"


def _bound(slo: Slo) -> str:
    return f"TTFT {slo.ttft_ms:g}, gap {slo.gap_ms:g} ms"


def _slos(runs: Sequence[Run]) -> list[Slo]:
    """Return every pair of bounds that one of the runs was judged by."""
    return list(dict.fromkeys(each.slo for run in runs for each in run.figures.goodput))


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested conditions as ``limits.router.placement`` and their values."""
    if isinstance(value, Conditions):
        value = {field: getattr(value, field) for field in value.__struct_fields__}
    if not isinstance(value, Mapping):
        return {name: value}
    found: dict[str, Any] = {}
    for key, each in value.items():
        found |= _flat(each, f"{name}.{key}" if name else str(key))
    return found


def _compared(first: Run, second: Run) -> list[tuple[str, str, str, str]]:
    """Return a row for each figure that one of both has; a ratio only where both have it."""
    slos = _slos((first, second))
    left, right = comparable(first, slos), comparable(second, slos)
    rows = []
    for name in left | right:
        a, b = left.get(name, "-"), right.get(name, "-")
        rows.append((name, _cell(a), _cell(b), _ratio(a, b)))
    return rows


def _ratio(a: float | str, b: float | str) -> str:
    if isinstance(a, str) or isinstance(b, str) or not a:
        return "-"
    return f"{b / a:.3f}"


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else _number(value)


def comparable(run: Run, slos: Sequence[Slo]) -> dict[str, float | str]:
    """Return the figures that are worth a ratio, with the goodput at each of ``slos``."""
    figures, amount = run.figures, run.cost.amount or 1.0
    found: dict[str, float | str] = {}
    for name in ("ttft", "itl", "tpot", "e2e"):
        values: Spread = getattr(figures, name)
        for share in ("p50", "p95", "p99", "max"):
            found[f"{name.upper()} {share} ms"] = getattr(values, share)
    found["requests/s"] = figures.requests_per_s
    found["output tokens/s"] = figures.output_tokens_per_s
    found[f"output tokens/s per {run.cost.unit}"] = figures.output_tokens_per_s / amount
    for slo in slos:
        bound, judged = _bound(slo), _judged(run, slo)
        per_s = judged.per_s if judged else None
        found[f"goodput/s ({bound})"] = NOT_JUDGED if per_s is None else per_s
        name = f"goodput/s per {run.cost.unit} ({bound})"
        found[name] = NOT_JUDGED if per_s is None else per_s / amount
        found[f"attainment ({bound})"] = judged.attainment if judged else NOT_JUDGED
    return found


def _judged(run: Run, slo: Slo) -> Goodput | None:
    """Return what of a run met these bounds; ``None``: it was not judged by them.

    Where the result has kept each of its requests they tell it as well.
    """
    for each in run.figures.goodput:
        if each.slo == slo:
            return each
    return goodput(run.rows, slo, run.figures.seconds) if run.rows else None


def conditions(result: Result) -> list[tuple[str, str]]:
    """Return the conditions in words, one line each."""
    found = result.conditions
    known = {name: getattr(found, name) for name in found.__struct_fields__}
    return [
        (name, limits_in_words(value) if name == "limits" else _words(value))
        for name, value in known.items()
    ]


def limits_in_words(limits: Mapping[str, Any] | str) -> str:
    """Return the mode, and of Baton's limits those that are not this version's defaults.

    The result's file has all of them.
    """
    usual, found = _flat(usual_limits()), _flat(limits)
    if not set(usual) & set(found):
        return _words(limits)
    told = {name: value for name, value in found.items() if usual.get(name) != value}
    if "mode" in found:
        told = {"mode": found["mode"], **told}
    return _words({**told, "others": "as by default"} if len(told) < len(found) else told)


# --- rows -----------------------------------------------------------------------------------------


def _labels(runs: Sequence[Run]) -> list[str]:
    return [run.label for run in runs]


def _latencies(runs: Sequence[Run]) -> tuple[tuple[str, ...], ...]:
    names = {
        "ttft": "TTFT",
        "ttft_from_due": "TTFT from due",
        "itl": "ITL",
        "tpot": "TPOT",
        "e2e": "end to end",
    }
    return tuple(
        (
            f"{words} p50 / p95 / p99 / max",
            *(_spread(getattr(run.figures, name)) for run in runs),
        )
        for name, words in names.items()
    )


def _spread(values: Spread) -> str:
    if not values.count:
        return "-"
    return " / ".join(_number(x) for x in (values.p50, values.p95, values.p99, values.max))


def _counts(runs: Sequence[Run]) -> tuple[tuple[str, ...], ...]:
    def row(name: str, *cells: str) -> tuple[str, ...]:
        return (name, *cells)

    figures = [run.figures for run in runs]
    return (
        row("requests", *(str(f.requests) for f in figures)),
        row(
            "ok / failed / refused / unfinished",
            *(f"{f.ok} / {f.failed} / {f.refused} / {f.unfinished}" for f in figures),
        ),
        row("requests/s", *(_number(f.requests_per_s) for f in figures)),
        row("output tokens/s", *(_number(f.output_tokens_per_s) for f in figures)),
        row("prompt tokens/s", *(_number(f.prompt_tokens_per_s) for f in figures)),
        row("cached of prompt tokens", *(f"{f.cached_share:.1%}" for f in figures)),
        row("cost", *(f"{run.cost.amount:g} {run.cost.unit}" for run in runs)),
        row(
            "output tokens/s per cost",
            *(_number(r.figures.output_tokens_per_s / (r.cost.amount or 1.0)) for r in runs),
        ),
    )


def _goodput(runs: Sequence[Run]) -> tuple[tuple[str, ...], ...]:
    rows = []
    for slo in _slos(runs):
        name = f"TTFT <= {slo.ttft_ms:g} ms, gap p99 <= {slo.gap_ms:g} ms"
        cells = []
        for run in runs:
            found = _judged(run, slo)
            if found is None:
                cells.append(NOT_JUDGED)
                continue
            per_cost = found.per_s / (run.cost.amount or 1.0)
            cells.append(
                f"{_number(found.per_s)} ({found.attainment:.1%}; "
                f"{_number(per_cost)} per {run.cost.unit})"
            )
        rows.append((name, *cells))
    return tuple(rows)


def _generator(runs: Sequence[Run]) -> tuple[tuple[str, ...], ...]:
    found = [run.figures.generator for run in runs]
    return (
        ("late p50 / p95 / p99 / max ms", *(_spread(g.late) for g in found)),
        ("loop lag p50 / p95 / p99 / max ms", *(_spread(g.loop_lag) for g in found)),
        ("cores used", *(f"{g.cpu_cores:.3f}" for g in found)),
        ("most requests at once", *(str(g.in_flight_peak) for g in found)),
        ("cores used by others", *(f"{run.others_cores:.2f}" for run in runs)),
    )


def _server(runs: Sequence[Run]) -> tuple[tuple[str, ...], ...]:
    found = [run.figures.server for run in runs]

    def row(name: str, cell: str, *values: str) -> tuple[str, ...]:
        words = [cell.format(s=s) if s else "-" for s in found]
        return (name, *words, *values)

    return (
        row("hand-overs", "{s.handovers}"),
        (
            "hand-over MiB",
            *("-" if s is None else f"{s.handover_bytes / 2**20:.1f}" for s in found),
        ),
        row("hand-over mean ms", "{s.handover_ms:.2f}"),
        row("hand-over's share of TTFT", "{s.handover_share_of_ttft:.2%}"),
        ("TTFT forecasts, and their error p50 / p90, at most", *map(_forecasts, found)),
        row("prefix cache hits", "{s.prefix_hit_share:.1%}"),
        row("queue mean ms", "{s.queue_ms:.2f}"),
        row("queue p99 ms, at most", "{s.queue_p99_ms:g}"),
        row("pre-emptions", "{s.preemptions}"),
        ("refusals", *("-" if s is None else _words(s.refusals) or "0" for s in found)),
        (
            "cores used by worker",
            *("-" if s is None else _words(_rounded(s.cpu_cores)) for s in found),
        ),
    )


def _forecasts(server: ServerFigures | None) -> str:
    """Only the adaptive mode forecasts."""
    count, *at_most = forecast_errors([server] if server else [])
    return f"{count}, {' / '.join(f'{edge:.0%}' for edge in at_most)}" if count else "-"


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in sorted(values.items())}


def _number(value: float) -> str:
    if value >= 1_000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(each)}" for name, each in value.items() if each != {})
    if isinstance(value, (list, tuple)):
        return " ".join(_words(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
