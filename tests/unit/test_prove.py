"""What `make test` runs ends in order."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
#: A test with a "cluster" that only its end takes down. It says that it runs, and how that ended.
WITH_CLUSTER = """
import os, subprocess
import pytest

@pytest.fixture
def cluster():
    said = os.open({pipe!r}, os.O_WRONLY)
    process = subprocess.Popen(["sleep", "120"], pass_fds=[said], start_new_session=True)
    yield said, process
    process.terminate()
    process.wait()
    os.write(said, b"taken down\\n")

def test_serves(cluster):
    said, process = cluster
    os.write(said, b"serves\\n")
    process.wait()
"""


@pytest.mark.parametrize(
    ("number", "group"),
    [(signal.SIGTERM, False), (signal.SIGINT, True)],
    ids=["terminated", "ctrl-c"],
)
def test_a_signal_ends_all_and_their_clusters(
    tmp_path: Path, number: signal.Signals, group: bool
) -> None:
    """Each child hears it once, whoever else in the group does: nothing is left, and the exit code
    says why."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/prove.py", tmp_path / "scripts")
    for folder in ("integration", "e2e", "unit", "sim"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tests/conftest.py", tmp_path / "tests")
    for folder in ("integration", "unit", "sim"):
        text = WITH_CLUSTER.format(pipe=str(pipe))
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(text)
    command = [sys.executable, str(tmp_path / "scripts/prove.py"), "-p", "no:cacheprovider"]
    # Opened for reading as well, so that it does not wait for a writer; what is read ends with the
    # last one.
    own = os.open(pipe, os.O_RDWR)
    with (
        open(pipe, "rb", buffering=0) as heard,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, process_group=0) as running,
    ):
        said = b""
        while said.count(b"serves") < 3:
            said += heard.read(64)
        os.close(own)
        (os.killpg if group else os.kill)(running.pid, number)
        assert running.wait(timeout=60) == 128 + number
        while more := heard.read(64):
            said += more
        assert said.count(b"taken down") == 3
