"""`cluster.json` in the run directory: what `baton up` started, for the commands that come later.

Decides whether a cluster found on disk runs, or is what a killed one left behind.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton.cli.processes import ProcessName

RECORD_NAME = "cluster.json"


class ClusterRecord(msgspec.Struct, frozen=True):
    """One start of a cluster."""

    name: str
    mode: str
    model: str
    url: str
    """Base URL of the gateway, ``http://127.0.0.1:8000`` or ``http+unix://<path>``."""
    arena_dir: str
    supervisor_pid: int
    supervisor_started: int
    boot_id: str
    baton_version: str
    settings_source: str
    """The configuration file that was read; empty: none."""
    arenas: str = ""
    """What its arena files are called after (``dirs.arenas_name``)."""

    @property
    def supervisor(self) -> ProcessName:
        return ProcessName(self.supervisor_pid, self.supervisor_started)

    def is_running(self) -> bool:
        """Whether the supervisor of that start still lives."""
        return self.boot_id == boot_id() and self.supervisor.is_alive()


def boot_id() -> str:
    """Return what identifies this boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read(run_dir: Path) -> ClusterRecord | None:
    """Return the record of the last start, running or not; ``None``: stopped in good order."""
    try:
        found = msgspec.json.decode((run_dir / RECORD_NAME).read_bytes(), type=ClusterRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError:
        # Half a record is what a kill in the middle of `up` leaves: nothing to trust.
        return None
    # A cluster that an older version started called them after its name alone.
    return found if found.arenas else msgspec.structs.replace(found, arenas=found.name)


def write(run_dir: Path, record: ClusterRecord) -> None:
    """Store the record, whole or not at all."""
    path = run_dir / RECORD_NAME
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    fresh.chmod(0o600)
    fresh.replace(path)
