"""Writes the lock files: every package and version that an installation takes, except torch.

Run by `make lock`, after a change of the dependencies in pyproject.toml or to take newer releases.
`requirements.lock` is what serving needs, `requirements-dev.lock` what tests, lint and types need
on top. torch is left out because which build is right depends on the machine (scripts/install.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.24.0"
#: What pip needs to install this project itself without an environment of its own for the build.
BUILD = ("hatchling", "editables")
#: Brought by torch alone, and different for each of its builds.
LEFT_OUT = ("torch", "triton", "nvidia-", "cuda-", "baton-serve")
HEADER = "# Written by `make lock`; do not edit. {what}\n"


def main() -> int:
    """Resolve both sets and write both files."""
    serving = resolve("engine")
    everything = resolve("engine,dev")
    write(
        "requirements.lock", "What serving needs; torch is chosen by scripts/install.py.", serving
    )
    extra = {name: version for name, version in everything.items() if name not in serving}
    write("requirements-dev.lock", "What tests, lint and types need on top.", extra)
    return 0


def resolve(extras: str) -> dict[str, str]:
    """Return name -> version of what pip would install into an empty environment."""
    report = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"),
            *("--ignore-installed", "--report", "-", f"{ROOT}[{extras}]"),
            *(TORCH, TRANSFORMERS, *BUILD),
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    found = {}
    for item in json.loads(report)["install"]:
        name = item["metadata"]["name"].lower().replace("_", "-")
        if not name.startswith(LEFT_OUT):
            found[name] = item["metadata"]["version"]
    return found


def write(file: str, what: str, packages: dict[str, str]) -> None:
    """Write one lock file, sorted."""
    lines = [f"{name}=={version}\n" for name, version in sorted(packages.items())]
    (ROOT / file).write_text(HEADER.format(what=what) + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
