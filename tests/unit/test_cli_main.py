"""The command line: help that teaches, errors in one line, exit codes as documented."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli.main import main


def test_help_lists_commands_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """`baton --help` names every command and shows a first session."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in (
        "up",
        "down",
        "status",
        "chat",
        "model",
        "config",
        "a first session",
        "exit codes",
    ):
        assert word in text


@pytest.mark.parametrize("word", [[], ["model"], ["config"], ["bench"]])
def test_a_word_without_its_command_is_answered_with_help(
    word: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`baton` and `baton model` alone: what there is, and exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(word)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "commands:" in error
    assert "required" not in error


@pytest.mark.parametrize(
    "command",
    [["logs"], ["up"], ["bench", "run"], ["model", "prepare"], ["config", "show"]],
    ids=" ".join,
)
def test_a_word_too_many_is_answered_with_the_commands_own_usage(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with that of `baton`, which says nothing of the command's options."""
    with pytest.raises(SystemExit) as ended:
        main([*command, "--no-such-option"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: baton {' '.join(command)} ")
    assert error.endswith("unrecognized arguments: --no-such-option\n")


@pytest.mark.parametrize("command", [["config", "show"], ["version"], ["--help"], ["up", "--help"]])
def test_a_reader_that_has_read_enough_is_no_error(command: list[str]) -> None:
    """`baton config show | head`: exit code 0, and not a word on standard error."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "baton.cli.main", *command],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_wrong_setting_is_one_line_and_exit_code_78(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the variable, the value and what is allowed."""
    monkeypatch.setenv("BATON_CLUSTER_MODE", "both")
    assert main(["config", "show"]) == 78
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "BATON_CLUSTER_MODE" in error
    assert "split" in error


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["up", "--decode", "0"], "--decode"),
        (["up", "--mode", "split", "--prefill", "0"], "--prefill"),
    ],
)
def test_a_wrong_option_is_named_as_it_was_typed(
    arguments: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the option, not the variable that it stands for."""
    assert main(arguments) == 78
    error = capsys.readouterr().err
    assert option in error
    assert "BATON_" not in error


def test_nothing_changed_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`baton config show --changed` without a setting says so and draws no empty table."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)
    assert main(["config", "show", "--changed"]) == 0
    assert capsys.readouterr().out.startswith("every setting has its default")


def test_no_line_of_a_table_ends_in_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    """What is copied from a terminal or written to a file has none."""
    assert main(["config", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 50
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_missing_log_is_told_with_those_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No logs at all, and no log of that name, are two things."""
    run_dir = tmp_path / "r"
    monkeypatch.setenv("BATON_CLUSTER_RUN_DIR", str(run_dir))
    assert main(["logs"]) == 1
    assert "no cluster has run here" in capsys.readouterr().err
    (run_dir / "logs").mkdir(parents=True, mode=0o700)
    run_dir.chmod(0o700)
    (run_dir / "logs" / "decode-0.log").write_text("one\ntwo\n")
    assert main(["logs", "decode"]) == 1
    assert "there are decode-0" in capsys.readouterr().err
    assert main(["logs", "decode-0", "-n", "1"]) == 0
    assert capsys.readouterr().out == "two\n"


def test_a_missing_model_folder_is_told_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit code 78; nothing claims to prepare it."""
    assert main(["model", "prepare", str(tmp_path / "none")]) == 78
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "does not exist" in shown.err


def test_config_show_says_where_each_value_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """File, environment and default are told apart; secrets are not shown."""
    file = tmp_path / "b.toml"
    file.write_text('[gateway]\nport = 9001\napi_keys = ["secret-key"]\n')
    monkeypatch.setenv("BATON_CLUSTER_DECODE", "3")
    assert main(["config", "show", "--json", "--config", str(file)]) == 0
    text = capsys.readouterr().out
    found = {row["key"]: row for row in json.loads(text)}
    assert found["gateway.port"]["source"] == f"file:{file}"
    assert found["cluster.decode"] == {
        "key": "cluster.decode",
        "value": "3",
        "source": "env:BATON_CLUSTER_DECODE",
    }
    assert found["cluster.mode"]["source"] == "default"
    assert "secret-key" not in text


def test_the_command_starts_without_what_only_workers_need() -> None:
    """Neither torch nor transformers is imported by any module of the command."""
    code = (
        "import pkgutil, importlib, sys, baton.cli\n"
        "for m in pkgutil.iter_modules(baton.cli.__path__): "
        "importlib.import_module('baton.cli.' + m.name)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", [["status"], ["chat"]])
def test_commands_that_need_a_cluster_say_how_to_start_one(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a cluster: exit code 1 and one line that names `make up` and `baton up`."""
    monkeypatch.setenv("BATON_CLUSTER_RUN_DIR", str(tmp_path / "r"))
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "make up" in error
    assert "baton up" in error


def test_down_without_a_cluster_is_fine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopping twice is no error."""
    monkeypatch.setenv("BATON_CLUSTER_RUN_DIR", str(tmp_path / "r"))
    assert main(["down"]) == 0
    assert "nothing is left" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["status"], ["down"], ["logs"]])
def test_looking_makes_no_run_directory(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a start makes the run directory."""
    monkeypatch.setenv("BATON_CLUSTER_RUN_DIR", str(tmp_path / "r"))
    main(command)
    assert not (tmp_path / "r").exists()


def test_a_run_directory_that_others_can_write_to_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in it is believed: exit code 78."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r").chmod(0o777)
    monkeypatch.setenv("BATON_CLUSTER_RUN_DIR", str(tmp_path / "r"))
    assert main(["status"]) == 78
    assert "lets others in" in capsys.readouterr().err
