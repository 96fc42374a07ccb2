"""The options of `baton bench`: their names, defaults and help texts.

What they mean for a measurement is decided in ``bench.py``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from baton.cli.numbers import above_zero, at_least_zero, count, many, whole


def add_output(parser: Any) -> None:
    """Add the options that decide what is printed and drawn."""
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write a page with plots")


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add the options of a load that is put on one server."""
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="an OpenAI-compatible server (default: the cluster here)")
    server.add_argument("--api-key", default="", metavar="KEY")
    server.add_argument("--served-model", default="", metavar="NAME", help="(default: its first)")
    server.add_argument(
        "--condition",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what it does not tell itself; with --url dtype and limits must be given",
    )
    server.add_argument(
        "--cores", type=at_least_zero, default=0.0, metavar="N", help="it may use so many"
    )
    server.add_argument(
        "--price", action="append", default=[], metavar="KIND=X", help="of a worker, by kind"
    )
    _add_workload(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--arrivals", choices=("closed", "poisson", "gamma", "trace"), default="closed"
    )
    load.add_argument("--concurrency", type=count, default=1, metavar="N", help="closed loop (1)")
    load.add_argument("--rate", type=above_zero, metavar="R", help="sessions a second, open loop")
    load.add_argument(
        "--burstiness",
        type=above_zero,
        default=1.0,
        metavar="B",
        help="gamma: 1 is Poisson, below it burstier",
    )
    _add_time(load)
    load.add_argument(
        "--requests", type=whole, default=0, metavar="N", help="end the window after so many"
    )
    load.add_argument("--slo-ttft", type=above_zero, default=2_000.0, metavar="MS", help="(2000)")
    load.add_argument(
        "--slo-gap",
        type=above_zero,
        nargs="+",
        action="extend",
        metavar="MS",
        help="bound of a request's own p99 gap (100); several (50 400): each is reckoned",
    )
    result = parser.add_argument_group("result")
    result.add_argument("--label", default="run", help="of this run in tables (run)")
    result.add_argument("--out", type=Path, metavar="FILE", help="write the result (JSON)")
    result.add_argument("--quiet", action="store_true", help="no progress bar")
    add_output(result)


def add_modes(parser: argparse.ArgumentParser) -> None:
    """Add the options of a comparison of modes."""
    _add_workload(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--arrivals", choices=("poisson", "gamma", "trace"), default="poisson")
    load.add_argument("--burstiness", type=above_zero, default=1.0, metavar="B", help="gamma")
    load.add_argument(
        "--rates",
        type=many(above_zero),
        default=(1.0, 2.0, 4.0),
        metavar="R,R",
        help="sessions a second (1,2,4)",
    )
    _add_time(load)
    modes = parser.add_argument_group("modes")
    modes.add_argument("--slo-ttft", type=above_zero, default=2_000.0, metavar="MS", help="(2000)")
    modes.add_argument(
        "--multiples",
        type=many(above_zero),
        default=(1.2, 1.5, 2.0, 3.0, 5.0),
        metavar="X,X",
        help="bounds of a request's own p99 gap, in undisturbed gaps of the split (1.2,1.5,2,3,5)",
    )
    modes.add_argument(
        "--chunks",
        type=many(count),
        default=(16, 32, 64, 128, 256, 512, 1_024, 2_048),
        metavar="N,N",
        help="chunk sizes that colocated workers are tried with (16,32,64,...,2048)",
    )
    modes.add_argument(
        "--tune", type=above_zero, default=15.0, metavar="S", help="each chunk size (15)"
    )
    modes.add_argument("--repeats", type=count, default=1, metavar="N", help="of everything (1)")
    modes.add_argument(
        "--slices", type=Path, metavar="DIR", help="keep each run there; go on with what is there"
    )
    modes.add_argument(
        "--minutes",
        type=above_zero,
        default=float("inf"),
        metavar="M",
        help="begin nothing after it",
    )
    modes.add_argument("--undisturbed", type=above_zero, default=10.0, metavar="S", help="(10)")
    foreign = parser.add_argument_group("foreign servers, which run already")
    foreign.add_argument(
        "--also", action="append", default=[], metavar="NAME=URL", help="a column more"
    )
    foreign.add_argument(
        "--also-cores", type=at_least_zero, default=0.0, metavar="N", help="each may use so many"
    )
    foreign.add_argument(
        "--condition",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what they do not tell themselves; dtype and limits must be given",
    )
    result = parser.add_argument_group("result")
    result.add_argument("--out", type=Path, metavar="FILE", help="write the result (JSON)")
    result.add_argument("--quiet", action="store_true", help="no progress bar")
    add_output(result)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide what is asked."""
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--workload",
        choices=("fixed", "azure-code", "azure-conv", "mooncake", "servegen", "sharegpt"),
        default="fixed",
    )
    work.add_argument("--prompt-tokens", type=count, default=512, metavar="N", help="fixed (512)")
    work.add_argument("--output-tokens", type=count, default=128, metavar="N", help="fixed (128)")
    work.add_argument(
        "--prompt-scale", type=above_zero, default=1.0, metavar="X", help="traces (1)"
    )
    work.add_argument(
        "--output-scale", type=above_zero, default=1.0, metavar="X", help="traces (1)"
    )
    work.add_argument(
        "--prompt-max", type=count, default=1_000_000, metavar="N", help="longest prompt"
    )
    work.add_argument(
        "--output-max", type=count, default=1_000_000, metavar="N", help="longest answer"
    )
    work.add_argument(
        "--context-max", type=count, default=1_000_000, metavar="N", help="most of both together"
    )
    work.add_argument(
        "--think", type=at_least_zero, default=1.0, metavar="S", help="between turns (1)"
    )
    work.add_argument(
        "--intrude", metavar="TOKENS@SECONDS", help="a prompt so long every so many seconds"
    )
    work.add_argument("--form", choices=("ids", "text", "chat"), default="ids", help="of prompts")
    work.add_argument("--ids", default="300-4000", metavar="LOW-HIGH", help="range of prompt ids")
    work.add_argument("--keep-eos", action="store_true", help="answers may end by themselves")
    work.add_argument("--seed", type=whole, default=0, metavar="N", help="of lengths and arrivals")
    work.add_argument(
        "--salt", type=whole, metavar="N", help="of contents (default: drawn, so none is cached)"
    )


def _add_time(load: Any) -> None:
    """Add the options that decide how long it takes."""
    load.add_argument("--warmup", type=at_least_zero, default=5.0, metavar="S", help="(5)")
    load.add_argument("--duration", type=above_zero, default=30.0, metavar="S", help="(30)")
    load.add_argument(
        "--grace",
        type=at_least_zero,
        default=60.0,
        metavar="S",
        help="for what runs at the end (60)",
    )
