"""Where tests find the prepared default model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.engine.info import ModelNotPrepared
from baton.engine.prepared import check_prepared


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The prepared default model; a test that needs it fails, and says why, where it is absent."""
    named = os.environ.get("BATON_TEST_MODEL_DIR", "")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("BATON_MODEL_CACHE_DIR") or home / "baton")
    found = [Path(named)] if named else _newest(cache)
    for folder in found:
        try:
            check_prepared(folder)
        except ModelNotPrepared as error:
            pytest.fail(f"{error}: run `baton model prepare`")
        return folder
    pytest.fail(
        f"no prepared default model in {cache / 'models'}: run `baton model prepare`, or name one "
        "in BATON_TEST_MODEL_DIR"
    )


def _newest(cache: Path) -> list[Path]:
    found = (cache / "models").glob("smollm2-135m-instruct-*")
    return sorted(found, key=lambda folder: -folder.stat().st_mtime)
