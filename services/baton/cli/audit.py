"""`baton audit`: compares ledger, processes and arenas, and lists what stays wrong.

Decides when something seen is a fault: the very same thing is there in every look until its bound
has passed. A clean first look is enough; else it waits no longer than the bounds of what it saw:
while a client may still come back to a request whose gateway is gone, until its window is over.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.cli.client import no_cluster
from baton.cli.cluster import Cluster
from baton.cli.discrepancies import KINDS, Discrepancy, bound_ms, discrepancies
from baton.cli.sample import Sample, take
from baton.cli.terminal import ExitCode, counted, say, table, warn
from baton.core.limits import Limits
from baton.runtime.settings import Config

#: Exit code when something could not be looked at: neither clean nor not.
UNSEEN = 2
#: What could not be looked at is tried again: a process may have ended in this very moment.
_TRIES = 4
_AGAIN_S = 0.7
#: Past a bound, not at it.
_PAST_S = 0.05
#: What waits for a client may end long before its bound.
_LOOK_S = 5.0


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
            left_s = bound_ms(each, limits) / 1000 - age_s
            if left_s < 0:
                findings.append(Finding(each, age_s))
                del suspects[key]
            else:
                waits_s.append(left_s)
        if not waits_s:
            break
        sleep(min(*waits_s, _LOOK_S) + _PAST_S)
        sample = _look(look, sleep)
        looks += 1
        seen = {each.key: each for each in discrepancies(sample)}
        suspects = {key: _since(old, seen[key]) for key, old in suspects.items() if key in seen}
    return Verdict(tuple(findings), sample.unseen, looks, sample.at - first.at)


def _since(before: Discrepancy, now: Discrepancy) -> Discrepancy:
    """Return what it is now, with the bound that it had: whoever waited may be about to end it."""
    return replace(now, window_ms=max(before.window_ms, now.window_ms))


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
        raise no_cluster(config, UNSEEN)
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
            counted(len(verdict.findings), "discrepancy", "discrepancies"),
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
        say(f"clean: ledger, processes and arenas agree ({counted(verdict.looks, 'look')})")
