"""Events of a streamed answer, as a client reads them."""

from __future__ import annotations

import json
from typing import Any

from support.gateway_cluster import GatewayCluster


def sse(cluster: GatewayCluster, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream, JSON decoded, comments left out."""
    answer = cluster.http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return parse(answer.text)


def parse(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    events: list[Any] = []
    for block in text[:-2].split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith((":", "event: "))]
        if not lines:
            continue
        (line,) = lines
        assert line.startswith("data: ")
        events.append("[DONE]" if line == "data: [DONE]" else json.loads(line[6:]))
    return events


def joined(events: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for event in events
        if event != "[DONE]"
        for choice in event["choices"]
    )
