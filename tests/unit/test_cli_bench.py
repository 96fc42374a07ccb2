"""`baton bench`: what is wrong with a command is told before anything is measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.bench.load.results import write
from baton.cli.main import main
from support.bench_results import result

RUN = ["bench", "run", "--url", "http://127.0.0.1:9", "--condition", "dtype=x"]
TOLD = ["--condition", "limits=x"]
MODES = ["bench", "compare-modes"]


@pytest.mark.parametrize(
    "options",
    [
        [*RUN, "--duration", "-5"],
        [*RUN, "--rate", "nan", "--arrivals", "poisson"],
        [*RUN, "--rate", "inf", "--arrivals", "poisson"],
        [*RUN, "--warmup", "-1"],
        [*RUN, "--slo-gap", "0"],
        [*RUN, "--slo-gap", "50", "-1"],
        [*RUN, "--concurrency", "0"],
        [*RUN, "--requests", "-1"],
        [*RUN, "--prompt-tokens", "1.5"],
        ["bench", "search", "--attainment", "1.5"],
        [*MODES, "--chunks", "0.5"],
        [*MODES, "--multiples", "2,nan"],
        [*MODES, "--rates", "1,,2"],
        [*MODES, "--repeats", "0"],
        [*MODES, "--minutes", "-1"],
        [*MODES, "--tune", "0"],
        ["logs", "-n", "-1"],
        ["up", "--wait", "nan"],
    ],
    ids=" ".join,
)
def test_a_number_out_of_range_is_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the option's name, with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    wrong = [each for each in options if each.startswith("-") and not each[1:].isdigit()]
    words = capsys.readouterr().err
    assert any(f"argument {option}: " in words for option in wrong)


@pytest.mark.parametrize("option", ["--out", "--html"])
@pytest.mark.parametrize("command", [[*RUN, *TOLD], ["bench", "search"], MODES], ids=" ".join)
def test_a_file_that_could_not_be_written_is_told_first(
    option: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after hours of measuring, and not with a traceback."""
    if command[1] == "search":
        command = [*command, "--arrivals", "poisson"]
    for path, words in ((tmp_path / "no" / "x", "make the folder"), (tmp_path, "a folder")):
        assert main([*command, option, str(path)]) == 2
        assert f"{option} {path}: {words}" in capsys.readouterr().err


def test_a_page_that_could_not_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`baton bench show` looks first as well."""
    file = tmp_path / "r.json"
    write(file, result())
    assert main(["bench", "show", str(file), "--html", str(tmp_path / "no" / "x")]) == 2
    assert "make the folder" in capsys.readouterr().err


def test_a_partial_result_is_called_so_in_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So is one of another kind."""
    whole, part = tmp_path / "a.json", tmp_path / "b.json"
    write(whole, result())
    write(part, msgspec.structs.replace(result(), aborted=True, kind="search"))
    assert main(["bench", "compare", str(whole), str(part)]) == 0
    text = capsys.readouterr().out
    assert "PARTIAL: not all of B was measured" in text
    assert "A is the result of a run, B of a search" in text


@pytest.mark.parametrize(
    ("price", "words"),
    [("bogus=2", "no worker is a bogus"), ("decode=-1", "-1 is below 0"), ("x", "not KIND=X")],
)
def test_a_wrong_price_is_refused(
    price: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cost of 0 would make every figure by cost absurd."""
    assert main([*RUN, *TOLD, "--price", price]) == 2
    assert words in capsys.readouterr().err


def test_a_foreign_server_is_looked_at_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its conditions first, then whether it answers: no cluster is started for nothing."""
    foreign = [*MODES, "--also", "x=http://127.0.0.1:9", "--condition", "dtype=x"]
    assert main(foreign) == 1
    assert "not told of http://127.0.0.1:9: limits" in capsys.readouterr().err
    assert main([*foreign, *TOLD]) == 1
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9" in error and "undisturbed" not in error
    assert main([*MODES, "--also", "x"]) == 2
    assert "--also x: not NAME=URL" in capsys.readouterr().err


def test_help_has_no_doubled_signs(capsys: pytest.CaptureFixture[str]) -> None:
    """Descriptions are no formats."""
    with pytest.raises(SystemExit):
        main(["bench", "search", "--help"])
    text = capsys.readouterr().out
    assert "90 % meet" in text and "%%" not in text
