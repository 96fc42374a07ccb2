"""`baton audit`: compares ledger, processes and arenas, and lists what stays wrong.

Decides when something seen is a fault: the very same thing is there in every look until its bound
has passed. A clean first look is enough; else it waits no longer than the bounds of what it saw.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.cli.client import no_cluster
from baton.cli.cluster import Cluster
from baton.cli.discrepancies import KINDS, Discrepancy, bound_ms, discrepancies
from baton.cli.sample import Sample, take
from baton.cli.terminal import ExitCode, say, table, warn
from baton.core.limits import Limits
from baton.runtime.settings import Config

#: Exit code when something could not be looked at: neither clean nor not.
UNSEEN = 2
#: What could not be looked at is tried again: a process may have ended in this very moment.
_TRIES = 4
_AGAIN_S = 0.7
#: Past a bound, not at it.
_PAST_S = 0.05


@dataclass(frozen=True, slots=True)
class Finding:
    """A discrepancy that stayed."""

    what: Discrepancy
    seen_s: float
    """Between the first look and the last."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an audit found."""

    findings: tuple[Finding, ...]
    unseen: tuple[str, ...]
    looks: int
    seconds: float

    @property
    def code(self) -> int:
        if self.findings:
            return ExitCode.FAILED
        return UNSEEN if self.unseen else ExitCode.OK


def watch(
    look: Callable[[], Sample], limits: Limits, sleep: Callable[[float], None] = time.sleep
) -> Verdict:
    """Look until everything seen is gone, or has stayed beyond its bound."""
    first = sample = _look(look, sleep)
    suspects = {each.key: each for each in discrepancies(first)}
    findings: list[Finding] = []
    looks = 1
    while not sample.unseen:
        age_s = sample.at - first.at
        waits_s = []
        for key, each in list(suspects.items()):
            left_s = bound_ms(each.kind, limits) / 1000 - age_s
            if left_s < 0:
                findings.append(Finding(each, age_s))
                del suspects[key]
            else:
                waits_s.append(left_s)
        if not waits_s:
            break
        sleep(min(waits_s) + _PAST_S)
        sample = _look(look, sleep)
        looks += 1
        seen = {each.key: each for each in discrepancies(sample)}
        suspects = {key: seen[key] for key in suspects if key in seen}
    return Verdict(tuple(findings), sample.unseen, looks, sample.at - first.at)


def _look(look: Callable[[], Sample], sleep: Callable[[float], None]) -> Sample:
    """Return a sample in which everything was seen, or the last of a few tries."""
    for _ in range(_TRIES - 1):
        sample = look()
        if not sample.unseen:
            return sample
        sleep(_AGAIN_S)
    return look()


def audit(config: Config, *, as_json: bool) -> int:
    """Audit the running cluster; exit code 0 clean, 1 not, 2 if something could not be seen."""
    cluster = Cluster(config, os.environ, warn)
    found = cluster.running()
    if found is None:
        raise no_cluster()
    settings = cluster.started_with()
    verdict = watch(lambda: take(cluster.run_dir, found, settings), settings.limits)
    if as_json:
        say(json.dumps(_plain(verdict), indent=2))
    else:
        _show(verdict)
    return verdict.code


def _plain(verdict: Verdict) -> dict[str, object]:
    return {
        "clean": verdict.code == ExitCode.OK,
        "discrepancies": [
            {
                "kind": str(each.what.kind),
                "subject": each.what.subject,
                "text": each.what.text,
                "seen_s": round(each.seen_s, 3),
            }
            for each in verdict.findings
        ],
        "unseen": list(verdict.unseen),
        "looks": verdict.looks,
        "seconds": round(verdict.seconds, 3),
    }


def _show(verdict: Verdict) -> None:
    if verdict.findings:
        table(
            f"{len(verdict.findings)} discrepancies",
            ("kind", "subject", "what", "for s"),
            [
                (each.what.kind, each.what.subject, each.what.text, f"{each.seen_s:.1f}")
                for each in verdict.findings
            ],
        )
        for kind in sorted({each.what.kind for each in verdict.findings}):
            say(f"{kind}: {KINDS[kind][0]}")
    for words in verdict.unseen:
        warn(f"could not be looked at: {words}")
    if not verdict.findings and not verdict.unseen:
        say(f"clean: ledger, processes and arenas agree ({verdict.looks} looks)")
