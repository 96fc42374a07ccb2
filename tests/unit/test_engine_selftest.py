"""The kernels' own self-test: under sanitizers, on lower levels, and on another architecture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_kernels.py"


def run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode == os.EX_UNAVAILABLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_every_level_agrees_with_plain_arithmetic() -> None:
    """Levels below this CPU's own are forced: none of them is left to other machines."""
    run("--cases", "60")


@pytest.mark.slow
def test_no_kernel_touches_memory_that_is_not_its_own() -> None:
    """Over shapes, strides and lengths, in memory of exactly their size."""
    run("--sanitize", "--cases", "60")


@pytest.mark.slow
def test_threads_come_and_go_without_a_race() -> None:
    """Borrowed cores that their owner wants back at any moment."""
    run("--races", "--cases", "25")


@pytest.mark.slow
def test_arm64_agrees_with_plain_arithmetic() -> None:
    """Cross-compiled and emulated, where the tools are there."""
    run("--arm64", "--cases", "6")
