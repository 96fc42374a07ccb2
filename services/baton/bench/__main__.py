"""``python -m baton.bench``: run the benchmarks, write results with conditions, print tables."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import orjson

from baton.bench import (
    agreement,
    control_plane,
    device,
    engine,
    handover,
    interference,
    modes,
    peers,
    placement,
    recovery,
    roles,
    rolling,
    start,
    verification,
)
from baton.bench.conditions import conditions, others_cpu_s
from baton.bench.ends import term_interrupts

Bench = tuple[Callable[[bool], dict[str, object]], Callable[[dict[str, object]], str]]

BENCHES: dict[str, Bench] = {
    "agreement": (
        lambda quick: agreement.measure(rounds=1 if quick else 3, requests=12 if quick else 100),
        agreement.page,
    ),
    "handover": (lambda quick: handover.measure(repeats=2 if quick else 10), handover.page),
    "interference": (
        lambda quick: interference.measure(
            calm_s=10 if quick else 20, disturbed_s=20 if quick else 36
        ),
        interference.page,
    ),
    "control_plane": (
        lambda quick: control_plane.measure(requests=20 if quick else 200),
        control_plane.page,
    ),
    "device": (
        lambda quick: device.measure(repeats=2 if quick else 10, steps=5 if quick else 50),
        device.page,
    ),
    "engine": (
        lambda quick: engine.measure(
            repeats=1 if quick else 3, steps=5 if quick else 30, length=32 if quick else 512
        ),
        engine.page,
    ),
    "peers": (lambda quick: peers.measure(peers.QUICK if quick else peers.EFFORT), peers.page),
    "placement": (
        lambda quick: placement.measure(placement.QUICK if quick else placement.EFFORT),
        placement.page,
    ),
    "recovery": (lambda quick: recovery.measure(repeats=1 if quick else 5), recovery.page),
    "verification": (
        lambda quick: verification.measure(repeats=2 if quick else 10),
        verification.page,
    ),
    "roles": (
        lambda quick: roles.measure(
            rounds=1 if quick else 5, before_s=15 if quick else 40, after_s=40 if quick else 120
        ),
        roles.page,
    ),
    "rolling": (
        lambda quick: rolling.measure(capacity_s=10 if quick else 30, calm_s=15 if quick else 60),
        rolling.page,
    ),
    "start": (lambda quick: start.measure(repeats=2 if quick else 5), start.page),
}

#: Needs programs that are not Baton's, a GPU, or minutes without other load: only when named.
ON_DEMAND = ("agreement", "device", "peers")


def main() -> int:
    """Run the named benchmarks."""
    if sys.argv[1:2] == ["modes"]:
        return modes.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="baton.bench", description=__doc__)
    usual = [name for name in BENCHES if name not in ON_DEMAND]
    which = f"of {', '.join(BENCHES)}; by default all but {', '.join(ON_DEMAND)}; or `modes`"
    parser.add_argument("names", nargs="*", help=which)
    parser.add_argument("--quick", action="store_true", help="a look, not a result worth keeping")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="where results go")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHES]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}: allowed are {', '.join(BENCHES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    with term_interrupts():
        for name in options.names or usual:
            _run(name, quick=options.quick, out=options.out)
    return 0


def _run(name: str, *, quick: bool, out: Path) -> None:
    measure, page = BENCHES[name]
    given = {key: value for key, value in os.environ.items() if key.startswith("BATON_")}
    facts = conditions() | {"quick": quick, "settings": given}
    began, cpu = time.monotonic(), others_cpu_s()
    result = measure(quick)
    facts["seconds"] = round(time.monotonic() - began, 1)
    facts["machine_cpu_seconds"] = round(others_cpu_s() - cpu, 1)
    facts["load_average_at_end"] = os.getloadavg()
    text = page(result)
    record = {"benchmark": name, "conditions": facts, "result": result}
    raw = orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    (out / f"{name}.json").write_bytes(raw)
    lines = [f"- {key}: {value}" for key, value in facts.items()]
    body = f"# {name}\n\n{text}\n\n## Conditions\n\n" + "\n".join(lines) + "\n"
    (out / f"{name}.md").write_text(body, encoding="utf-8")
    sys.stdout.write(f"{text}\n\n{name}: {out / f'{name}.md'}\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
