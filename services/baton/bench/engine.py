"""The engine alone on one core: prefill and decode speed of each kind of kernels, in one run.

Decides the method: kinds take turns within one process, medians are kept, and time is the calling
thread's CPU time (one compute thread), so that other load on the machine costs less than it would
by the wall clock; wall time stands beside it.
"""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

import numpy as np

from baton.bench.figures import table
from baton.core.sampling import SamplingParams
from baton.engine.build import build_engine
from baton.engine.info import read_info
from baton.ports.engine import Engine, Row, SampleSpec
from baton.runtime.config import load
from baton.runtime.dirs import cache_dir
from baton.runtime.model import kernel_choice, model_folder

PROMPTS = (512, 1024, 2048)
STREAMS = (1, 4, 8, 16)
CHUNK = 256
CONTEXTS = (64, 1000)
_GREEDY = SamplingParams(seed=1, temperature=0.0)


def measure(repeats: int, steps: int) -> dict[str, object]:
    """Return tokens per second by kind of kernels."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    config = load(None, os.environ)
    cache = cache_dir(config)
    folder = model_folder(config, cache)
    info = read_info(folder)
    found: dict[str, object] = {}
    for setting in ("compiled", "torch"):
        os.environ["BATON_ENGINE_KERNELS"] = setting
        choice = kernel_choice(load(None, os.environ), folder, info, cache)
        engine = build_engine(
            folder,
            dtype=config.model.dtype,
            block_size=config.arena.block_size,
            threads=1,
            kernels=choice,
        )
        found[choice.name] = _Speed(engine).all(repeats, steps) | {"dtype": engine.layout.dtype}
    return found


class _Speed:
    """One engine on memory of its own."""

    def __init__(self, engine: Engine) -> None:
        size = engine.layout.block_size
        self._engine = engine
        self._size = size
        self._draw = np.random.default_rng(0)
        tokens = max(*PROMPTS, max(STREAMS) * (max(CONTEXTS) + 64))
        blocks = tokens // size + 2 * max(STREAMS)
        self._memory = bytearray(blocks * engine.layout.block_bytes)
        engine.attach("bench", memoryview(self._memory))

    def all(self, repeats: int, steps: int) -> dict[str, Any]:
        self._prefill(PROMPTS[0])  # memory is touched, kernels are chosen
        prefill = {
            f"{n}": self._rate(n, [self._prefill(n) for _ in range(repeats)]) for n in PROMPTS
        }
        decode = {
            f"{context}": {f"{n}": self._rate(n, self._decode(n, context, steps)) for n in STREAMS}
            for context in CONTEXTS
        }
        return {"prefill": prefill, "decode": decode}

    @staticmethod
    def _rate(tokens: int, times: list[tuple[float, float]]) -> dict[str, float]:
        cpu, wall = (median(column) for column in zip(*times, strict=True))
        return {"cpu": round(tokens / cpu, 1), "wall": round(tokens / wall, 1)}

    def _timed(self, rows: list[Row]) -> tuple[float, float]:
        cpu, wall = time.thread_time(), time.perf_counter()
        self._engine.step(rows)
        return time.thread_time() - cpu, time.perf_counter() - wall

    def _ids(self, count: int) -> Any:
        return self._draw.integers(0, self._engine.info.vocab_size, count).astype(np.int32)

    def _prefill(self, length: int) -> tuple[float, float]:
        ids, blocks = self._ids(length), np.arange(length // self._size + 1, dtype=np.int32)
        parts = []
        for start in range(0, length, CHUNK):
            end = min(start + CHUNK, length)
            spec = SampleSpec(_GREEDY, 0, ids, ()) if end == length else None
            parts.append(self._timed([Row("r", ids[start:end], start, blocks, "bench", spec)]))
        return sum(cpu for cpu, _ in parts), sum(wall for _, wall in parts)

    def _decode(self, streams: int, context: int, steps: int) -> list[tuple[float, float]]:
        each = (context + steps) // self._size + 1
        tables = [np.arange(i * each, (i + 1) * each, dtype=np.int32) for i in range(streams)]
        ids = self._ids(context)
        return [
            self._timed(
                [
                    Row(str(i), ids[:1], context + step, table, "bench", self._spec(ids))
                    for i, table in enumerate(tables)
                ]
            )
            for step in range(steps)
        ]

    @staticmethod
    def _spec(ids: Any) -> SampleSpec:
        return SampleSpec(_GREEDY, 0, ids, ())


def page(result: dict[str, Any]) -> str:
    """Return the tables."""
    header = ["kernels", "dtype", *(f"prefill {n}" for n in PROMPTS)]
    header += [f"decode {n} x {context}" for context in CONTEXTS for n in STREAMS]
    lines = [
        [
            name,
            found["dtype"],
            *(found["prefill"][f"{n}"]["cpu"] for n in PROMPTS),
            *(
                found["decode"][f"{context}"][f"{n}"]["cpu"]
                for context in CONTEXTS
                for n in STREAMS
            ),
        ]
        for name, found in result.items()
    ]
    return (
        f"Tokens per second of one core (median, the thread's CPU time), greedy; prompts in chunks "
        f"of {CHUNK}; decode of n streams with so many tokens of context.\n\n"
        + table(header, lines)
    )
