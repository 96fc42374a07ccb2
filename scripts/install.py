"""Makes `.venv` in this checkout and installs what Baton needs, with pinned versions.

Run by the Makefile with any python3; uses the standard library alone. It is idempotent: each part
leaves a stamp with a digest of what it was made from, and a part whose stamp fits is skipped.

    python3 scripts/install.py          what serving needs
    python3 scripts/install.py dev      and what tests, lint and types need

torch comes first, because which build is right depends on the machine:
`TORCH_SPEC` (arguments for pip, such as `torch==2.13.0`) > a CPU build, if pip finds one >
`uv pip install --torch-backend=auto` > the plain package, which may be some GB.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - run by whatever python3 is
    sys.exit(
        f"Baton needs Python 3.11 or newer; this is {sys.version.split()[0]} ({sys.executable}). "
        "Install one and name it: make PYTHON=python3.12 run"
    )

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"
TORCH_VERSION = "2.13.0"


class InstallError(Exception):
    """A step failed; the text says what to do."""


def main(arguments: list[str]) -> int:
    """Install; return 0, or 1 after one clear text."""
    try:
        VENV.mkdir(exist_ok=True)
        # Two makes at once (`make -j`, an editor's) must not write into one environment.
        with (ROOT / ".venv" / "install.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            install(with_dev="dev" in arguments)
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("install: interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    return 0


def install(*, with_dev: bool) -> None:
    """Bring the environment to what the lock files say, part by part."""
    make_venv()
    lock, dev_lock = ROOT / "requirements.lock", ROOT / "requirements-dev.lock"
    step("torch", [torch_spec(), TORCH_VERSION], install_torch)
    step("dependencies", [lock.read_text()], lambda: pip("install", "-r", str(lock)))
    project = [(ROOT / "pyproject.toml").read_text(), str(ROOT)]
    step("baton", project, install_project)
    if with_dev:
        step("dev", [dev_lock.read_text()], lambda: pip("install", "-r", str(dev_lock)))


def make_venv() -> None:
    """Create the virtual environment, or again where it was copied, moved or lost its Python."""
    if VENV_PYTHON.exists() and venv_is_sound():
        return
    for module, package in (("venv", "python3-venv"), ("ensurepip", "python3-venv")):
        if importlib.util.find_spec(module) is None:
            raise InstallError(
                f"this Python ({sys.executable}) comes without its module {module}: install it "
                f"(Debian, Ubuntu: sudo apt-get install {package}; or "
                f"python3.{sys.version_info.minor}-venv) and run make again"
            )
    say("python environment .venv")
    for entry in VENV.iterdir():
        if entry.name != "install.lock":
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        raise InstallError(
            f"python -m venv failed (Debian, Ubuntu: sudo apt-get install python3-venv):\n"
            f"{made.stdout}{made.stderr}"
        )


def venv_is_sound() -> bool:
    """Whether `.venv` starts, lies where it was made, and has a Python that is new enough."""
    code = "import sys; print(sys.prefix, sys.version_info >= (3, 11)); import pip"
    try:
        asked = subprocess.run(
            [str(VENV_PYTHON), "-c", code], capture_output=True, text=True, check=False
        )
    except OSError:
        return False
    recorded = (VENV / "stamp.place").read_text() if (VENV / "stamp.place").exists() else str(VENV)
    fits = asked.stdout.strip() == f"{VENV} True" and recorded == str(VENV)
    if asked.returncode == 0 and fits:
        (VENV / "stamp.place").write_text(str(VENV))
        return True
    return False


def torch_spec() -> str:
    """Return the user's choice of torch, now or at an earlier run; empty: none."""
    remembered = VENV / "torch-spec"
    if "TORCH_SPEC" in os.environ:
        remembered.write_text(os.environ["TORCH_SPEC"].strip())
    return remembered.read_text() if remembered.exists() else ""


def install_torch() -> None:
    """Install torch: the first of the four ways that works."""
    constraints = ["-c", str(ROOT / "requirements.lock")]
    chosen = torch_spec()
    if chosen:
        pip("install", *shlex.split(chosen), *constraints)
        return
    if attempt("install", f"torch=={TORCH_VERSION}+cpu", *constraints):
        return
    uv = shutil.which("uv")
    if uv is None and attempt("install", "uv"):
        uv = str(VENV / "bin" / "uv")
    if uv is not None:
        say("  no CPU build in reach of pip; uv chooses the build for this machine")
        command = [uv, "pip", "install", "--python", str(VENV_PYTHON), "--torch-backend=auto"]
        if run_logged([*command, f"torch=={TORCH_VERSION}"]) == 0:
            return
    say("  taking the plain torch package: this may download some GB (TORCH_SPEC chooses another)")
    pip("install", f"torch=={TORCH_VERSION}", *constraints)


def install_project() -> None:
    """Install this checkout itself: its code stays where it is."""
    pip("install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))


# --- steps, stamps, pip -------------------------------------------------------------------------


def step(name: str, inputs: list[str], do) -> None:  # type: ignore[no-untyped-def]
    """Do one part unless its stamp says that it was done with the same inputs."""
    digest = hashlib.sha256("\0".join([*inputs, sys.version]).encode()).hexdigest()
    stamp = VENV / f"stamp.{name}"
    if stamp.exists() and stamp.read_text() == digest:
        return
    say(f"installing {name} ...")
    started = time.monotonic()
    do()
    stamp.write_text(digest)
    say(f"  done in {time.monotonic() - started:.0f} s")


def pip(*arguments: str) -> None:
    """Run pip; its output goes to the log and is shown only when it failed."""
    if not attempt(*arguments):
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-25:])
        raise InstallError(f"pip {' '.join(arguments)} failed; the end of {LOG}:\n{tail}")


def attempt(*arguments: str) -> bool:
    """Run pip and say whether it succeeded; only its exit code counts, never its warnings."""
    quiet = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    command, *rest = arguments
    return run_logged([str(VENV_PYTHON), "-m", "pip", command, *quiet, *rest]) == 0


def run_logged(command: list[str]) -> int:
    """Run a command with its output in the log; say every 20 s that it still works."""
    with LOG.open("ab") as log:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        started = time.monotonic()
        while True:
            try:
                return process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                say(f"  still working ({time.monotonic() - started:.0f} s; details: {LOG})")


def say(text: str) -> None:
    """Tell the user, at once, also through a pipe."""
    print(f"baton: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
