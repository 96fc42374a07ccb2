"""Triggers written by a test into a folder and taken by a process at a named point."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.stop_points import FileStopPoints, StopPointHit
from support.engine_steps import child_env


def test_without_a_trigger_nothing_happens(tmp_path: Path) -> None:
    """A missing file, or a missing folder, is passed."""
    FileStopPoints(tmp_path).at("P.mid_write", "a")
    FileStopPoints(tmp_path / "absent").at("P.mid_write", "a")


def test_a_trigger_fires_once_and_says_so(tmp_path: Path) -> None:
    """Taking it renames it, so that the test sees that the point was reached."""
    (tmp_path / "D.step:3").write_text("raise")
    stops = FileStopPoints(tmp_path)
    with pytest.raises(StopPointHit, match=r"D\.step:3"):
        stops.at("D.step:3", "a")
    stops.at("D.step:3", "a")
    assert (tmp_path / "D.step:3.reached").exists()


def test_a_trigger_may_be_meant_for_one_request(tmp_path: Path) -> None:
    """Others pass; the one it names does not."""
    (tmp_path / "P.after_write").write_text("raise b")
    stops = FileStopPoints(tmp_path)
    stops.at("P.after_write", "a")
    with pytest.raises(StopPointHit):
        stops.at("P.after_write", "b")


def test_hold_waits_until_the_mark_is_removed(tmp_path: Path) -> None:
    """The caller sleeps as long as the ``.reached`` file is there."""
    (tmp_path / "P.mid_write").write_text("hold")
    mark = tmp_path / "P.mid_write.reached"
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            mark.unlink()

    FileStopPoints(tmp_path, sleep=sleep).at("P.mid_write", "a")
    assert len(naps) == 3


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("exit", 70)])
def test_a_process_dies_at_the_point(tmp_path: Path, action: str, code: int) -> None:
    """``kill`` is SIGKILL, ``exit`` is the status of a bug."""
    (tmp_path / "P.x").write_text(action)
    program = (
        "import sys; from pathlib import Path; from baton.engine.stop_points import FileStopPoints;"
        "FileStopPoints(Path(sys.argv[1])).at('P.x', 'a')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=False, timeout=30, env=child_env()
    )
    assert done.returncode == code


def test_an_unknown_action_is_an_error(tmp_path: Path) -> None:
    """A typing error in a test does not pass for a fault that did nothing."""
    (tmp_path / "P.x").write_text("explode")
    with pytest.raises(ValueError, match="explode"):
        FileStopPoints(tmp_path).at("P.x", "a")
