"""The parts of a chaos run: which engine, how many faults on how many clusters, which load."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.catalogue import FAKE, REAL, Sizes

_FAKE_ENGINE = {
    "BATON_ENGINE_KIND": "fake",
    "BATON_FAKE_STEP_MS": "15",
    "BATON_FAKE_PREFILL_MS": "20",
    "BATON_LIMITS_PREFILL_CHUNK_TOKENS": "64",
    "BATON_LIMITS_PREFILL_AHEAD_MAX": "2",
    "BATON_ARENA_SIZE_MB": "1",
    "BATON_CHECK": "1",
}
_REAL_MODEL = {
    "BATON_ENGINE_KIND": "torch",
    "BATON_LIMITS_PREFILL_CHUNK_TOKENS": "128",
    "BATON_ARENA_SIZE_MB": "220",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One part. Faults and minutes are those of ``make chaos``, all clusters together."""

    name: str
    title: str
    settings: dict[str, str]
    sizes: Sizes
    faults: int
    minutes: float
    clusters: int
    clients: int
    real: bool = False
    modes: tuple[str, ...] = ("split",)
    """Of its clusters, in turn."""


PARTS = {
    part.name: part
    for part in (
        Part(
            "fake",
            "fake engine",
            _FAKE_ENGINE,
            FAKE,
            870,
            18,
            clusters=3,
            clients=5,
            modes=("split", "adaptive"),
        ),
        Part("real", "real model", _REAL_MODEL, REAL, 150, 16, clusters=1, clients=5, real=True),
        Part(
            "overlapping",
            "fake engine, overlapping faults",
            _FAKE_ENGINE,
            FAKE,
            150,
            3,
            clusters=2,
            clients=5,
            modes=("split", "adaptive"),
        ),
        Part(
            "kills",
            "real model, kills under half load",
            _REAL_MODEL,
            REAL,
            400,
            12,
            clusters=1,
            clients=8,
            real=True,
        ),
    )
}
