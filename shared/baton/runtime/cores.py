"""Which process runs on which cores, with how many compute threads.

Decides the plan from the settings, the cores this process may use and the cgroup's quota. Several
compute processes that each take a thread for every core of the host are many times slower than
one, so the number of threads is always explicit, and set before a numeric library is loaded.
Every process of a cluster starts with the same affinity and so arrives at the same plan.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton.core.ids import Role
from baton.runtime.config import ConfigError, worker_ids
from baton.runtime.settings import Config

_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one process runs."""

    cores: tuple[int, ...]
    """Empty: wherever the kernel likes."""
    threads: int
    """Compute threads, >= 1."""
    borrows: tuple[int, ...] = ()
    """Cores of other workers that it may compute on while those do not."""


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Where every process of the cluster runs."""

    workers: Mapping[str, Placement]
    """By worker_id."""
    rest: Placement
    """The ledger's server and whatever else is started."""
    why: str
    """One line for the log."""


def plan_cores(
    config: Config,
    available: Collection[int] | None = None,
    quota: float | None = None,
) -> CorePlan:
    """Return who runs where.

    Args:
        config: the settings.
        available: cores that may be used; this process's affinity by default.
        quota: the cgroup's limit in cores, ``None`` to read it; ``inf`` for no limit.

    Raises:
        ConfigError: a core named in ``[cores]`` may not be used.
    """
    usable = sorted(os.sched_getaffinity(0) if available is None else available)
    if quota is None:
        quota = cgroup_cores()
    count = max(1, int(min(len(usable), quota)))
    _check_named(config, usable)
    named = config.cores.prefill or config.cores.decode or config.cores.rest
    if config.cores.pin == "off":
        return _unpinned(config, count, "pinning is off")
    if count == 1 and not named:
        return _unpinned(config, count, "one core")
    if count < len(usable) and not named:
        # Which of the host's cores are ours to take is unknown: others have the same quota.
        return _unpinned(config, count, f"the cgroup allows {quota:g} of {len(usable)} cores")
    return _pinned(config, usable)


def set_threads(placement: Placement, environ: MutableMapping[str, str] = os.environ) -> None:
    """Say how many threads libraries may start; before any numeric one is imported."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environ[variable] = str(placement.threads)
    # numpy's makes its pool when it is loaded, which no fork survives; nothing here multiplies
    # with it.
    environ["OPENBLAS_NUM_THREADS"] = "1"
    if len(placement.cores) < placement.threads:
        # Threads that spin while they wait would take the cores of those that work.
        environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environ["TOKENIZERS_PARALLELISM"] = "false"


def cgroup_cores(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float:
    """Return how many cores' time the cgroup (v2 or v1) allows; ``inf`` without a limit."""
    least = float("inf")
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return least
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "cpu", "cpu,cpuacct"):
            continue
        base = root / controllers if controllers else root
        folder = base / group.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(base):
                least = min(least, _quota(place))
    return least


def _quota(folder: Path) -> float:
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if quota in ("max", "-1") else int(quota) / int(period)


def _check_named(config: Config, usable: Sequence[int]) -> None:
    for name in ("prefill", "decode", "rest"):
        for core in getattr(config.cores, name):
            if core not in usable:
                raise ConfigError(
                    f"[cores] {name} names core {core} (from {config.sources[f'cores.{name}']}): "
                    f"this process may use {', '.join(map(str, usable))}"
                )


def _unpinned(config: Config, count: int, why: str) -> CorePlan:
    roles = worker_ids(config)
    engines = sum(role in (Role.PREFILL, Role.DECODE) for role, _ in roles)
    threads = config.engine.threads or max(1, count // engines)
    one = Placement((), 1)
    workers = {
        worker_id: Placement((), threads) if role in (Role.PREFILL, Role.DECODE) else one
        for role, worker_id in roles
    }
    return CorePlan(workers, one, f"not pinned: {why}; {threads} compute thread(s) a worker")


def _pinned(config: Config, usable: Sequence[int]) -> CorePlan:
    prefill_cores, decode_cores = _sides(config, usable)
    rest = Placement(config.cores.rest or prefill_cores, 1)
    by_role: dict[Role, list[str]] = {}
    for role, worker_id in worker_ids(config):
        by_role.setdefault(role, []).append(worker_id)
    workers: dict[str, Placement] = {}
    for role, names in by_role.items():
        if role in (Role.PREFILL, Role.DECODE):
            side = prefill_cores if role is Role.PREFILL else decode_cores
            shared = len(side) < len(names)
            for worker_id, cores in zip(names, _shares(side, len(names)), strict=True):
                threads = config.engine.threads or (1 if shared else len(cores))
                workers[worker_id] = Placement(cores, threads)
        else:
            workers.update(dict.fromkeys(names, rest))
    if _lends(config):
        engines = [name for role, name in worker_ids(config) if role in (Role.PREFILL, Role.DECODE)]
        workers |= _with_loans({name: workers[name] for name in engines})
    return CorePlan(
        workers,
        rest,
        f"prefill {list(prefill_cores)}, decode {list(decode_cores)}, rest {list(rest.cores)}",
    )


def _lends(config: Config) -> bool:
    """Whether workers lend their cores. The pure modes do not by themselves: what they are compared
    by is the cores that each side has."""
    lend = config.cores.lend
    return lend == "on" or (lend == "auto" and config.cluster.mode == "adaptive")


def _with_loans(workers: Mapping[str, Placement]) -> dict[str, Placement]:
    """Let each worker borrow the cores of the others that are one worker's alone: of a core that
    several compute on nobody could say that it is idle."""
    owners = Counter(core for placement in workers.values() for core in placement.cores)
    lent = {core for core, count in owners.items() if count == 1}
    return {
        name: replace(placement, borrows=tuple(sorted(lent - set(placement.cores))))
        for name, placement in workers.items()
    }


def _sides(config: Config, usable: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return prefill's and decode's cores; in colocated mode both have all of them."""
    cores = config.cores
    if config.cluster.mode == "colocated":
        return cores.prefill or tuple(usable), cores.decode or tuple(usable)
    if cores.prefill and cores.decode:
        return cores.prefill, cores.decode
    taken = set(cores.prefill) | set(cores.decode)
    free = [core for core in usable if core not in taken] or list(usable)
    if cores.decode:
        return tuple(free), cores.decode
    if cores.prefill:
        return cores.prefill, tuple(free)
    return _halves(free)


def _halves(free: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split so that the hardware threads of one core stay on one side where that is possible."""
    groups: dict[tuple[int, int], list[int]] = {}
    for core in free:
        groups.setdefault(_physical(core), []).append(core)
    parts = list(groups.values()) if len(groups) > 1 else [[core] for core in free]
    half = (len(parts) + 1) // 2
    first = [core for part in parts[:half] for core in part]
    second = [core for part in parts[half:] for core in part]
    return tuple(first), tuple(second or first)


def _physical(core: int) -> tuple[int, int]:
    topology = _CPUS / f"cpu{core}" / "topology"
    try:
        package = int((topology / "physical_package_id").read_text())
        return package, int((topology / "core_id").read_text())
    except (OSError, ValueError):
        return -1, core


def _shares(cores: tuple[int, ...], workers: int) -> list[tuple[int, ...]]:
    """Return each worker's cores: disjoint if there are enough, else all of them to everybody."""
    if len(cores) < workers:
        return [cores] * workers
    size, more = divmod(len(cores), workers)
    shares, start = [], 0
    for number in range(workers):
        end = start + size + (number < more)
        shares.append(cores[start:end])
        start = end
    return shares
