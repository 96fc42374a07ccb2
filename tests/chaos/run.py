"""``python -m chaos.run``: faults by the thousand on clusters of real processes (``make chaos``).

Decides which parts run and on how many clusters side by side (each in a process of its own), and
the exit code: 1 for anything wrong, silent or leaked, and, unless faults overlap, for any failed
request as well. What each cluster found is a slice, a file of its own; the report is made of all
slices there are, so ``--append`` adds to an earlier run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson

from baton.bench.conditions import conditions
from chaos import report
from chaos.drive import Run, Share, say
from chaos.parts import PARTS, Part
from chaos.place import place

SLICES = Path("build/chaos")


def main() -> int:
    """Run the parts, print, and write ``chaos.md`` and ``chaos.json``."""
    options = _options()
    if options.share:
        return _one_share(options)
    # As Ctrl-C: what runs below is ended in order, clusters and all.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not options.append:
        shutil.rmtree(options.slices, ignore_errors=True)
    options.slices.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    codes = [_part(PARTS[name], options) for name in options.part]
    runs = _merged(options.slices)
    record = {"benchmark": "chaos", "runs": runs}
    path = options.out / "chaos"
    path.with_suffix(".json").write_bytes(
        orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )
    path.with_suffix(".md").write_text(report.page(runs), encoding="utf-8")
    say(report.page(runs))
    bad = [run["title"] for run in runs if report.is_bad(run)]
    say(f"bad: {', '.join(bad)}" if bad else "nothing wrong, silent, failed or leaked")
    return 1 if bad or any(codes) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos.run", description=__doc__)
    parser.add_argument("--part", nargs="*", choices=sorted(PARTS), default=list(PARTS))
    parser.add_argument("--faults", type=int, help="of each part")
    parser.add_argument("--minutes", type=float, help="of each part, at most")
    parser.add_argument("--clusters", type=int, help="side by side, of each part")
    parser.add_argument("--mode", help="of all clusters, in place of the parts' own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="targets or actions: decode, kill")
    parser.add_argument("--skip", nargs="*", default=[], help="targets or actions to leave out")
    parser.add_argument("--append", action="store_true", help="keep the slices there are")
    parser.add_argument("--slices", type=Path, default=SLICES, help="what each cluster found")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="where results go")
    parser.add_argument("--evidence", type=Path, default=Path("build/chaos-evidence"))
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _part(part: Part, options: argparse.Namespace) -> int:
    """Run one part on its clusters; return how many of them could not end their run."""
    clusters = options.clusters or part.clusters
    total = options.faults or part.faults
    say(f"== {part.title}: {total} faults on {clusters} clusters")
    children: list[subprocess.Popen[bytes]] = []
    for number in range(clusters):
        faults = total // clusters + (number < total % clusters)
        command = [
            *(sys.executable, "-m", "chaos.run", "--share", f"{number}/{clusters}"),
            *("--part", part.name, "--faults", str(faults), "--seed", str(options.seed)),
            *("--minutes", str(options.minutes or part.minutes), "--slices", str(options.slices)),
            *("--evidence", str(options.evidence / f"{part.name}-{options.seed}-{number}")),
            *("--only", *options.only, "--skip", *options.skip),
            *("--mode", options.mode or part.modes[number % len(part.modes)]),
        ]
        children.append(subprocess.Popen(command, start_new_session=True))
    try:
        return sum(child.wait() != 0 for child in children)
    except KeyboardInterrupt:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()
        raise


def _one_share(options: argparse.Namespace) -> int:
    number, of = (int(word) for word in options.share.split("/"))
    (name,) = options.part
    share = Share(
        part=PARTS[name],
        mode=options.mode,
        seed=options.seed,
        number=number,
        of=of,
        faults=options.faults,
        minutes=options.minutes,
        only=frozenset(options.only),
        skip=frozenset(options.skip),
        evidence=options.evidence,
    )
    facts = conditions() | {"side_by_side": of, "skipped": options.skip, "only": options.only}
    facts |= {"mode": options.mode}
    found = asyncio.run(_run(share))
    found["conditions"] = facts | {"load_average_at_end": os.getloadavg()}
    path = options.slices / f"{name}-{options.seed}-{number}.json"
    path.write_bytes(orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE))
    for each in found["never_ready"]:
        say(f"never ready: {each}")
    return 0


async def _run(share: Share) -> dict[str, Any]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    shutil.rmtree(share.evidence, ignore_errors=True)
    async with place(share.part.settings | {"BATON_CLUSTER_MODE": share.mode}) as there:
        bad = True
        try:
            found = await Run(there, share).run()
            bad = report.is_bad(found)
        finally:
            if bad:
                share.evidence.mkdir(parents=True, exist_ok=True)
                shutil.copytree(there.logs, share.evidence / "logs", dirs_exist_ok=True)
    return found


def _merged(folder: Path) -> list[dict[str, Any]]:
    """Return the sum of all slices of each part."""
    slices = [orjson.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))]
    parts = [[each for each in slices if each["part"] == name] for name in PARTS]
    return [report.merged(some) for some in parts if some]


if __name__ == "__main__":
    sys.exit(main())
