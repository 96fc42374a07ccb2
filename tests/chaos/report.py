"""What a run found, as a table and as JSON.

Decides how answers are put to faults (those in flight when it struck) and how added stall is
measured: the gap between two tokens (or before the first) in which the fault lies, less what that
gap is in the undisturbed answer; of the requests that the victim had in hand.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from baton.bench.figures import quantile, table
from chaos.client import Heard
from chaos.faults import STAGES, Done
from chaos.judge import NEVER, Class
from chaos.load import Judged

_BAD = (Class.WRONG, Class.GAP, Class.SILENT)


def added_stall_s(heard: Heard, done: Done) -> float | None:
    """Return by how much the fault lengthened what its client waited for just then."""
    at = done.at
    reference = heard.item.reference
    if reference is None or not heard.arrivals or not heard.item.stream:
        return None
    edges = [heard.sent_at, *heard.arrivals]
    for number in range(len(edges) - 1):
        if edges[number] <= at < edges[number + 1]:
            usual = reference.first_s if number == 0 else reference.gap_s
            return max(0.0, edges[number + 1] - edges[number] - usual - done.held_s)
    return None


def in_flight(judged: Judged, done: Done) -> bool:
    return judged.heard.sent_at <= done.at <= judged.heard.ended_at


def result(
    faults: list[Done], answers: list[Judged], leaks: list[str], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that was found, ready for JSON."""
    kinds: dict[str, dict[str, Any]] = {}
    by_kind: dict[str, list[Done]] = defaultdict(list)
    for done in faults:
        by_kind[done.fault.kind].append(done)
    for kind, some in sorted(by_kind.items()):
        kinds[kind] = _kind(some, answers)
    classes = Counter(str(judged.judgement.what) for judged in answers)
    return {
        **facts,
        "faults": len(faults),
        "faults_at_the_wanted_stage": sum(done.reached for done in faults),
        "requests": len(answers),
        "classes": {str(each): classes[str(each)] for each in Class},
        "refused_because": dict(
            Counter(j.judgement.why for j in answers if j.judgement.what is Class.REFUSED)
        ),
        "kinds": kinds,
        "stages": dict(Counter(done.fault.stage for done in faults)),
        "leaked": leaks,
        "never_ready": [f"{d.fault}: {d.trouble}" for d in faults if d.trouble],
        "bad": [
            {
                "item": judged.heard.item.name,
                "id": judged.heard.id,
                "class": str(judged.judgement.what),
                "why": judged.judgement.why,
                "faults": [d.fault.number for d in faults if in_flight(judged, d)],
            }
            for judged in answers
            if judged.judgement.what in NEVER or judged.judgement.what is Class.FAILED
        ],
    }


def _kind(some: list[Done], answers: list[Judged]) -> dict[str, Any]:
    classes: Counter[str] = Counter()
    stalls: list[float] = []
    for done in some:
        for judged in answers:
            if not in_flight(judged, done):
                continue
            classes[str(judged.judgement.what)] += 1
            mine = not done.hit or judged.heard.id in done.hit
            stall = added_stall_s(judged.heard, done) if mine else None
            if stall is not None and judged.judgement.what is Class.RIGHT:
                stalls.append(stall)
    ready = [done.ready_at - done.mended_at for done in some if done.ready_at]
    return {
        "faults": len(some),
        "stages": {s: sum(d.fault.stage == s for d in some) for s in STAGES},
        "in_flight": {str(each): classes[str(each)] for each in Class},
        "added_stall_s": _spread(stalls),
        "ready_again_s": _spread(ready),
    }


def _spread(values: list[float]) -> dict[str, float | int]:
    if not values:
        return {"count": 0}
    return {
        "count": len(values),
        "p50": round(quantile(values, 0.5), 3),
        "p99": round(quantile(values, 0.99), 3),
        "max": round(max(values), 3),
    }


def page(runs: Iterable[Mapping[str, Any]]) -> str:
    """Return the tables of all runs."""
    return "\n\n".join(_page(run) for run in runs)


def _page(run: Mapping[str, Any]) -> str:
    rows = []
    for kind, figures in run["kinds"].items():
        hit, stall = figures["in_flight"], figures["added_stall_s"]
        rows.append(
            (
                kind,
                figures["faults"],
                "/".join(str(figures["stages"][stage]) for stage in STAGES),
                sum(hit.values()) - hit["refused"],
                hit["right"],
                hit["left"],
                hit["failed"],
                hit["broken"],
                hit["refused"],
                sum(hit[str(each)] for each in _BAD),
                _words(stall),
                figures["ready_again_s"].get("p50", "-"),
            )
        )
    header = (
        "fault",
        "n",
        "by stage",
        "in flight",
        "right",
        "left",
        "failed clearly",
        "connection broken",
        "refused",
        "wrong or silent",
        "added stall p50/p99/max s (n)",
        "ready again p50 s",
    )
    classes = run["classes"]
    accepted = sum(classes.values()) - classes["refused"]
    summary = (
        f"**{run['title']}**: {run['faults']} faults in {run['minutes']} min, "
        f"{run['faults_at_the_wanted_stage']} of them at the very stage; "
        f"{accepted} requests accepted, {classes['right']} right, {classes['left']} left by their "
        f"client, {classes['failed']} failed with a clear error, {classes['broken']} broken with "
        f"their gateway or line; {classes['wrong']} wrong, {classes['gap']} with a gap or a "
        f"duplicate, {classes['silent']} silent; {classes['refused']} refused ({_reasons(run)}); "
        f"{len(run['leaked'])} leaks in {run['audits']} audits; seed {run['seed']}."
    )
    stages = ", ".join(STAGES)
    return f"{summary}\n\nStages: {stages}.\n\n{table(header, rows)}"


def _reasons(run: Mapping[str, Any]) -> str:
    return ", ".join(f"{why} {count}" for why, count in run["refused_because"].items()) or "-"


def _words(stall: Mapping[str, Any]) -> str:
    if not stall["count"]:
        return "-"
    return f"{stall['p50']} / {stall['p99']} / {stall['max']} ({stall['count']})"
