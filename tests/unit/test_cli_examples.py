"""What the documents show is what the program takes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from baton.runtime.config import load

ROOT = Path(__file__).parents[2]


def test_the_example_file_is_valid_and_says_the_defaults() -> None:
    """baton.example.toml can be used as it is, and changes nothing."""
    example, default = load(ROOT / "baton.example.toml", {}), load(None, {})
    for section in ("cluster", "model", "gateway", "arena", "cores", "ledger"):
        assert getattr(example, section) == getattr(default, section)


def test_every_make_target_the_documents_name_exists() -> None:
    """`make x` in README, CONTRIBUTING and the CI script is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named: set[str] = set()
    for file in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        text = (ROOT / file).read_text()
        named |= set(re.findall(r"(?:^|`|\s)make ([a-z-]+)\b", text, re.MULTILINE))
    assert {"run", "test", "up", "down"} <= named
    assert named <= targets


def test_make_help_tells_about_every_target() -> None:
    """Every phony target has one line of help."""
    text = (ROOT / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: ([a-z-]+)$", text, re.MULTILINE))
    helped = set(re.findall(r"^([a-z-]+):.*## .+$", text, re.MULTILINE))
    assert phony == helped


@pytest.mark.parametrize("target", ["run", "up", "down", "status", "chat", "logs"])
def test_a_target_gives_the_options_in_args_to_its_command(target: str) -> None:
    """`make logs ARGS=-f`; before, they were lost without a word."""
    done = subprocess.run(
        ["make", "-n", target, "ARGS=--given"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (line,) = (each for each in done.stdout.splitlines() if f"baton.cli.main {target}" in each)
    assert "--given" in line.partition("baton.cli.main")[2]


def test_links_of_the_front_page_lead_somewhere() -> None:
    """Relative links in README and CONTRIBUTING name files of this repository."""
    for file in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / file).read_text()):
            assert (ROOT / target).exists(), f"{file}: {target}"
