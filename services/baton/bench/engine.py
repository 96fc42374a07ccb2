"""The engine alone on one core: speed, limits and quality of each kind of kernels, in one run.

Decides the method of the speeds: kinds take turns within one process, medians are kept, and time
is the calling thread's CPU time (one compute thread), so that other load on the machine costs less
than it would by the wall clock; wall time stands beside it.
"""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

import numpy as np

from baton.bench.figures import table
from baton.bench.limits import Machine, Work, measure_machine, work_of
from baton.bench.quality import LENGTH, SEQUENCES, quality
from baton.channel import huge_pages
from baton.channel.arena import DEFAULT_DIRECTORY
from baton.channel.mapping import Mapping
from baton.core.sampling import SamplingParams
from baton.engine.build import build_engine
from baton.engine.info import read_info, resolve_dtype
from baton.engine.kernels import KernelChoice, choose_kernels
from baton.engine.packed import packed_path, read_spec
from baton.engine.prepare_kernels import prepare_kernels
from baton.ports.engine import Engine, Row, SampleSpec
from baton.runtime.config import load
from baton.runtime.dirs import cache_dir
from baton.runtime.model import model_folder

PROMPTS = (512, 1024, 2048)
STREAMS = (1, 4, 8, 16)
CHUNK = 256
CONTEXTS = (64, 1000)
_GREEDY = SamplingParams(seed=1, temperature=0.0)


#: Kernels and weights that are measured.
_KINDS = (("compiled", "full"), ("compiled", "int8"), ("compiled", "int4"), ("torch", "full"))
#: The steps that are compared with their floors: streams, tokens of context.
_FLOORS = ((1, 64), (8, 1000))


def measure(repeats: int, steps: int, length: int = LENGTH) -> dict[str, object]:
    """Return speeds, limits and quality of each kind of kernels and weights.

    Args:
        repeats: of each prompt.
        steps: of each decode, and of the comparison with its floor.
        length: tokens of a sequence whose perplexity is looked at.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    config = load(None, os.environ)
    cache = cache_dir(config)
    folder = model_folder(config, cache)
    info = read_info(folder)
    served = resolve_dtype(config.model.dtype)

    def choice_of(kernels: str, weights: str, dtype: str) -> KernelChoice:
        if kernels != "torch":
            prepare_kernels(folder, dtype, cache, kernels, print, weights=weights)
        return choose_kernels(
            kernels,
            folder,
            info,
            dtype=dtype,
            block_size=config.arena.block_size,
            cache_dir=cache,
            weights=weights,
        )

    speeds: dict[str, Any] = {}
    machine = measure_machine(served)
    compared = [("float32", choice_of("compiled", "full", "float32"))]
    for kernels, weights in _KINDS:
        choice = choice_of(kernels, weights, served)
        engine = build_engine(
            folder,
            dtype=served,
            block_size=config.arena.block_size,
            threads=1,
            kernels=choice,
        )
        speed = _Speed(engine).all(repeats, steps) | {"dtype": engine.layout.dtype}
        if choice.packed is not None:
            work = work_of(read_spec(packed_path(folder, served, weights)), engine.layout)
            speed["limits"] = _limits(speed, machine, work)
            compared.append((served, choice))
        speeds[choice.name] = speed
    return {
        "machine": {"read_gb_s": machine.read_gb_s, "gflop_s": machine.gflop_s},
        "speed": speeds,
        "quality": quality(folder, compared, length),
    }


def _limits(speed: dict[str, Any], machine: Machine, work: Work) -> dict[str, Any]:
    """Return steps over their floors, and prompts as a share of their ceiling."""
    found: dict[str, Any] = {}
    for streams, context in _FLOORS:
        step = streams / speed["decode"][f"{context}"][f"{streams}"]["cpu"] * 1e3
        floor = work.floor_ms(machine, streams, context)
        found[f"{streams} x {context}"] = {
            "step_ms": round(step, 2),
            "floor_ms": round(floor, 2),
            "over": round(step / floor, 2),
        }
    for length in PROMPTS:
        share = speed["prefill"][f"{length}"]["cpu"] / work.ceiling(machine, length)
        found[f"prefill {length}"] = round(100 * share, 1)
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
        self._memory = _memory_of_an_arena(blocks * engine.layout.block_bytes)
        engine.attach("bench", self._memory.view)

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


def _memory_of_an_arena(length: int) -> Mapping:
    """Return memory as a decode worker's arena has it, without a name."""
    fd = os.open(DEFAULT_DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        huge_pages.allocate(fd, length)
        os.posix_fallocate(fd, 0, length)
        return Mapping(fd, 0, length, writable=True)
    finally:
        os.close(fd)


def page(result: dict[str, Any]) -> str:
    """Return the tables."""
    machine = result["machine"]
    return "\n\n".join(
        (
            f"Tokens per second of one core (median, the thread's CPU time), greedy; prompts in "
            f"chunks of {CHUNK}; decode of n streams with so many tokens of context.",
            _speeds(result["speed"]),
            f"Against what this core could do in the same run: it read {machine['read_gb_s']} GB/s "
            f"and computed {machine['gflop_s']} GFLOP/s (square product of torch). A step's floor "
            "is the time to read its weights, K and V; a prompt's ceiling the arithmetic alone.",
            _against_limits(result["speed"]),
            f"Shakespeare's sonnets (tests/reference), {SEQUENCES} sequences: perplexity, and how "
            "often the most likely token is that of transformers in float32.",
            table(
                ["kernels and dtype", "perplexity", "agreement"],
                [
                    [name, found["perplexity"], f"{100 * found['agreement']:.1f} %"]
                    for name, found in result["quality"].items()
                ],
            ),
        )
    )


def _speeds(result: dict[str, Any]) -> str:
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
    return table(header, lines)


def _against_limits(result: dict[str, Any]) -> str:
    header = ["kernels", *(f"step {n} x {context}, floor" for n, context in _FLOORS)]
    header += [f"prefill {n} of its ceiling" for n in PROMPTS]
    lines = []
    for name, speed in result.items():
        if "limits" not in speed:
            continue
        limits = speed["limits"]
        steps = [limits[f"{n} x {context}"] for n, context in _FLOORS]
        lines.append(
            [
                name,
                *(f"{at['step_ms']} / {at['floor_ms']} ms = {at['over']}" for at in steps),
                *(f"{limits[f'prefill {n}']} %" for n in PROMPTS),
            ]
        )
    return table(header, lines)
