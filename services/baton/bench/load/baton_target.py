"""What a Baton cluster's settings tell of a measurement's conditions.

Decides which settings are conditions: all that change what is computed, where, and how much of it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.engine.info import resolve_dtype
from baton.runtime.settings import Config


def conditions_of(config: Config) -> dict[str, Any]:
    """Return dtype and limits as the cluster was started with."""
    fake = config.engine.kind == "fake"
    return {
        "dtype": "none: the fake engine" if fake else resolve_dtype(config.model.dtype),
        "limits": {
            "mode": config.cluster.mode,
            "prefill": config.cluster.prefill,
            "decode": config.cluster.decode,
            "routers": config.cluster.routers,
            "gateways": config.cluster.gateways,
            "kernels": config.engine.kernels,
            "threads": config.engine.threads,
            "arena_mib": config.arena.size_mb,
            "block_size": config.arena.block_size,
            "pin": config.cores.pin,
            "router": msgspec.to_builtins(config.router),
            **msgspec.to_builtins(config.limits),
        },
    }
