"""A short `make chaos`: every kind of fault within a few minutes, one at a time and overlapping."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "faults"), [("fake", 40), ("overlapping", 40)])
def test_nothing_is_wrong_silent_or_leaked(part: str, faults: int, tmp_path: Path) -> None:
    """Faults at every stage on two of each: right answers, or errors that say why."""
    command = [sys.executable, "-m", "chaos.run", "--part", part, "--clusters", "1"]
    command += ["--out", str(tmp_path), "--slices", str(tmp_path / "slices")]
    command += ["--evidence", str(tmp_path / "evidence")]
    path = os.pathsep.join(str(ROOT / part) for part in ("shared", "services", "tests"))
    done = subprocess.run(
        [*command, "--faults", str(faults), "--minutes", "6", "--seed", "5"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    said = done.stdout[-6_000:] + done.stderr[-3_000:]
    assert done.returncode == 0, said
    (found,) = json.loads((tmp_path / "chaos.json").read_text())["runs"]
    assert found["faults"] >= faults // 2, said
    assert found["classes"]["right"] > 5 * found["faults"], said
