"""`baton explain`: one request's lines out of all logs, in order, in words."""

from __future__ import annotations

import json
from pathlib import Path

from baton.cli.explain import time_line, told
from baton.cli.records import Record
from baton.core.ids import Peer
from baton.core.lifecycles import RequestState
from baton.core.outcomes import Ending, FinishReason, Outcome


def _log(folder: Path, name: str, *entries: dict[str, object]) -> None:
    lines = [json.dumps({"level": "info", "incarnation": "123456", **entry}) for entry in entries]
    (folder / name).write_text("\n".join(lines) + "\n")


def _logs(folder: Path) -> None:
    at = "2026-01-01T00:00:0{}Z".format
    mine: dict[str, object] = {"request_id": "cmpl-1"}
    _log(
        folder,
        "gateway-0.log",
        {"ts": at(0), "event": "request_submitted", "prompt_tokens": 9, "max_tokens": 4, **mine},
        {"ts": at(1), "event": "request_submitted", "request_id": "cmpl-2"},
        {"ts": at(5), "event": "request_fenced", "epoch": 2, "ids_held": 3, **mine},
        {"ts": at(8), "event": "process_ready"},
    )
    _log(folder, "decode-0.log.1", {"ts": at(3), "event": "ticket_sent", "epoch": 1, **mine})
    _log(folder, "decode-0.log", {"ts": at(9), "event": "unheard_of", "x": 1, **mine})
    with (folder / "decode-0.log").open("a") as log:
        log.write('{"ts": "2026-01-01T00:00:09Z", "request_id": "cmpl-1", "ev')


def test_lines_of_one_request_in_order(tmp_path: Path) -> None:
    """Rotated logs too; another request's lines and half a line are left out."""
    _logs(tmp_path)
    lines = time_line(tmp_path, "cmpl-1")
    assert [line.event for line in lines] == [
        "request_submitted",
        "ticket_sent",
        "request_fenced",
        "unheard_of",
    ]


def test_the_story_in_words(tmp_path: Path) -> None:
    """Times from the first line, a mark where the epoch changes, unknown events as they are."""
    _logs(tmp_path)
    owner = Peer("decode-0", 1)
    record = Record(
        request_id="cmpl-1",
        state=RequestState.COMPLETED,
        epoch=2,
        attempts=2,
        router=None,
        gateway=None,
        decode=owner,
        prefill=None,
        outcome=Outcome(Ending.COMPLETED, FinishReason.LENGTH),
        ended_by="gateway-0/1",
    )
    text = "\n".join(told("cmpl-1", record, time_line(tmp_path, "cmpl-1")))
    assert "completed, epoch 2, 2 attempts; decode decode-0/1; ended by gateway-0/1" in text
    assert "    0.000  gateway-0/3456   submitted: 9 prompt tokens, at most 4 out" in text
    assert "[epoch 1]" in text
    assert "refuses every epoch below 2; its client may have 3 tokens  [epoch 2]" in text
    assert "unheard_of x=1" in text


def test_what_was_expected_of_a_way_is_told_with_what_came(tmp_path: Path) -> None:
    """The way that was chosen, the others, and later the difference."""
    at = "2026-01-01T00:00:0{}Z".format
    mine: dict[str, object] = {"request_id": "cmpl-1", "epoch": 1}
    why = "prefill-0 for decode-0 60 ms; other ways: decode-0 90 ms, delays others by 40 ms"
    held = {"way": "remote", "expected_ms": 60.0, "actual_ms": 66.0, "regret_ms": 0.0}
    _log(
        tmp_path,
        "router-0.log",
        {"ts": at(1), "event": "chosen", "decode": "decode-0/1", "why": why, **mine},
        {"ts": at(2), "event": "forecast_held_against", **held, **mine},
    )
    text = "\n".join(told("cmpl-1", None, time_line(tmp_path, "cmpl-1")))
    assert f"takes decode-0/1: {why}" in text
    assert "first token after 66.0 ms (remote), 60.0 ms were expected; regret 0.0 ms" in text


def test_the_choices_of_a_request_are_told_with_it(tmp_path: Path) -> None:
    """With ``n`` 2 there are two requests behind one id; one that only begins alike is not."""
    at = "2026-01-01T00:00:01Z"
    _log(
        tmp_path,
        "router-0.log",
        *(
            {"ts": at, "event": "admitted", "request_id": name}
            for name in ("cmpl-1-0", "cmpl-1-1", "cmpl-12", "cmpl-1-x")
        ),
    )
    text = "\n".join(told("cmpl-1", None, time_line(tmp_path, "cmpl-1")))
    assert "(choice 0)" in text
    assert "(choice 1)" in text
    assert len(text.splitlines()) == 3
