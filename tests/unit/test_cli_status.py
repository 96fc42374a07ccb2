"""What a person reads of a cluster that starts: what is waited for, and who is not there yet."""

from __future__ import annotations

from typing import Any

import pytest

from baton.cli.cluster import progress
from baton.cli.record import ClusterRecord
from baton.cli.status import NO_PROCESS, NOT_REGISTERED, readiness, show, work

RECORD = ClusterRecord(
    name="baton-x",
    mode="split",
    model="/cache/models/tiny-0123456789ab",
    url="http://127.0.0.1:8000",
    arena_dir="/dev/shm",
    supervisor_pid=1,
    supervisor_started=1,
    boot_id="b",
    baton_version="0",
    settings_source="",
)


def test_a_start_tells_processes_first_and_then_what_the_gateway_misses() -> None:
    """While a process starts its state is told; once all run, the gateway's own words."""
    words = "gateway does not answer yet ([Errno 111] Connection refused)"
    assert progress({}, words) == ""
    states = {"decode-0": ("RUNNING", 0), "gateway-0": ("STARTING", 0)}
    assert progress(states, words) == "decode-0 running, gateway-0 starting"
    states["gateway-0"] = ("RUNNING", 0)
    assert progress(states, words) == "waiting: gateway does not answer yet"
    assert progress(states, "no decode worker is connected").endswith(
        "no decode worker is connected"
    )


def test_a_process_without_a_lease_is_starting(capsys: pytest.CaptureFixture[str]) -> None:
    """It runs, and nobody knows it yet; the ledger never has a lease. The model has the name
    that clients use."""
    nobody = {**NO_PROCESS, **NOT_REGISTERED}
    processes: list[dict[str, Any]] = [
        {**nobody, "process": "decode-0", "role": "decode", "state": "running", "pid": 7},
        {**nobody, "process": "ledger", "role": "ledger", "state": "running", "pid": 8},
        {**nobody, "process": "prefill-0", "role": "prefill", "state": "exited", "exit_code": 1},
    ]
    kernels = {"running": ["torch-tiles-2 x86_64"], "note": "plain torch: no compiler"}
    picture = {"ready": False, "trouble": [], "model": "tiny", "processes": processes}
    show({**picture, "kernels": kernels}, RECORD)
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert lines.pop() == "kernels: torch-tiles-2 x86_64 (plain torch: no compiler)"
    assert title == (
        "baton-x at http://127.0.0.1:8000: split, tiny, NOT ready, 0 of 2 workers ready"
    )
    rows = {line.split()[0]: line.split() for line in lines}
    assert rows["decode-0"][-1] == "starting"
    assert rows["ledger"][-1] == "-"
    assert rows["prefill-0"][1:4] == ["prefill", "exited", "1"]


def test_workers_that_do_not_serve_yet_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """One of each kind is enough to be ready; who reads `ready` would think that all are."""
    one = {**NO_PROCESS, **NOT_REGISTERED, "state": "running"}
    serving = {**one, "incarnation": 7, "lease_ms": 900, "report": {"ready": True}}
    processes: list[dict[str, Any]] = [
        {**serving, "process": "decode-0", "role": "decode"},
        {**one, "process": "decode-1", "role": "decode"},
        {**serving, "process": "gateway-0", "role": "gateway"},
        {**serving, "process": "prefill-0", "role": "prefill"},
    ]
    picture = {"ready": True, "trouble": [], "model": "tiny", "processes": processes}
    picture["kernels"] = {"running": [], "note": ""}
    show(picture, RECORD)
    assert capsys.readouterr().out.splitlines()[0].endswith(", ready, 2 of 3 workers ready")
    assert readiness(processes).late == ("decode-1",)
    processes[1] = {**serving, "process": "decode-1", "role": "decode"}
    show(picture, RECORD)
    assert capsys.readouterr().out.splitlines()[0].endswith(", ready")


def test_huge_pages_are_shown_where_a_worker_tells_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of weights and arena the share in huge pages; not of weights that are no mapped file."""
    one = {**NO_PROCESS, **NOT_REGISTERED, "state": "running"}
    arena, weights = {"arena": {"huge_share": 1.0}}, {"weights": {"bytes": 9, "huge_share": 0.984}}
    processes: list[dict[str, Any]] = [
        {**one, "process": "decode-0", "role": "decode", "report": {**weights, **arena}},
        {**one, "process": "decode-1", "role": "decode", "report": {"weights": None, **arena}},
        {**one, "process": "gateway-0", "role": "gateway", "report": {"sessions": 1}},
        {**one, "process": "prefill-0", "role": "prefill", "report": weights},
    ]
    picture = {"ready": True, "trouble": [], "model": "tiny", "processes": processes}
    picture["kernels"] = {"running": [], "note": ""}
    show(picture, RECORD)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "huge pages: decode-0 weights 98%, arena 100%; decode-1 arena 100%; prefill-0 weights 98%"
    )


def test_one_of_a_thing_is_not_called_many() -> None:
    """Neither `1 jobs` nor `1 tokens queued`."""
    report = {"jobs": 1, "queued_tokens": 1, "tickets": 2, "sessions": 1}
    assert work(report) == "1 job, 1 token queued, 2 tickets, 1 session"


def test_the_role_is_what_a_process_does_now(capsys: pytest.CaptureFixture[str]) -> None:
    """Its name says what it was started as."""
    one = {**NO_PROCESS, **NOT_REGISTERED, "state": "running", "incarnation": 7, "lease_ms": 900}
    processes: list[dict[str, Any]] = [
        {**one, "process": "decode-0", "role": "prefill", "report": {"jobs": 1}},
        {**one, "process": "decode-1", "role": "decode", "report": {"mixed": True}},
    ]
    picture = {"ready": True, "trouble": [], "model": "tiny", "processes": processes}
    show({**picture, "kernels": {"running": [], "note": ""}}, RECORD)
    _, _, *lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines}
    assert (rows["decode-0"][1], rows["decode-1"][1]) == ("prefill", "mixed")
