"""Logs: one JSON object a line, and never what a client wrote."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import orjson
import pytest
import structlog

from baton.core.ids import Peer
from baton.runtime import logs


@pytest.fixture
def stream() -> Iterator[io.BytesIO]:
    """Where lines go; the process's own logging is put back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.BytesIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_one_event_is_one_line(stream: io.BytesIO) -> None:
    """A line is JSON with time, level, event and the bound names, whatever the values hold."""
    log = logs.configure("info", bound={"worker": "decode-0"}, stream=stream)
    log.debug("unseen")
    log.info("request_placed", peer=Peer("prefill-0", 2**61), detail="two\nlines", raw=b"\x00\xff")
    (line,) = stream.getvalue().splitlines()
    event = orjson.loads(line)
    assert list(event)[:3] == ["ts", "level", "event"]
    assert event["worker"] == "decode-0"
    assert event["peer"] == f"prefill-0/{2**61}"
    assert event["raw"] == "<2 bytes>"


def test_prompts_are_withheld(stream: io.BytesIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that would carry a prompt is dropped and named; when checking, it is a bug."""
    monkeypatch.delenv("BATON_CHECK", raising=False)
    log = logs.configure("info", stream=stream)
    log.info("request_admitted", prompt="geheim", ids=[1, 2], epoch=1)
    event = orjson.loads(stream.getvalue())
    assert b"geheim" not in stream.getvalue()
    assert (event["withheld"], event["epoch"]) == (["ids", "prompt"], 1)
    monkeypatch.setenv("BATON_CHECK", "1")
    with pytest.raises(AssertionError, match="forbidden"):
        log.info("request_admitted", prompt="geheim")


def test_traces_and_libraries(stream: io.BytesIO) -> None:
    """A trace is one field of one line, and libraries log the same way."""
    log = logs.configure("info", bound={"worker": "w"}, stream=stream)
    try:
        raise ValueError("no\nway")
    except ValueError:
        log.exception("crashed")
    logging.getLogger("somelib").error("bad %s", "thing")
    logging.getLogger("somelib").info("chatter")
    first, second = (orjson.loads(line) for line in stream.getvalue().splitlines())
    assert "ValueError: no" in first["exception"]
    assert (second["library"], second["detail"], second["worker"]) == ("somelib", "bad thing", "w")


def test_console_is_for_people(stream: io.BytesIO) -> None:
    """The command line's logger writes plain lines."""
    logs.configure("info", stream=stream, console=True).info("cluster_ready", port=8000)
    assert b"cluster_ready" in stream.getvalue()
    assert not stream.getvalue().startswith(b"{")
