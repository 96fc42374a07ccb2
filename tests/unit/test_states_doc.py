"""The reference pages say what the code says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.core.limits import Limits
from baton.runtime.docs import PAGES, field_docs
from baton.runtime.settings import SECTIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", PAGES)
def test_page_is_what_the_code_says(page: str) -> None:
    """Each rendered page in docs/ equals what its tables in the code render to."""
    written = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert written == PAGES[page](), f"stale: run python -m baton.runtime.docs {page}"


@pytest.mark.parametrize("cls", [*SECTIONS.values(), Limits], ids=lambda cls: str(cls.__name__))
def test_every_setting_is_described(cls: type[msgspec.Struct]) -> None:
    """Every setting and every limit has a line that says what it means."""
    assert list(field_docs(cls)) == list(cls.__struct_fields__)
