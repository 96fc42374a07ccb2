"""What a process tells of itself."""

from __future__ import annotations

import orjson

from baton.core.limits import Limits
from baton.runtime.service import fitting
from baton.wire import codec, frames
from baton.wire.messages import Report


def test_a_report_that_fits_no_message_says_so_instead() -> None:
    """The largest one that is sent as it is fits; one byte more would, and is an error."""
    most = Limits().frame_bytes_max
    for size in range(most - 1_100, most - 900):
        body = fitting(b"x" * size, "holdings", most)
        message = codec.encode(Report(kind="holdings", token=2**63 - 1, body=body))
        assert len(message) <= most - frames.HEADER_BYTES
        if body != b"x" * size:
            assert "frame_bytes_max" in orjson.loads(body)["error"]
            return
    raise AssertionError("no report was too large")
