"""What runs found, as tables and as JSON.

Decides how answers are put to faults (those in flight when it struck) and how added stall is
measured: the gap between two tokens (or before the first) in which the fault lies, less what that
gap is in the undisturbed answer; of the requests that the victim had in hand. A slice is what one
cluster found, with every sample; slices of one part are added up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from baton.bench.figures import quantile, table
from chaos.faults import STAGES, Done
from chaos.heard import Heard
from chaos.judge import NEVER, Class
from chaos.load import Judged

_BAD = (Class.WRONG, Class.GAP, Class.SILENT)
_SUMS = (
    "faults",
    "faults_at_the_wanted_stage",
    "faults_about_there",
    "requests",
    "resumed",
    "forgotten",
    "audits",
)
_LISTS = ("leaked", "never_ready", "bad")


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


def slice_of(
    faults: list[Done], answers: list[Judged], leaks: list[str], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that one cluster's run found, ready for JSON."""
    by_kind: dict[str, list[Done]] = defaultdict(list)
    for done in faults:
        by_kind[done.fault.kind].append(done)
    classes = Counter(str(judged.judgement.what) for judged in answers)
    return {
        **facts,
        "faults": len(faults),
        "faults_at_the_wanted_stage": sum(done.reached and not done.timed for done in faults),
        "faults_about_there": sum(done.reached and done.timed for done in faults),
        "requests": len(answers),
        "resumed": sum(j.heard.comebacks > 0 and j.heard.done for j in answers),
        "forgotten": sum(j.heard.forgotten > 0 for j in answers),
        "classes": {str(each): classes[str(each)] for each in Class},
        "refused_because": dict(
            Counter(j.judgement.why for j in answers if j.judgement.what is Class.REFUSED)
        ),
        "kinds": {kind: _kind(some, answers) for kind, some in sorted(by_kind.items())},
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
                stalls.append(round(stall, 3))
    return {
        "faults": len(some),
        "stages": {s: sum(d.fault.stage == s for d in some) for s in STAGES},
        "in_flight": {str(each): classes[str(each)] for each in Class},
        "stalls_s": stalls,
        "ready_again_s": [round(d.ready_at - d.mended_at, 3) for d in some if d.ready_at],
    }


def merged(slices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sum of slices of one part."""
    kinds = sorted({kind for each in slices for kind in each["kinds"]})
    return {
        "part": slices[0]["part"],
        "title": slices[0]["title"],
        "clusters": len(slices),
        "seeds": sorted({each["seed"] for each in slices}),
        "cluster_minutes": round(sum(each["minutes"] for each in slices), 1),
        # A slice of an earlier tool may lack what is counted by now.
        **{name: sum(each.get(name, 0) for each in slices) for name in _SUMS},
        **{name: [one for each in slices for one in each[name]] for name in _LISTS},
        "classes": _sum(each["classes"] for each in slices),
        "refused_because": _sum(each["refused_because"] for each in slices),
        "kinds": {
            kind: _merged_kind([s["kinds"][kind] for s in slices if kind in s["kinds"]])
            for kind in kinds
        },
        "notes": sorted({each["note"] for each in slices if each["note"]}),
        "conditions": [each["conditions"] for each in slices],
    }


def _merged_kind(some: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "faults": sum(each["faults"] for each in some),
        "stages": _sum(each["stages"] for each in some),
        "in_flight": _sum(each["in_flight"] for each in some),
        "added_stall_s": _spread([one for each in some for one in each["stalls_s"]]),
        "ready_again_s": _spread([one for each in some for one in each["ready_again_s"]]),
    }


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return total


def is_bad(run: Mapping[str, Any]) -> bool:
    """Whether anything happened that must not; ``run``: a slice or the sum of some."""
    classes = run["classes"]
    never = sum(classes[str(each)] for each in NEVER) + len(run["leaked"])
    failed = classes["failed"] + len(run["never_ready"]) if run["part"] != "overlapping" else 0
    return bool(never + failed)


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
    """Return the tables and conditions of all runs."""
    return "\n\n".join(["# chaos", *(f"{_page(run)}\n\n{_conditions(run)}" for run in runs)]) + "\n"


def _conditions(run: Mapping[str, Any]) -> str:
    """Return under which conditions the slices were cut, and what was not as it should be."""
    one = run["conditions"][0]
    rows = [f"- {key}: {one[key]}" for key in ("cpu", "cores", "kernel", "python", "packages")]
    # Clusters side by side have begun in the same minute.
    together: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in run["conditions"]:
        together.setdefault((each["time"][:16], each["commit"]), []).append(each)
    rows += [
        f"- {each['time']}, commit {each['commit']}, {each['side_by_side']} clusters side by side "
        # Slices of an earlier tool were all of split clusters.
        f"({', '.join(one.get('mode', 'split') for one in some)}), "
        f"left out: {', '.join(each['skipped']) or 'nothing'}, load average "
        f"{each['load_average_at_start'][0]:.1f} to {each['load_average_at_end'][0]:.1f}"
        for some in together.values()
        for each in some[:1]
    ]
    rows += [f"- not ready again in time: {words}" for words in run["never_ready"]]
    rows += [f"- left behind: {words}" for words in run["leaked"]]
    rows += [f"- {each['class']}: {each['item']}: {each['why']}" for each in run["bad"]]
    return "\n".join([*(f"- {note}" for note in run["notes"]), *rows])


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
        f"{run['faults']} faults in {run['cluster_minutes']} minutes of "
        f"{run['clusters']} clusters, "
        f"{run['faults_at_the_wanted_stage']} of them at the very stage, "
        f"{run['faults_about_there']} about there (while queued, and before the real model's first "
        f"token, by the clock); "
        f"{accepted} requests accepted, {classes['right']} right ({run['resumed']} of them over "
        f"more than one connection), {classes['left']} left by their "
        f"client, {classes['failed']} failed with a clear error, {classes['broken']} broken with "
        f"their gateway or line; {classes['wrong']} wrong, {classes['gap']} with a gap or a "
        f"duplicate, {classes['silent']} silent; {classes['refused']} refused ({_reasons(run)}); "
        f"{run['forgotten']} asked again because the ledger had lost their token; "
        f"{len(run['leaked'])} leaks in {run['audits']} audits; seeds {run['seeds']}."
    )
    stages = ", ".join(STAGES)
    return f"## {run['title']}\n\n{summary}\n\nStages: {stages}.\n\n{table(header, rows)}"


def _reasons(run: Mapping[str, Any]) -> str:
    return ", ".join(f"{why} {count}" for why, count in run["refused_because"].items()) or "-"


def _words(stall: Mapping[str, Any]) -> str:
    if not stall["count"]:
        return "-"
    return f"{stall['p50']} / {stall['p99']} / {stall['max']} ({stall['count']})"
