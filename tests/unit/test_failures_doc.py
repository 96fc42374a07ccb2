"""docs/failures.md answers every entry, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "failures.md").read_text()
ENTRIES = {
    "A": (1, 3, 4, 5, 7, 8, 9, 11, 12, 14, 16, 17, 19),
    "B": (20, 22, 24, 25, 27, 28, 30, 31, 33, 34, 36, 37, 38),
    "C": (39, 41, 42, 44, 45, 47, 49, 51, 53, 54, 56),
    "E": (75, 85),
    "G": (101, 103, 104, 106, 107, 109, 110, 112, 113, 115),
    "H": (116, 118, 120, 121, 123, 124, 126, 127, 129),
    "I": (130, 132, 134, 135, 137, 139, 140, 141),
}
_NAMED = re.compile(r"`([a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`")
_ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_entry_is_answered_once() -> None:
    """By a test, or by the reason why it cannot happen; under its area, in order."""
    for area, ids in ENTRIES.items():
        section = PAGE.partition(f"\n## {area} · ")[2].partition("\n## ")[0]
        rows = _ROW.findall(section)
        assert tuple(int(number) for number, _, _ in rows) == ids, area
        for number, _, answer in rows:
            assert _NAMED.search(answer) or answer.startswith("Cannot happen"), number


def test_every_named_test_exists() -> None:
    """A test that was renamed or removed takes its entry's answer with it."""
    named = _NAMED.findall(PAGE)
    assert len(named) > 100
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (TESTS / file).exists() or test not in _functions(TESTS / file)
    ]
    assert missing == []
