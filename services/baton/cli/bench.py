"""`baton bench`: measure a server, show and compare results.

Decides where the server is found, and what is printed; measuring is
``baton.bench.load``'s work. Without ``--url`` it is the cluster that runs here, whose settings tell
the conditions; of another server the user tells them.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.cli.bench_options import add_load, add_modes, add_output
from baton.cli.client import no_cluster
from baton.cli.cluster import Cluster
from baton.cli.numbers import at_least_zero, count, share
from baton.cli.terminal import CommandError, ExitCode, say, table
from baton.core.ids import Role, WorkerRole
from baton.runtime.settings import Config

#: What a worker that has a price may be.
KINDS = (*(str(role) for role in Role if role is not Role.CLI), str(WorkerRole.MIXED))

Command = Callable[[Config, argparse.Namespace], int]
Add = Callable[..., argparse.ArgumentParser]

_RUN = """\
examples:
  baton bench run --concurrency 4 --prompt-tokens 512 --out result.json --html page.html
  baton bench run --workload azure-conv --prompt-scale 0.25 --arrivals poisson --rate 2
  baton bench run --url http://localhost:8001 --condition dtype=bf16 --condition limits=default
Ctrl-C ends the run; what was measured so far is kept and marked as partial (exit code 130).
docs/bench.md tells what every figure means.
"""
_SEARCH = """\
Doubles the rate until fewer than 90 % of the requests meet the SLO, then halves the interval.
"""
_MODES = """\
Starts clusters of its own, one after the other, on all cores this command may use: the split,
colocated workers (one with all cores, one a core; every chunk size is tried), the adaptive mode
told each SLO. Bounds of gaps are --multiples of the split's undisturbed median ITL.
examples:
  baton bench compare-modes --workload azure-conv --prompt-scale 0.5 --output-scale 0.5 \\
      --rates 0.5,1,2 --duration 60 --repeats 3 --out modes.json --html modes.html
  baton bench compare-modes ... --also vllm=http://localhost:8001 --also-cores 2 \\
      --condition dtype=bfloat16 --condition limits="chunk 256"
"""
_COMPARE = """\
Says what differs in the conditions too: two results are comparable where nothing but the one
thing under test differs.
"""


def add(commands: Any, add_command: Add) -> None:
    """Add the commands below `baton bench`."""
    bench = commands.add_parser("bench", help="measure a server under load").add_subparsers(
        title="commands", required=True, metavar="COMMAND"
    )
    run = add_command(bench, "run", _run, "put a load on a server and report its figures", _RUN)
    add_load(run)
    search = add_command(
        bench, "search", _search, "find the highest rate at which 90 %% meet the SLO", _SEARCH
    )
    add_load(search)
    search.add_argument(
        "--attainment", type=share, default=0.9, metavar="SHARE", help="that must meet it (0.9)"
    )
    search.add_argument("--probes", type=count, default=9, metavar="N", help="most runs (9)")
    show = add_command(bench, "show", _show, "print a result")
    show.add_argument("file", type=Path)
    add_output(show)
    compare = add_command(bench, "compare", _compare, "print two results side by side", _COMPARE)
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    compare.add_argument("--markdown", action="store_true", help="tables as Markdown")
    modes = add_command(
        bench,
        "compare-modes",
        _modes,
        "tell whether splitting pays for a load, by measuring",
        _MODES,
    )
    add_modes(modes)


def _run(config: Config, options: argparse.Namespace) -> int:
    from baton.bench.load.measure import measure

    _check_files(options)
    plan = _plan(config, options)
    return _measured(options, _answered(lambda: measure(plan)))


def _search(config: Config, options: argparse.Namespace) -> int:
    from baton.bench.load.search import search

    if options.arrivals == "closed":
        raise CommandError("a rate is searched in an open loop: --arrivals poisson", ExitCode.USAGE)
    _check_files(options)
    plan = _plan(config, options)
    found = _answered(lambda: search(plan, options.attainment, options.probes))
    return _measured(options, found)


def _check_files(options: argparse.Namespace) -> None:
    """Refuse files that could not be written, before hours of measuring."""
    for name in ("out", "html"):
        path: Path | None = getattr(options, name, None)
        if path is None:
            continue
        folder = path.parent
        if path.is_dir():
            raise CommandError(f"--{name} {path}: a folder; name a file in it", ExitCode.USAGE)
        if not folder.is_dir():
            raise CommandError(f"--{name} {path}: make the folder {folder} first", ExitCode.USAGE)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CommandError(f"--{name} {path}: may not write to {folder}", ExitCode.USAGE)


def _answered(measured: Callable[[], Any]) -> Any:
    """Return a result, or say in one line why there is none."""
    from baton.bench.cluster import BenchError
    from baton.bench.load.results import ResultError
    from baton.bench.load.server import ServerError

    try:
        return measured()
    except (BenchError, ResultError, ServerError) as error:
        raise CommandError(str(error)) from error


def _modes(config: Config, options: argparse.Namespace) -> int:
    from baton.bench.load.arrivals import Arrivals
    from baton.bench.load.generator import LoadPlan
    from baton.bench.load.modes import ModesPlan, compare_modes, running_server
    from baton.bench.load.running import RunPlan, Target

    _check_files(options)
    kind = Arrivals(options.arrivals)
    _check_arrivals(kind, options)
    told = dict(_pair("--condition", each) for each in options.condition)
    told.setdefault("cache_state", _cache_state(options))
    foreign = Target(url="", cores=options.also_cores, told=told)
    plan = ModesPlan(
        run=RunPlan(
            target=Target(url="", told={"cache_state": _cache_state(options)}),
            workload=_workload_plan(options),
            load=LoadPlan(
                kind=kind,
                burstiness=options.burstiness,
                warmup_s=options.warmup,
                duration_s=options.duration,
                grace_s=options.grace,
            ),
            ask=_ask_plan(options),
            slos=(),
            quiet=options.quiet,
        ),
        rates=options.rates,
        ttft_ms=options.slo_ttft,
        multiples=options.multiples,
        chunks=options.chunks,
        repeats=options.repeats,
        undisturbed_s=options.undisturbed,
        tune_s=options.tune,
        foreign=tuple(
            running_server(name, replace(foreign, url=url.rstrip("/").removesuffix("/v1")))
            for name, url in (_pair("--also", each, "NAME=URL") for each in options.also)
        ),
        # Its clusters are its own; they read the same settings.
        settings={"BATON_CONFIG": str(config.path.resolve())} if config.path else {},
        slices=options.slices,
        minutes=options.minutes,
    )
    return _measured(options, _answered(lambda: compare_modes(plan)))


def _measured(options: argparse.Namespace, result: Any) -> int:
    """Write what was asked for, print the tables, and tell whether the result is whole."""
    from baton.bench.load.results import write

    if options.out:
        write(options.out, result)
    _print(result, options)
    if options.out:
        say(f"\nresult      {options.out}")
    if result.aborted:
        # A comparison also ends when the time is over that it was given.
        by_hand = result.findings.get("ended_by_hand", True)
        return ExitCode.INTERRUPTED if by_hand else ExitCode.FAILED
    return ExitCode.OK if any(run.figures.ok for run in result.runs) else ExitCode.FAILED


def _show(_: Config, options: argparse.Namespace) -> int:
    _check_files(options)
    _print(_read(options.file), options)
    return ExitCode.OK


def _compare(_: Config, options: argparse.Namespace) -> int:
    from baton.bench.load.report import compare, sentences_on_both

    a, b = _read(options.a), _read(options.b)
    _draw(compare(a, b), markdown=options.markdown)
    for sentence in sentences_on_both(a, b):
        say(f"\n{sentence}")
    return ExitCode.OK


def _read(path: Path) -> Any:
    from baton.bench.load.results import ResultError, read

    try:
        return read(path)
    except ResultError as error:
        raise CommandError(str(error)) from error


def _print(result: Any, options: argparse.Namespace) -> None:
    from baton.bench.load.report import sentences, tables

    _draw(tables(result), markdown=options.markdown)
    for sentence in sentences(result):
        say(f"\n{sentence}")
    if options.html:
        from baton.bench.load.page import write_page

        write_page(options.html, result)
        say(f"\npage        {options.html}")


def _draw(tables: Sequence[Any], *, markdown: bool) -> None:
    from baton.bench.load.report import in_markdown

    for number, each in enumerate(tables):
        if number:
            say()
        if markdown:
            say(in_markdown(each))
        else:
            table(each.title, each.columns, each.rows)


# --- plans ----------------------------------------------------------------------------------------


def _plan(config: Config, options: argparse.Namespace) -> Any:
    from baton.bench.load.arrivals import Arrivals
    from baton.bench.load.generator import LoadPlan
    from baton.bench.load.results import Slo
    from baton.bench.load.running import RunPlan

    kind = Arrivals(options.arrivals)
    _check_arrivals(kind, options)
    if kind in (Arrivals.POISSON, Arrivals.GAMMA) and options.rate is None:
        raise CommandError(f"--arrivals {kind} needs --rate", ExitCode.USAGE)
    return RunPlan(
        target=_target(config, options),
        workload=_workload_plan(options),
        load=LoadPlan(
            kind=kind,
            rate=options.rate,
            burstiness=options.burstiness,
            concurrency=options.concurrency,
            warmup_s=options.warmup,
            duration_s=options.duration,
            requests=options.requests,
            grace_s=options.grace,
        ),
        ask=_ask_plan(options),
        slos=tuple(Slo(options.slo_ttft, gap) for gap in options.slo_gap or [100.0]),
        label=options.label,
        quiet=options.quiet,
    )


def _check_arrivals(kind: str, options: argparse.Namespace) -> None:
    if kind == "trace" and options.workload in ("fixed", "sharegpt"):
        raise CommandError(f"{options.workload} has no arrival times of its own", ExitCode.USAGE)


def _workload_plan(options: argparse.Namespace) -> Any:
    """Return the workload that the options ask for."""
    from baton.bench.load.workload import WorkloadName, WorkloadPlan

    intruder_tokens, every_s = 0, 6.0
    if options.intrude:
        found = re.fullmatch(r"(\d+)@(\d+(?:\.\d+)?)", options.intrude)
        if not found or not int(found[1]) or not float(found[2]):
            raise CommandError(f"--intrude {options.intrude}: not TOKENS@SECONDS", ExitCode.USAGE)
        if options.arrivals == "closed":
            raise CommandError("--intrude needs an open loop", ExitCode.USAGE)
        intruder_tokens, every_s = int(found[1]), float(found[2])
    ids = re.fullmatch(r"(\d+)-(\d+)", options.ids)
    if not ids or int(ids[1]) >= int(ids[2]):
        raise CommandError(f"--ids {options.ids}: not LOW-HIGH", ExitCode.USAGE)
    salt = options.salt
    return WorkloadPlan(
        name=WorkloadName(options.workload),
        seed=options.seed,
        salt=int.from_bytes(os.urandom(6)) if salt is None else salt,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        prompt_scale=options.prompt_scale,
        output_scale=options.output_scale,
        prompt_max=options.prompt_max,
        output_max=options.output_max,
        context_max=options.context_max,
        think_s=options.think,
        ids=(int(ids[1]), int(ids[2])),
        intruder_tokens=intruder_tokens,
        intruder_every_s=every_s,
    )


def _ask_plan(options: argparse.Namespace) -> Any:
    """Return how requests are put."""
    from baton.bench.load.asking import AskPlan, PromptForm

    return AskPlan(form=PromptForm(options.form), ignore_eos=not options.keep_eos)


def _target(config: Config, options: argparse.Namespace) -> Any:
    from baton.bench.load.baton_target import conditions_of
    from baton.bench.load.running import MUST_BE_TOLD, Target

    told = dict(_pair("--condition", each) for each in options.condition)
    told.setdefault("cache_state", _cache_state(options))
    prices = {name: _price(x) for name, x in (_pair("--price", p, "KIND=X") for p in options.price)}
    if unknown := sorted(prices.keys() - set(KINDS)):
        words = f"no worker is a {unknown[0]}: there are {', '.join(KINDS)}"
        raise CommandError(f"--price {unknown[0]}: {words}", ExitCode.USAGE)
    url, key = options.url, options.api_key
    roots: tuple[int, ...] = ()
    if url is None:
        cluster = Cluster(config, os.environ, say)
        found = cluster.running()
        if found is None:
            raise no_cluster(config)
        started = cluster.started_with()
        told = conditions_of(started) | told
        url, roots = found.url, (found.supervisor_pid,)
        key = key or next(iter(started.gateway.api_keys), "")
    if missing := [name for name in MUST_BE_TOLD if not told.get(name)]:
        words = " ".join(f"--condition {name}=..." for name in missing)
        raise CommandError(
            f"a result without its conditions is none: tell them with {words}", ExitCode.USAGE
        )
    return Target(
        url=url.rstrip("/").removesuffix("/v1"),
        api_key=key,
        model=options.served_model,
        roots=roots,
        cores=options.cores,
        prices=prices,
        told=told,
    )


def _cache_state(options: argparse.Namespace) -> str:
    if options.salt is None:
        return "contents drawn for this run: a prefix is cached only where the workload repeats it"
    return "contents by a given salt: cached where the server has answered them before"


def _pair(option: str, text: str, form: str = "NAME=VALUE") -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise CommandError(f"{option} {text}: not {form}", ExitCode.USAGE)
    return name, value


def _price(text: str) -> float:
    try:
        return at_least_zero(text)
    except argparse.ArgumentTypeError as error:
        raise CommandError(f"--price: {error}", ExitCode.USAGE) from None
