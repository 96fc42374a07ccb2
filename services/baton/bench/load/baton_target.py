"""What a Baton cluster's settings tell of a measurement's conditions.

Decides which settings are conditions: all that change what is computed, where, and how much of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from baton.engine.info import ModelNotPrepared, resolve_dtype
from baton.engine.packed import AUTO
from baton.runtime.config import load
from baton.runtime.model import served_model
from baton.runtime.settings import Config


def conditions_of(config: Config) -> dict[str, Any]:
    """Return dtype, form of the weights and limits as the cluster was started with.

    How many workers do what is not settled by settings: its metrics tell (``server.workers``).
    """
    dtype = f"{resolve_dtype(config.model.dtype)}, weights {_weights(config)}"
    fake = config.engine.kind == "fake"
    return {"dtype": "none: the fake engine" if fake else dtype, "limits": limits_of(config)}


def _weights(config: Config) -> str:
    """Return their kind, and of ``auto`` what it stands for here."""
    setting = config.engine.weights
    if setting != AUTO or config.engine.kind == "fake":
        return setting
    try:
        kernels = served_model(config, Path(config.cluster.run_dir)).kernels
    except ModelNotPrepared:
        return setting
    return f"{setting} ({kernels.weights})"


def limits_of(config: Config) -> dict[str, Any]:
    """Return the settings that bound or shape what a cluster does."""
    return {
        "mode": config.cluster.mode,
        "routers": config.cluster.routers,
        "gateways": config.cluster.gateways,
        "kernels": config.engine.kernels,
        "threads": config.engine.threads,
        "arena_mib": config.arena.size_mb,
        "block_size": config.arena.block_size,
        "pin": config.cores.pin,
        "lend": config.cores.lend,
        "router": msgspec.to_builtins(config.router),
        **msgspec.to_builtins(config.limits),
    }


def usual_limits() -> dict[str, Any]:
    """Return the limits of a cluster without any settings."""
    return limits_of(load(None, {}))
