"""The installer says what is missing. A whole installation is what `.ci/run` does first."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _install(folder: Path, blocked: str) -> subprocess.CompletedProcess[str]:
    """Run the installer in a copy, with a Python that lacks one module."""
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "install.py", folder / "scripts")
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules[{blocked!r}] = None\n")
    return subprocess.run(
        [sys.executable, str(folder / "scripts" / "install.py")],
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_python_without_ensurepip_is_told_what_to_install(tmp_path: Path) -> None:
    """Debian's python3 without python3-venv: one clear text that names the package."""
    done = _install(tmp_path / "a b", "ensurepip")
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_python_that_is_too_old_is_told_before_anything_else() -> None:
    """The version check stands before every import that an old Python would stumble over."""
    text = (ROOT / "scripts" / "install.py").read_text()
    head = text[: text.index("sys.exit(")]
    assert "if sys.version_info < (3, 11)" in head
    imports = [line for line in head.splitlines() if line.startswith(("import ", "from "))]
    assert imports == ["from __future__ import annotations", "import sys"]


def test_the_lock_files_pin_every_dependency_exactly_and_leave_torch_out() -> None:
    """Every line is name==version, and no name is locked twice."""
    names = []
    for file in ("requirements.lock", "requirements-dev.lock"):
        for line in (ROOT / file).read_text().splitlines():
            if not line.startswith("#"):
                name, version = line.split("==")
                assert name
                assert version
                names.append(name)
    assert len(names) == len(set(names))
    assert "torch" not in names
    assert not [name for name in names if name.startswith(("nvidia", "cuda", "triton"))]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not on this machine")
@pytest.mark.parametrize(("target", "code"), [("status", 2), ("chat", 2), ("logs", 2), ("down", 0)])
def test_looking_at_a_cluster_installs_nothing(target: str, code: int, tmp_path: Path) -> None:
    """In a fresh checkout nothing runs: said at once, not after minutes of downloads."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(
        ["make", target], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == code
    assert "nothing runs" in done.stdout + done.stderr
    assert not (tmp_path / ".venv").exists()
