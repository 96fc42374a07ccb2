"""Renders the reference pages from the code: ``python -m baton.runtime.docs PAGE``.

Decides the look of ``docs/states.md``, ``limits.md``, ``configuration.md`` and ``metrics.md``.
Tests compare the pages with what is rendered, so they cannot fall behind. The words come from the
docstring line under each field; they are read from the source, because Python does not keep them.
"""

from __future__ import annotations

import ast
import enum
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from baton.core import lifecycles
from baton.core.limits import Limits
from baton.runtime.catalogue import CATALOGUE, Metric
from baton.runtime.config import allowed
from baton.runtime.settings import SECTIONS

_NOTE = "<!-- Rendered by `python -m baton.runtime.docs {page}`; edits are lost. -->\n"


def field_docs(cls: type[Any]) -> dict[str, str]:
    """Return the docstring line under each field of ``cls``."""
    (body,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    name = ""
    for node in body.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                pass
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                found[name] = " ".join(text.split())
                name = ""
    return found


def states() -> str:
    """Return ``docs/states.md``."""
    tables: Iterable[tuple[str, str, Mapping[Any, frozenset[Any]]]] = (
        ("Request", "As the ledger keeps it.", lifecycles.REQUEST_MOVES),
        ("Block", "As the arena's metadata keeps it.", lifecycles.BLOCK_MOVES),
        ("Lease", "What a process knows of its own lease.", lifecycles.LEASE_MOVES),
        ("Worker", "What a guard knows of its worker.", lifecycles.WORKER_MOVES),
    )
    parts = [
        _NOTE.format(page="states"),
        "# Life cycles\n",
        "Every state and every legal move; any other move is a bug and ends the process. "
        "The tables are in `baton.core.lifecycles`.\n",
    ]
    for title, text, moves in tables:
        parts += [f"## {title}\n", f"{text}\n", _diagram(moves), _moves(moves)]
    return "\n".join(parts)


def _diagram(moves: Mapping[Any, frozenset[Any]]) -> str:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(moves)).name}"]
    lines += [
        f"    {source.name} --> {target.name}"
        for source, targets in moves.items()
        for target in _ordered(targets)
    ]
    lines += [f"    {state.name} --> [*]" for state, targets in moves.items() if not targets]
    return "\n".join([*lines, "```\n"])


def _moves(moves: Mapping[Any, frozenset[Any]]) -> str:
    lines = ["| from | to |", "|---|---|"]
    for source, targets in moves.items():
        names = ", ".join(target.name for target in _ordered(targets))
        lines.append(f"| {source.name} | {names or '(final)'} |")
    return "\n".join(lines) + "\n"


def _ordered(states_: Iterable[enum.Enum]) -> list[enum.Enum]:
    found = list(states_)
    return [state for state in type(found[0]) if state in found] if found else []


def limits() -> str:
    """Return ``docs/limits.md``."""
    described = field_docs(Limits)
    lines = [
        _NOTE.format(page="limits"),
        "# Limits\n",
        "Everything is bounded. Each limit is a key of `[limits]` in the configuration file "
        "(or `BATON_LIMITS_<KEY>` in the environment); units are in the names.\n",
        "| limit | default | what happens at it |",
        "|---|---:|---|",
    ]
    for field in msgspec.structs.fields(Limits):
        lines.append(f"| `{field.name}` | {field.default:,} | {described[field.name]} |")
    return "\n".join(lines) + "\n"


def configuration() -> str:
    """Return ``docs/configuration.md``."""
    parts = [
        _NOTE.format(page="configuration"),
        "# Configuration\n",
        "One TOML file: `--config FILE`, else `$BATON_CONFIG`, else `./baton.toml`, else defaults. "
        "A variable `BATON_<SECTION>_<KEY>` overrides it (lists with commas). "
        "`baton config show` prints every setting, its value and where it came from. "
        "An unknown key or a wrong value stops the start with exit code 78.\n",
        "Other variables: `BATON_CHECK=1` asserts all invariants after every event; "
        "`BATON_ORPHAN=stay` lets a process outlive the one that started it.\n",
    ]
    for section, cls in SECTIONS.items():
        if cls is Limits:
            parts += ["## `[limits]`\n", "See [limits.md](limits.md).\n"]
            continue
        described, hints = field_docs(cls), get_type_hints(cls, include_extras=True)
        parts += [f"## `[{section}]`\n", f"{inspect.getdoc(cls)}\n"]
        parts += ["| key | default | allowed | meaning |", "|---|---|---|---|"]
        for field in msgspec.structs.fields(cls):
            default = msgspec.json.encode(field.default).decode()
            words = allowed(hints[field.name]).replace("|", "\\|")
            parts.append(f"| `{field.name}` | `{default}` | {words} | {described[field.name]} |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def metrics() -> str:
    """Return ``docs/metrics.md``."""
    parts = [
        _NOTE.format(page="metrics"),
        "# Metrics\n",
        "One scrape of a gateway's `/metrics` covers every process. All metrics have the labels "
        "`role`, `worker` and `model_name`; the standard `process_*` metrics come with them. "
        "Other labels take only the values named here, or `other`.\n",
        "| metric | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    parts += [_metric_row(metric) for metric in CATALOGUE.values()]
    parts += ["", "## Values of the labels\n"]
    for label, metric_names, values in _label_values():
        parts.append(f"- `{label}` of {metric_names}: {values}")
    parts += ["", "## Buckets\n"]
    for names, buckets in _bucket_rows():
        parts.append(f"- {names}: {buckets}")
    return "\n".join(parts) + "\n"


def _metric_row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `baton_{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def _label_values() -> list[tuple[str, str, str]]:
    groups: dict[tuple[str, frozenset[str]], list[str]] = {}
    for metric in CATALOGUE.values():
        for label, values in metric.labels.items():
            groups.setdefault((label, values), []).append(f"`{metric.name}`")
    return [
        (label, ", ".join(names), ", ".join(f"`{value}`" for value in sorted(values) if value))
        for (label, values), names in groups.items()
    ]


def _bucket_rows() -> list[tuple[str, str]]:
    groups: dict[tuple[float, ...], list[str]] = {}
    for metric in CATALOGUE.values():
        if metric.buckets:
            groups.setdefault(metric.buckets, []).append(f"`{metric.name}`")
    return [
        (", ".join(names), ", ".join(f"{bound:g}" for bound in buckets))
        for buckets, names in groups.items()
    ]


PAGES: Mapping[str, Callable[[], str]] = {
    "states": states,
    "limits": limits,
    "configuration": configuration,
    "metrics": metrics,
}


def main(arguments: list[str]) -> int:
    """Write the named pages (all by default) into ``./docs``."""
    for page in arguments or list(PAGES):
        if page not in PAGES:
            sys.stderr.write(f"unknown page {page}; known are {', '.join(PAGES)}\n")
            return 2
        Path("docs", f"{page}.md").write_text(PAGES[page](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
