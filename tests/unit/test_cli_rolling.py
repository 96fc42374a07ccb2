"""What a rolling restart does in which order, and when the next process may follow."""

from __future__ import annotations

from typing import Any

from baton.cli.rolling import Step, is_up, others_up, plan, stage, strangers, unmet
from baton.cli.status import NO_PROCESS, NOT_REGISTERED


def row(process: str, state: str = "running", **more: Any) -> dict[str, Any]:
    """Return a process as `baton status` has it."""
    role = process.rpartition("-")[0] or process
    known = {} if state != "running" or role == "ledger" else {"incarnation": 7}
    named = {"process": process, "role": role, "state": state}
    return {**NO_PROCESS, **NOT_REGISTERED, **named, **known, **more}


SMALL = [row(name) for name in ("decode-0", "gateway-0", "ledger", "prefill-0", "router-0")]


def restarts(*workers: str) -> list[Step]:
    return [Step("restart", worker) for worker in workers]


def test_prefill_first_the_ledger_last_and_a_spare_beside_the_only_gateway() -> None:
    """While the single gateway waits for its clients another one takes the new ones."""
    every = [one["process"] for one in SMALL]
    assert plan(SMALL, every, "gateway-1") == [
        *restarts("prefill-0", "decode-0", "router-0"),
        Step("start", "gateway-1"),
        *restarts("gateway-0"),
        Step("end", "gateway-1"),
        *restarts("ledger"),
    ]


def test_several_gateways_need_no_spare() -> None:
    """One takes the new connections while the other waits for its clients."""
    rows = [*SMALL, row("gateway-1"), row("prefill-1")]
    every = [one["process"] for one in rows]
    assert plan(rows, every, "") == restarts(
        "prefill-0", "prefill-1", "decode-0", "router-0", "gateway-0", "gateway-1", "ledger"
    )


def test_only_what_was_named_is_restarted() -> None:
    """Whatever the order in which it was named."""
    assert plan(SMALL, ["router-0", "decode-0"], "gateway-1") == restarts("decode-0", "router-0")


def test_one_that_is_down_drains_or_does_not_run_yet_is_no_substitute() -> None:
    """The last of its kind is the last that takes anything."""
    rows = [
        row("decode-0"),
        row("decode-1", "stopped"),
        row("decode-2", report={"draining": True}),
        row("decode-3", incarnation=None),
    ]
    assert others_up(rows, "decode-0") == []
    assert others_up([*rows, row("decode-4")], "decode-0") == ["decode-4"]
    assert is_up(row("ledger"))
    assert not is_up(rows[3])


def met(**more: Any) -> list[dict[str, Any]]:
    """Return a split cluster in which everybody knows everybody; ``more`` replaces reports."""
    workers = {f"{name}/7": {"accepting": True} for name in ("decode-0", "prefill-0")}
    everybody = ["gateway-0/7", "router-0/7", "decode-0/7", "prefill-0/7"]
    reports: dict[str, Any] = {
        "gateway-0": {"peers": everybody},
        "router-0": {"gateways": ["gateway-0/7"], "workers": workers},
        "decode-0": {"peers": everybody, "writers": ["prefill-0/7"]},
        "prefill-0": {"peers": everybody},
    }
    return [row(name, report=report) for name, report in (reports | more).items()]


def test_everybody_must_have_met_everybody() -> None:
    """A pair without a ticket's way, a router that does not count on a worker: not yet."""
    assert unmet([*met(), row("ledger")]) == []
    decode = {"peers": ["gateway-0/7", "router-0/7", "prefill-0/7"], "writers": []}
    assert unmet(met(**{"decode-0": decode})) == ["decode-0 has not met prefill-0"]
    busy = {"gateways": ["gateway-0/7"], "workers": {"prefill-0/7": {"accepting": True}}}
    assert unmet(met(**{"router-0": busy})) == ["router-0 has not met decode-0"]
    assert unmet(met(**{"gateway-0": None})) == ["gateway-0 does not answer"]


def test_a_former_incarnation_does_not_count() -> None:
    """What the others know is the one that runs."""
    rows = met()
    rows[3]["incarnation"] = 8
    assert unmet(rows) == [
        f"{name} has not met prefill-0" for name in ("gateway-0", "router-0", "decode-0")
    ]


def test_each_line_of_progress_says_whose_it_is() -> None:
    """The old incarnation and what it still does, its end, the new one and what it lacks."""
    busy = {"ready": True, "draining": True, "sequences": {"running": 2}}
    old = row("decode-0", report=busy)
    assert stage(old, 7) == "the old incarnation still runs (draining, 2 running)"
    between = row("decode-0", incarnation=None)
    assert stage(between, 7) == "the old incarnation has ended"
    assert stage(between, None) == "it starts"
    new = row("decode-0", incarnation=8, report={"ready": False})
    assert stage(new, 7) == "the new incarnation is not ready yet"
    new["report"] = {"ready": True}
    assert stage(new, 7) == "the new incarnation serves (idle)"
    assert stage(row("decode-0", "exited"), 7) == "has ended (exited)"
    assert stage(row("ledger", "starting"), None) == "is starting"


def test_a_cluster_of_another_version_is_told() -> None:
    """Who refuses to speak with this version would refuse a successor of it too."""
    rows = [row("decode-0", silent="refused: protocol 3 here, 4 there"), row("router-0")]
    assert strangers(rows) == ["decode-0: refused: protocol 3 here, 4 there"]
