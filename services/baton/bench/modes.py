"""``python -m baton.bench modes``: the comparison of modes that is kept under ``benchmarks/``.

Decides which loads it is made of and how thorough it is; how modes are compared is decided in
:mod:`baton.bench.load.modes`. Two cores and a small model cannot replay the traces as they are, so
lengths are scaled; rates are one that keeps two cores busy and one that is too much for every mode.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from baton.bench.cluster import BenchError
from baton.bench.ends import term_interrupts
from baton.bench.foreign import VLLM_CHUNKS, vllm_columns
from baton.bench.load.arrivals import Arrivals
from baton.bench.load.asking import AskPlan
from baton.bench.load.generator import LoadPlan
from baton.bench.load.modes import CHUNKS, MULTIPLES, Foreign, ModesPlan, compare_modes
from baton.bench.load.page import write_page
from baton.bench.load.report import markdown, sentences
from baton.bench.load.results import Result, write
from baton.bench.load.running import RunPlan, Target
from baton.bench.load.workload import WorkloadName, WorkloadPlan
from baton.runtime import config

SLICES = Path("build/modes")
TTFT_MS = 2_000.0
#: Rates are for a machine with such gaps; a slower one is asked for less.
GAP_MS = 12.0
CACHE_STATE = "started for these runs; texts of a rate and repeat come once"
#: What every compared server takes, whatever its own limit is.
CONTEXT_MAX = 4_000


@dataclass(frozen=True, slots=True)
class Load:
    """One trace, scaled."""

    trace: WorkloadName
    prompt_scale: float
    output_scale: float
    rates: tuple[float, ...]
    """Sessions a second; the first keeps two cores busy whose undisturbed gaps are ``GAP_MS``, the
    other is more than they can do."""


LOADS = {
    "azure-conv": Load(WorkloadName.AZURE_CONV, 0.5, 0.25, (1.6, 3.5)),
    "azure-code": Load(WorkloadName.AZURE_CODE, 0.25, 1.0, (1.8, 4.0)),
    "mooncake": Load(WorkloadName.MOONCAKE, 0.05, 0.2, (1.3, 3.0)),
}


@dataclass(frozen=True, slots=True)
class Effort:
    """How thorough it is."""

    multiples: tuple[float, ...] = MULTIPLES
    chunks: tuple[int, ...] = CHUNKS
    warmup_s: float = 4.0
    duration_s: float = 30.0
    tune_s: float = 10.0
    undisturbed_s: float = 10.0
    vllm_chunks: tuple[int, ...] = VLLM_CHUNKS


#: By the options that ask for less than all of it. ``short``: fewer points, each as good: 12
#: minutes a load. ``quick``: a look whether it works.
EFFORTS = {
    "full": Effort(),
    "short": Effort((1.2, 2.0, 5.0), (32, 128, 512), vllm_chunks=(0, 64)),
    "quick": Effort((1.5, 3.0), (64, 512), 1.0, 5.0, 3.0, 3.0, (0, 64)),
}


def main(arguments: Sequence[str]) -> int:
    """Measure what is missing, as far as time allows, and write a result of each load."""
    options = _options(arguments)
    began = monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    bad = 0
    with term_interrupts(), tempfile.TemporaryDirectory(prefix="modes-") as scratch:
        foreign = vllm_columns(Path(scratch), EFFORTS[options.effort].vllm_chunks)
        # One repeat of every load before the next one: a part of the time is a part of each.
        for repeats in range(1, options.repeats + 1):
            for name in options.load or LOADS:
                left = options.minutes - (monotonic() - began) / 60
                plan = _plan(name, options, foreign, repeats=repeats, minutes=left)
                try:
                    result = compare_modes(plan)
                except BenchError as error:
                    sys.stdout.write(f"{name}: {error}\n")
                    bad += 1
                    continue
                _write(options.out / f"modes_{name}", result)
                if result.aborted:
                    bad += 1
                if result.findings["ended_by_hand"]:
                    raise KeyboardInterrupt
    return 1 if bad else 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="baton.bench modes", description=__doc__)
    parser.add_argument("load", nargs="*", help=f"of {', '.join(LOADS)}; by default all")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after")
    parser.add_argument("--repeats", type=int, default=3, help="of everything but tuning (3)")
    parser.add_argument("--slices", type=Path, default=SLICES, help="where each run is kept")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="where results go")
    for name, words in (
        ("quick", "a look, not a result worth keeping"),
        ("short", "three bounds, three chunk sizes"),
    ):
        parser.add_argument(
            f"--{name}", dest="effort", action="store_const", const=name, default="full", help=words
        )
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.load if name not in LOADS]:
        parser.error(f"unknown load {unknown[0]!r}: allowed are {', '.join(LOADS)}")
    return options


def _plan(
    name: str,
    options: argparse.Namespace,
    foreign: tuple[Foreign, ...],
    *,
    repeats: int,
    minutes: float,
) -> ModesPlan:
    load, effort = LOADS[name], EFFORTS[options.effort]
    fake = config.load(config.config_path(None, os.environ), os.environ).engine.kind == "fake"
    return ModesPlan(
        run=RunPlan(
            target=Target(
                url="",
                told={"cache_state": CACHE_STATE},
            ),
            workload=WorkloadPlan(
                name=load.trace,
                salt=int.from_bytes(os.urandom(6)),
                prompt_scale=load.prompt_scale,
                output_scale=load.output_scale,
                context_max=CONTEXT_MAX,
                # The fake engine's tokens are bytes.
                ids=(97, 122) if fake else (300, 4_000),
            ),
            load=LoadPlan(
                kind=Arrivals.POISSON, warmup_s=effort.warmup_s, duration_s=effort.duration_s
            ),
            ask=AskPlan(),
            slos=(),
        ),
        rates=load.rates,
        rates_for_ms=GAP_MS,
        ttft_ms=TTFT_MS,
        multiples=effort.multiples,
        chunks=effort.chunks,
        repeats=repeats,
        undisturbed_s=effort.undisturbed_s,
        tune_s=effort.tune_s,
        foreign=foreign,
        slices=options.slices / f"{name}-{options.effort}",
        minutes=minutes,
    )


def _write(path: Path, result: Result) -> None:
    write(path.with_suffix(".json"), result)
    write_page(path.with_suffix(".html"), result)
    path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    said = "\n".join(sentences(result))
    sys.stdout.write(f"{path.with_suffix('.md')}\n{said}\n")
