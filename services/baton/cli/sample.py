"""One look at a whole cluster from outside: ledger, processes, arenas, sockets, locks.

Decides how each thing is looked at without disturbing it: nothing is written, connected to or
locked. What cannot be looked at is named, never taken for clean.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from baton.channel import locks
from baton.channel.files import open_arena, read_header
from baton.channel.layout import BadHeader, Header, Records
from baton.cli import leftovers, processes
from baton.cli.record import ClusterRecord
from baton.cli.records import LedgerPicture, read_ledger
from baton.cli.reports import LedgerSilent, ask
from baton.cli.supervisor import SERVERS, Supervisor
from baton.core.ids import Peer
from baton.core.lifecycles import BlockState
from baton.ports.channel import BlockMark
from baton.runtime.dirs import ledger_url
from baton.runtime.settings import Config
from baton.transport import host
from baton.wire.holdings import Holdings

_LISTENING = "00010000"
_FREE = frozenset({BlockState.FREE, BlockState.CACHED})


@dataclass(frozen=True, slots=True)
class ArenaFile:
    """One arena as it lies in shared memory."""

    path: str
    owner: Peer
    owned: bool
    """Whether somebody holds the owner's lock."""
    holders: tuple[int, ...]
    """Incarnations that hold a lock, the owner's among them."""
    marks: Mapping[int, BlockMark]
    """Records of the blocks that are neither FREE nor CACHED."""
    moving: frozenset[int] = frozenset()
    """Blocks whose record changed while its owner was asked: nothing can be said of them."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything, within some hundred milliseconds."""

    at: float
    """Seconds of a monotonic clock, when the looking began."""
    ledger: LedgerPicture
    holdings: Mapping[Peer, Holdings]
    """Of the processes that answered."""
    arenas: tuple[ArenaFile, ...]
    dead_sockets: tuple[str, ...]
    """Unix sockets in the run directory that nobody listens on."""
    dead_locks: tuple[str, ...]
    """Lock files of sockets whose lock nobody holds."""
    supervised: Mapping[str, float]
    """Workers that run under supervisor, and for how many seconds."""
    dead: frozenset[Peer]
    """Registered processes of this host that are not there."""
    strays: tuple[str, ...]
    """Processes of this cluster that supervisor did not start, in words."""
    unseen: tuple[str, ...]
    """What could not be looked at, in words."""


def take(run_dir: Path, found: ClusterRecord, config: Config) -> Sample:
    """Look at everything."""
    at = time.monotonic()
    unseen: list[str] = []
    ledger = _ledger(run_dir, config, unseen)
    dead = frozenset(
        peer
        for peer, member in ledger.members.items()
        if member.boot_id == host.boot_id() and processes.started(member.pid) is None
    )
    # What a process says of itself is one instant of it; arenas are read before and after.
    before = {arena.path: arena for arena in _arenas(found, [])}
    holdings = _holdings(ledger, dead, config, unseen)
    arenas = tuple(_since(before.get(arena.path), arena) for arena in _arenas(found, unseen))
    supervised, known = _supervised(run_dir, unseen)
    members = processes.members(run_dir)
    return Sample(
        at=at,
        ledger=ledger,
        holdings=holdings,
        arenas=arenas,
        dead_sockets=_dead_sockets(run_dir),
        dead_locks=_dead_locks(run_dir, unseen),
        supervised=supervised,
        dead=dead,
        strays=tuple(
            processes.describe(process.pid)
            for process in members
            if known and not _descends(process.pid, found.supervisor_pid)
        ),
        unseen=tuple(unseen),
    )


def _ledger(run_dir: Path, config: Config, unseen: list[str]) -> LedgerPicture:
    try:
        picture = read_ledger(ledger_url(config, run_dir), config.ledger.pool)
    except LedgerSilent as error:
        unseen.append(f"the ledger: {error}")
        return LedgerPicture({}, {}, {}, frozenset())
    unseen += picture.unreadable
    return picture


def _holdings(
    ledger: LedgerPicture, dead: frozenset[Peer], config: Config, unseen: list[str]
) -> dict[Peer, Holdings]:
    living = [member for peer, member in ledger.members.items() if peer not in dead]
    reports = ask(living, "holdings", config.limits)
    found = {}
    for peer, report in reports.items():
        if isinstance(report, dict) and "error" in report:
            unseen.append(f"{peer}: {report['error']}")
            continue
        try:
            found[peer] = msgspec.convert(report, Holdings)
        except msgspec.ValidationError as error:
            unseen.append(f"{peer}: {report if isinstance(report, str) else error}")
    return found


# --- shared memory ------------------------------------------------------------------------------


def _arenas(found: ClusterRecord, unseen: list[str]) -> tuple[ArenaFile, ...]:
    arenas = []
    for path in leftovers.arenas(Path(found.arena_dir), found.arenas):
        try:
            fd = open_arena(path)
        except FileNotFoundError:
            continue  # its owner ended meanwhile
        except OSError as error:
            unseen.append(f"arena {path}: {error}")
            continue
        try:
            arenas.append(_arena(path, fd, read_header(fd)))
        except (BadHeader, ValueError) as error:
            unseen.append(f"arena {path}: {error}")
        finally:
            os.close(fd)
    return tuple(arenas)


def _arena(path: Path, fd: int, header: Header) -> ArenaFile:
    region = os.pread(fd, header.journal_offset - header.records_offset, header.records_offset)
    records = Records(memoryview(region), header.blocks_total)
    marks = (records.load(number) for number in range(header.blocks_total))
    return ArenaFile(
        path=str(path),
        owner=header.owner,
        owned=locks.is_locked(fd, header.owner.incarnation),
        holders=tuple(locks.holders(fd)),
        marks={mark.block: mark for mark in marks if mark.state not in _FREE},
    )


def _since(before: ArenaFile | None, now: ArenaFile) -> ArenaFile:
    """Return ``now`` with the blocks named that were not like that before."""
    if before is None or before.owner != now.owner:
        return now
    numbers = before.marks.keys() | now.marks.keys()
    moving = frozenset(n for n in numbers if before.marks.get(n) != now.marks.get(n))
    return replace(now, moving=moving)


# --- the run directory --------------------------------------------------------------------------


def _dead_sockets(run_dir: Path) -> tuple[str, ...]:
    """Whether somebody listens is asked of the kernel: a connection would be somebody's event."""
    listening = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[3] == _LISTENING:
            # Supervisor binds ``<path>.<pid>`` and renames it; the kernel keeps the first name.
            listening |= {fields[7], fields[7].rpartition(".")[0]}
    return tuple(str(path) for path in sorted(run_dir.glob("*.sock")) if str(path) not in listening)


def _dead_locks(run_dir: Path, unseen: list[str]) -> tuple[str, ...]:
    """Taking the lock to see whether it is free could make a start fail."""
    held = set()
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK":  # "->" stands before one that waits
                device, _, inode = fields[-3].rpartition(":")
                held.add((device, int(inode)))
    except OSError as error:
        unseen.append(f"locks: {error}")
        return ()
    dead = []
    for path in sorted(run_dir.glob("*.sock.lock")):
        try:
            info = path.stat()
        except FileNotFoundError:
            continue
        device = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}"
        if (device, info.st_ino) not in held:
            dead.append(str(path))
    return tuple(dead)


# --- processes ----------------------------------------------------------------------------------


def _supervised(run_dir: Path, unseen: list[str]) -> tuple[dict[str, float], bool]:
    """Return the workers that run, with their age, and whether supervisor answered."""
    try:
        found = Supervisor(run_dir).processes()
    except OSError as error:
        unseen.append(f"supervisor: {error}")
        return {}, False
    running = {
        str(info["name"]): float(info["now"] - info["start"])
        for info in found
        if info["statename"] == "RUNNING" and info["name"] not in SERVERS
    }
    return running, True


def _descends(pid: int, ancestor: int) -> bool:
    """Whether ``ancestor`` is the process itself or among its parents; gone ones count as such."""
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        pid = int(text[text.rindex(")") + 2 :].split()[1])
    return False
