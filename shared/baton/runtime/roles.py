"""Which role a worker has: the one it was started with, or the one it was told last.

Decides where the last word is kept (a file in the run directory: it outlives worker and guard, and
goes with the cluster), what a mode allows, and that the last of a kind stays what it is. How a
worker gets from one role to another is told in ``docs/adr/0024-roles.md``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from baton.core.ids import Role, WorkerRole

FOLDER = "roles"
Mode = Literal["split", "adaptive", "colocated"]


def first_role(mode: Mode, process: Role) -> WorkerRole | None:
    """Return what a worker is that nobody has told anything; ``None``: it has no other role."""
    if process is Role.PREFILL:
        return WorkerRole.PREFILL
    if process is Role.DECODE:
        return WorkerRole.DECODE if mode == "split" else WorkerRole.MIXED
    return None


def kept_role(run_dir: Path, worker_id: str) -> WorkerRole | None:
    """Return what this worker was told last; ``None``: nothing, or what nobody can read."""
    try:
        return WorkerRole((run_dir / FOLDER / worker_id).read_text().strip())
    except (FileNotFoundError, ValueError):
        return None


def keep_role(run_dir: Path, worker_id: str, role: WorkerRole) -> None:
    """Keep what this worker is from its next start on: all of the word, or the one before."""
    folder = run_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    written = folder / f".{worker_id}"
    written.write_text(f"{role.value}\n")
    os.replace(written, folder / worker_id)


def forget_role(run_dir: Path, worker_id: str) -> None:
    """Have this worker be again what it was started as."""
    (run_dir / FOLDER / worker_id).unlink(missing_ok=True)


def why_not(
    worker_id: str, now: WorkerRole, wanted: WorkerRole, mode: Mode, *, others: bool
) -> str:
    """Return why this worker cannot become what is wanted, empty if it can.

    ``others``: another worker does what this one does now.
    """
    if mode == "colocated" and wanted is not WorkerRole.MIXED:
        return "in mode colocated all workers are mixed; start with --mode adaptive or split"
    if mode == "split" and wanted is WorkerRole.MIXED:
        return (
            "mode split has no mixed workers, since nothing there weighs where a prompt is better "
            "computed; start with --mode adaptive"
        )
    if wanted.process is now.process or others:
        return ""
    if now.process is Role.DECODE:
        return (
            f"{worker_id} is the last worker that decodes, and what runs there has nowhere to go; "
            "give another worker that role first"
        )
    if mode == "split":
        return (
            f"{worker_id} is the last prefill worker, and mode split serves nothing without one; "
            "give another worker that role first"
        )
    return ""
