"""The systemd units are what systemd understands. Nothing is started: systemd only reads them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli.supervisor import program
from baton.core.ids import Role

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
ANALYZE = shutil.which("systemd-analyze")


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not on this machine")
@pytest.mark.parametrize("role", ["router", "prefill", "decode", "gateway"])
def test_systemd_accepts_the_unit(role: str, tmp_path: Path) -> None:
    """`systemd-analyze verify` has nothing to say about an instance of each template."""
    for unit in UNITS.glob("baton*"):
        text = unit.read_text().replace("/opt/baton/bin/python", sys.executable)
        (tmp_path / unit.name).write_text(text)
    (tmp_path / f"baton-{role}@0.service").symlink_to(tmp_path / f"baton-{role}@.service")
    assert ANALYZE is not None
    done = subprocess.run(
        [ANALYZE, "verify", "--man=no", "--recursive-errors=no", f"baton-{role}@0.service"],
        capture_output=True,
        text=True,
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"},
        timeout=60,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "baton" in line]
    assert ours == []
    assert done.returncode == 0


@pytest.mark.parametrize("role", ["router", "prefill", "decode", "gateway"])
def test_units_say_what_a_worker_needs(role: str) -> None:
    """Ready is told by the process, the watchdog is on, code 78 ends the restarts, nothing else."""
    text = (UNITS / f"baton-{role}@.service").read_text()
    for line in (
        "Type=notify",
        "WatchdogSec=10",
        "Restart=on-failure",
        "RestartPreventExitStatus=78",
        "StartLimitIntervalSec=0",
        "NotifyAccess=main",
        "KillMode=mixed",
        "OOMPolicy=continue",
        "LimitNICE=+0",
        f"-m {program(Role(role))} --worker-id {role}-%i",
    ):
        assert line in text
