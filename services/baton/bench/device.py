"""The engine on a device (``BATON_ENGINE_DEVICE=cuda``): speed of steps, with and without row
invariance, and of what a hand-over costs there.

Decides the method: wall time of whole steps (they return when the device is done), in memory of the
device that was made and mapped as an arena's is; medians are kept. With ``memfd`` it runs on the
host, which says nothing about a GPU.
"""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

import numpy as np

from baton.bench.figures import table
from baton.core.sampling import SamplingParams
from baton.engine.build import build_device, build_engine
from baton.engine.kernels import device_kernels
from baton.ports.channel import BlockCheck
from baton.ports.engine import Row, SampleSpec
from baton.runtime.config import load
from baton.runtime.dirs import cache_dir
from baton.runtime.model import model_folder, served_model

PROMPTS = (512, 2048)
STREAMS = (1, 8, 32, 128)
CONTEXTS = (64, 1000)
CHUNK = 512
#: Steps before the measured ones: each shape is run once as it is, and then captured.
WARM = 3
_GREEDY = SamplingParams(seed=1, temperature=0.0)


def measure(repeats: int, steps: int) -> dict[str, object]:
    """Return tokens per second of prompts and decode steps, and GB/s of checksums.

    Args:
        repeats: of each prompt.
        steps: of each decode.
    """
    config = load(None, os.environ)
    if config.engine.device == "cpu":
        raise SystemExit("set BATON_ENGINE_DEVICE=cuda (see docs/bench.md)")
    model = served_model(config, cache_dir(config))
    folder = model_folder(config, cache_dir(config))
    found: dict[str, Any] = {}
    for invariance in ("on", "off"):
        kernels = device_kernels(config.engine.device, invariance=invariance)
        engine: Any = build_engine(
            folder,
            dtype=model.layout.dtype,
            block_size=config.arena.block_size,
            kernels=kernels,
        )
        engine.use_threads(len(os.sched_getaffinity(0)))
        speed = _Speed(engine, config.engine.device)
        found[kernels.name] = speed.all(repeats, steps) | {"device": engine.device_name}
        speed.close()
    return {"dtype": model.layout.dtype, "model": model.name, "speed": found}


class _Speed:
    """One engine on memory of its own."""

    def __init__(self, engine: Any, device: str) -> None:
        self._engine = engine
        self._size = engine.layout.block_size
        self._draw = np.random.default_rng(0)
        context = engine.info.context_max
        self._prompts = [length for length in PROMPTS if length < context]
        self._contexts = [length for length in CONTEXTS if length + 64 < context]
        place = build_device(device)
        each = -(-(max(self._contexts) + 64) // self._size) + 1
        room = place.free_bytes() // 2 // engine.layout.block_bytes
        self._streams = [streams for streams in STREAMS if streams * each <= room]
        longest = max(self._prompts)
        self._total = max(max(self._streams) * each, -(-longest // self._size) + 1)
        self._fd = place.make(self._total * engine.layout.block_bytes)
        self._blocks = place.map(self._fd, engine.layout, self._total)
        engine.attach("bench", self._blocks.memory)

    def close(self) -> None:
        self._engine.detach("bench")
        self._blocks.close()
        os.close(self._fd)

    def all(self, repeats: int, steps: int) -> dict[str, Any]:
        prefill = {}
        for length in self._prompts:
            times = [self._prefill(length) for _ in range(WARM + repeats)][WARM:]
            prefill[f"{length}"] = round(length / median(times), 1)
        decode: dict[str, Any] = {}
        for context in self._contexts:
            for streams in self._streams:
                times = self._decode(streams, context, WARM + steps)[WARM:]
                decode[f"{streams} x {context}"] = {
                    "tokens_s": round(streams / median(times), 1),
                    "step_ms": round(1e3 * median(times), 3),
                    "worst_ms": round(1e3 * max(times), 3),
                }
        return {"prefill": prefill, "decode": decode, "checksum_gb_s": self._checksums(repeats)}

    def _timed(self, rows: list[Row]) -> float:
        began = time.perf_counter()
        self._engine.step(rows)
        return time.perf_counter() - began

    def _ids(self, count: int) -> Any:
        return self._draw.integers(0, self._engine.info.vocab_size, count).astype(np.int32)

    def _prefill(self, length: int) -> float:
        ids, blocks = self._ids(length), np.arange(-(-length // self._size), dtype=np.int32)
        seconds = 0.0
        for start in range(0, length, CHUNK):
            end = min(start + CHUNK, length)
            spec = SampleSpec(_GREEDY, 0, ids, ()) if end == length else None
            seconds += self._timed([Row("r", ids[start:end], start, blocks, "bench", spec)])
        return seconds

    def _decode(self, streams: int, context: int, steps: int) -> list[float]:
        each = -(-(context + steps) // self._size)
        tables = [np.arange(n * each, (n + 1) * each, dtype=np.int32) for n in range(streams)]
        ids = self._ids(context)
        spec = SampleSpec(_GREEDY, 0, ids, ())
        return [
            self._timed(
                [
                    Row(f"{n}", ids[:1], context + step, blocks, "bench", spec)
                    for n, blocks in enumerate(tables)
                ]
            )
            for step in range(steps)
        ]

    def _checksums(self, repeats: int) -> float:
        size = self._size
        checks = [BlockCheck(n, n, size, bytes(16)) for n in range(min(self._total, 128))]
        times = []
        for _ in range(WARM + repeats):
            began = time.perf_counter()
            self._blocks.checksums(checks)
            times.append(time.perf_counter() - began)
        nbytes: int = len(checks) * self._engine.layout.block_bytes
        rate: float = nbytes / median(times[WARM:]) / 1e9
        return round(rate, 2)


def page(result: dict[str, Any]) -> str:
    """Return the tables."""
    speed = result["speed"]
    first = next(iter(speed.values()))
    header = ["kernels", *(f"prompt {n}" for n in first["prefill"]), "checksums, GB/s"]
    prompts = [
        [name, *found["prefill"].values(), found["checksum_gb_s"]] for name, found in speed.items()
    ]
    steps = [
        [name, *(f"{at['step_ms']} ({at['tokens_s']}/s)" for at in found["decode"].values())]
        for name, found in speed.items()
    ]
    return "\n\n".join(
        (
            f"{result['model']} in {result['dtype']} on {first['device']}; medians of wall time, "
            f"prompts in chunks of {CHUNK} tokens, in tokens per second.",
            table(header, prompts),
            "Decode steps in ms (and tokens per second), by streams x tokens of context.",
            table(["kernels", *first["decode"]], steps),
        )
    )
