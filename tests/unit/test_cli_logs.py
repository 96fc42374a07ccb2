"""`baton logs`: lines of all files by their own times, and files that grow meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from baton.cli.logs import Tail, merged, time_of
from baton.cli.main import main

AT = datetime(2026, 11, 30, 8, 42, 46, 500_000, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        '{"ts":"2026-11-30T08:42:46.500000Z","level":"info","event":"x"}',
        f"{AT.astimezone():%Y-%m-%d %H:%M:%S},500 INFO spawned: 'ledger' with pid 1",
        f"3416:M {AT.astimezone():%d %b %Y %H:%M:%S}.500 * Ready to accept connections",
    ],
)
def test_every_writers_time_is_understood(text: str) -> None:
    """A worker's is UTC, supervisor's and the ledger's are those of this place."""
    assert time_of(text) == AT.timestamp()


def test_what_only_looks_like_a_time_is_none() -> None:
    """And the restarter has whole seconds."""
    assert time_of("Traceback (most recent call last):") is None
    assert time_of("2026-13-30T08:42:46Z x") is None
    assert time_of("2026-11-30T08:42:46Z restarter: x") == AT.timestamp() - 0.5


def _line(second: int, event: str) -> str:
    return f'{{"ts":"2026-11-30T08:42:{second:02}.000000Z","event":"{event}"}}'


def test_lines_are_merged_by_time_and_a_traceback_stays_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each file its newest lines, each with its file's name."""
    run_dir = tmp_path / "r"
    (run_dir / "logs").mkdir(parents=True, mode=0o700)
    run_dir.chmod(0o700)
    monkeypatch.setenv("BATON_CLUSTER_RUN_DIR", str(run_dir))
    decode = [_line(1, "a"), "Traceback", "  File", _line(5, "e")]
    (run_dir / "logs" / "decode-0.log").write_text("\n".join([_line(0, "old"), *decode]))
    (run_dir / "logs" / "router-0.log").write_text("\n".join([_line(2, "c"), _line(3, "d")]) + "\n")
    assert main(["logs", "-n", "4"]) == 0
    a, trace, file, e = decode
    assert capsys.readouterr().out.splitlines() == [
        *(f"decode-0  {text}" for text in (a, trace, file)),
        *(f"router-0  {text}" for text in (_line(2, "c"), _line(3, "d"))),
        f"decode-0  {e}",
    ]


def test_a_clock_that_goes_back_does_not_mix_the_lines_of_one_file(tmp_path: Path) -> None:
    """Their order in the file is the order in which they were written."""
    path = tmp_path / "x.log"
    path.write_text("\n".join([_line(5, "a"), _line(3, "b")]) + "\n")
    assert [line.text for line in merged([Tail(path).read()])] == [_line(5, "a"), _line(3, "b")]


def test_a_file_that_grows_and_is_put_aside_loses_no_line(tmp_path: Path) -> None:
    """Half a line waits for its end; what the old file still got is read before the new one."""
    path = tmp_path / "x.log"
    path.write_text("one\ntw")
    tail = Tail(path)
    assert [line.text for line in tail.read()] == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert [line.text for line in tail.read()] == ["two"]
    with path.open("a") as file:
        file.write("three\n")
    path.rename(tmp_path / "x.log.1")
    path.write_text("four\n")
    assert [line.text for line in tail.read()] == ["three", "four"]
    path.write_text("5\n")
    assert [line.text for line in tail.read()] == ["5"]
