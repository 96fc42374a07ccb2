"""The settings a cluster was started with, as one file that all its processes read.

Decides the values that depend on the place: names that keep two checkouts apart, a port where any
would do, absolute paths. The file is written once a start; what a process reads after a restart is
what its siblings read before. So settings that are said later are told apart, not taken.
"""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec

from baton.engine.prepared import find_prepared
from baton.runtime.config import load, rows
from baton.runtime.dirs import cache_dir
from baton.runtime.settings import SECTIONS, Config


def resolve(
    config: Config, run_dir: Path, model_folder: Path | None = None, cache: Path | None = None
) -> Config:
    """Return ``config`` with everything decided that its processes must agree on.

    ``model_folder`` is the prepared model, ``cache`` where its kernels are too; the fake engine has
    neither.
    """
    cluster = msgspec.structs.replace(config.cluster, run_dir=str(run_dir))
    if config.sources["cluster.name"] == "default":
        # For people: in tables and logs two checkouts are told apart.
        last = run_dir.name.rpartition("-")[2][:12]
        cluster = msgspec.structs.replace(cluster, name=_cluster_name(f"baton-{last}"))
    gateway = config.gateway
    if not gateway.uds and gateway.port == 0:
        gateway = msgspec.structs.replace(gateway, port=free_port(gateway.host))
    model = config.model
    if model_folder is not None:
        model = msgspec.structs.replace(model, path=str(model_folder))
    if cache is not None:
        model = msgspec.structs.replace(model, cache_dir=str(cache))
    sections = {name: getattr(config, name) for name in SECTIONS}
    sections |= {"cluster": cluster, "gateway": gateway, "model": model}
    return Config(**sections, path=config.path, sources=config.sources)


def _cluster_name(wanted: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in wanted.lower())[:32]


def write(config: Config, path: Path) -> Config:
    """Write all settings to ``path`` (mode 0600) and return them as its readers will see them."""
    lines = [f"# Written by `baton up` from {config.path or 'the defaults'}; edits are lost.\n"]
    for section, cls in SECTIONS.items():
        lines.append(f"\n[{section}]\n")
        for name in cls.__struct_fields__:
            value = getattr(getattr(config, section), name)
            # Texts, numbers and flat lists look the same in JSON and in TOML.
            lines.append(f"{name} = {msgspec.json.encode(value).decode()}\n")
    path.touch(mode=0o600)
    path.write_text("".join(lines), encoding="utf-8")
    return load(path, {})


def differences(config: Config, started: Config) -> list[str]:
    """Return, one setting each, what is said now that a running cluster was not started with.

    Only what the file or the environment sets counts, and nothing of the place: a port that the
    kernel chose, a path that was made absolute.
    """
    model: tuple[Path | None, Path | None] = (None, None)
    if config.engine.kind != "fake":
        cache = cache_dir(config)
        model = find_prepared(config.model.path, cache), cache
    now = resolve(config, Path(started.cluster.run_dir), *model)
    found = []
    for row, old in zip(rows(now), rows(started), strict=True):
        section, _, name = row.key.partition(".")
        values = [getattr(getattr(each, section), name) for each in (now, started)]
        chosen = row.key == "gateway.port" and config.gateway.port == 0
        if row.source != "default" and values[0] != values[1] and not chosen:
            found.append(f"{row.key} = {row.value} ({row.source}; it runs with {old.value})")
    return found


def free_port(host: str) -> int:
    """Return a TCP port nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
