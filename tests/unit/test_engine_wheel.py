"""A wheel that brings compiled kernels along, for machines without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
from pathlib import Path
from baton.engine.info import cpu_flags
from baton.engine.native import abi, binding
levels = [level for level in binding.levels_of(cpu_flags()) if binding.kernel_grants(level)]
print(abi.Library(binding.find_library(Path("nowhere"), levels[0])).path)
"""


@pytest.mark.slow
def test_kernels_of_a_wheel_are_found_where_nothing_is_compiled(tmp_path: Path) -> None:
    """One library a level, under the digest of the sources beside it, and this CPU's loads."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-build-isolation", "--no-deps"]
    environ = {**os.environ, "BATON_WHEEL_KERNELS": "1"}
    subprocess.run([*command, "-q", "-w", str(tmp_path)], env=environ, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
    )
    prebuilt = tmp_path / "installed" / "baton" / "engine" / "native" / "prebuilt"
    assert Path(done.stdout.strip()).parent == prebuilt
