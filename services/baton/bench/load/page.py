"""One self-contained HTML page of a result: plots as inline SVG, tables, conditions.

Decides what is plotted. Nothing is fetched and no script runs: the page can be mailed, committed,
or looked at in ten years.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from baton.bench.load import verdict
from baton.bench.load.report import Table, sentences, tables
from baton.bench.load.results import CURVE, Result, Run, Spread
from baton.bench.load.svg import COLOURS, Axis, Plot

#: Okabe and Ito's palette, lighter on a dark ground.
_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#5b5b5b")
_DARK = ("#56b4e9", "#ff9d5c", "#3ecf9e", "#e9a5cc", "#e6c84f", "#b5b5b5")

TIME_LINES_MAX = 4

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1f24; --soft: #667; --line: #d8dce2;
  --mark: #c8102e; %s }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --ink: #e4e7eb; --soft: #9aa3ad;
  --line: #30363d; --mark: #ff6b6b; %s } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1360px; padding: 24px; background: var(--ground);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 17px; margin: 28px 0 8px }
p { max-width: 80ch; margin: 8px 0 } .soft { color: var(--soft) }
.said { border-left: 3px solid var(--mark); padding-left: 12px }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%%, 520px), 1fr));
  gap: 20px; margin: 16px 0 }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: 12px }
figcaption { font-weight: 600 } figure > svg { width: 100%%; height: auto; display: block }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 4px 0;
  padding: 0; font-size: 13px } .legend svg { margin-right: 6px; vertical-align: middle }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif } svg .tick { fill: var(--soft) }
svg .grid { stroke: var(--line); stroke-width: .6 }
svg .axis { stroke: var(--soft); fill: none } svg .mark { stroke: var(--mark); opacity: .45 }
svg .bound { stroke: var(--soft); stroke-dasharray: 3 3 }
svg path { fill: none; stroke-width: 1.8 }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: 4px 14px 4px 0;
  border-bottom: 1px solid var(--line) } th { font-weight: 600 }
td:first-child { color: var(--soft) } .conditions td { overflow-wrap: anywhere }
"""


def write_page(path: Path, result: Result) -> None:
    """Write the page, whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(page(result), encoding="utf-8")
    fresh.replace(path)


def page(result: Result) -> str:
    """Return the page."""
    said = "".join(f'<p class="said">{escape(each)}</p>' for each in sentences(result))
    drawn = "".join(plot.figure() for plot in plots(result))
    conditions = result.conditions
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(result.title)}</title><style>{_style()}</style></head><body>"
        f"<h1>{escape(result.title)}</h1>"
        f'<p class="soft">{escape(conditions.time)}, commit {escape(conditions.commit)}, '
        f"{escape(str(conditions.hardware.get('cpu', '')))}, "
        f"{escape(str(conditions.hardware.get('cores', '')))} cores</p>{said}"
        f'<div class="plots">{drawn}</div>'
        f"{''.join(_table(each) for each in tables(result))}</body></html>\n"
    )


def plots(result: Result) -> list[Plot]:
    """Return the plots that this result has data for."""
    shown = _one_of_each(result.runs) if result.kind == "modes" else result.runs
    found = [_distribution(shown, name, words) for name, words in _LATENCIES]
    found += [_goodput(result, place) for place in range(len(result.runs[0].figures.goodput))]
    # Time lines of a search's or a comparison's many runs would say little.
    for run in result.runs if len(result.runs) <= TIME_LINES_MAX else ():
        found += [_gaps_over_time(run), _tokens_over_time(run), _ttft_by_length(run)]
    return found


def _one_of_each(runs: Sequence[Run]) -> list[Run]:
    """Return the first run of each mode at the middle rate: more lines could not be told apart."""
    rates = sorted({float(run.settings["rate"]) for run in runs})
    middle = rates[len(rates) // 2]
    found: dict[str, Run] = {}
    for run in runs:
        if run.settings["rate"] == middle:
            found.setdefault(str(run.settings["mode"]), run)
    return list(found.values())


_LATENCIES = (
    ("ttft", "time to first token"),
    ("itl", "gap between tokens (ITL)"),
    ("e2e", "end to end"),
)


def _distribution(runs: Sequence[Run], name: str, words: str) -> Plot:
    plot = Plot(
        f"Distribution: {words}",
        Axis("ms (logarithmic)", log=True),
        Axis("share of all, at most so long", low=0.0, high=1.0),
    )
    for run in runs:
        values: Spread = getattr(run.figures, name)
        plot.line(run.label, list(zip(values.curve, CURVE, strict=False)))
    return plot


def _goodput(result: Result, place: int) -> Plot:
    """Goodput against rate; of a comparison one line a mode, medians of its best way."""
    runs = result.runs
    slo = runs[0].figures.goodput[place].slo
    plot = Plot(
        f"Goodput against rate: TTFT <= {slo.ttft_ms:g} ms, p99 gap <= {slo.gap_ms:g} ms",
        Axis("sessions offered a second", low=0.0),
        Axis("good requests a second", low=0.0),
    )
    lines: dict[str, list[tuple[float, float]]] = {}
    if result.kind == "modes":
        found = verdict.points(runs)
        for mode in dict.fromkeys(point.mode for point in found):
            rates = sorted({point.rate for point in found if point.mode == mode})
            best = [verdict.of_mode(found, mode, slo, rate)[0] for rate in rates]
            cost = runs[0].cost.amount or 1.0
            lines[mode] = [(rate, value * cost) for rate, value in zip(rates, best, strict=True)]
    else:
        rated = [run for run in runs if run.settings.get("rate") is not None]
        points = [(float(r.settings["rate"]), r.figures.goodput[place].per_s) for r in rated]
        lines["good"] = sorted(points)
    for name, line in lines.items():
        if len(line) > 1:
            plot.line(name, line)
    return plot


def _gaps_over_time(run: Run) -> Plot:
    plot = _time_line(run, "gaps between tokens; long prompts marked", "ms (logarithmic)", log=True)
    plot.line("p99 of the moment", [(each.at_s, each.gap_p99_ms) for each in run.series])
    plot.line("longest", [(each.at_s, each.gap_max_ms) for each in run.series])
    return plot


def _tokens_over_time(run: Run) -> Plot:
    plot = _time_line(run, "output tokens a second; long prompts marked", "tokens/s")
    plot.line("tokens/s", [(each.at_s, each.tokens_per_s) for each in run.series])
    return plot


def _time_line(run: Run, words: str, unit: str, *, log: bool = False) -> Plot:
    end = max((each.at_s for each in run.series), default=1.0)
    y = Axis(unit, log=True) if log else Axis(unit, low=0.0)
    plot = Plot(f"{run.label}: {words}", Axis("s", low=0.0, high=end), y)
    for row in run.rows:
        if row.intruder or row.prompt_tokens >= run.long_prompt_tokens:
            plot.mark(row.at_s, f"prompt of {row.prompt_tokens} tokens at {row.at_s:.1f} s")
    return plot


def _ttft_by_length(run: Run) -> Plot:
    plot = Plot(
        f"{run.label}: time to first token by prompt length",
        Axis("prompt tokens", low=0.0),
        Axis("ms (logarithmic)", log=True),
    )
    ok = [row for row in run.rows if row.state == "ok"]
    plot.line("request", [(float(row.prompt_tokens), row.ttft_ms) for row in ok], dots=True)
    return plot


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in table.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    kind = "wide conditions" if table.title == "conditions" else "wide"
    return (
        f'<h2>{escape(table.title)}</h2><div class="{kind}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _style() -> str:
    def variables(palette: Sequence[str]) -> str:
        return " ".join(f"--c{n}: {colour};" for n, colour in enumerate(palette))

    colours = "".join(
        f"svg .l{n} {{ stroke: var(--c{n}) }} svg .d{n} {{ fill: var(--c{n}) }}\n"
        for n in range(COLOURS)
    )
    return _STYLE % (variables(_LIGHT), variables(_DARK)) + colours
