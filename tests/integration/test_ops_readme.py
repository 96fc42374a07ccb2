"""The README's examples run as they are written (but for the port)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.ops_cluster import OpsCluster, ops_cluster

README = (Path(__file__).parents[2] / "README.md").read_text()
QUESTION, ANSWER = "Name three rivers in France.", "Hello there"
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[OpsCluster]:
    """A cluster that serves under the default model's name."""
    with ops_cluster(BATON_MODEL_NAME="smollm2-135m-instruct") as running:
        running.up()
        yield running


def _block(language: str, holds: str) -> str:
    (text,) = [body for kind, body in BLOCKS if kind == language and holds in body]
    return text


def _run(cluster: OpsCluster, command: list[str], text: str) -> str:
    assert ":8000" in text
    assert QUESTION in text
    # The fake engine says what the prompt tells it to, and ends there.
    forced = " ".join(map(str, ANSWER.encode()))
    text = text.replace(QUESTION, f"[[forced {forced}]]").replace(":8000", f":{cluster.port}")
    done = subprocess.run(
        [*command, text],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr + cluster.logs()
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on this machine")
def test_the_curl_example_streams(cluster: OpsCluster) -> None:
    """Server-sent events arrive and end with the end mark."""
    shown = _run(cluster, ["sh", "-c"], _block("sh", "curl -N"))
    assert shown.count("data: {") > 3
    assert shown.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("holds", ["from openai", "websockets.connect"])
def test_the_python_examples_stream_text(cluster: OpsCluster, holds: str) -> None:
    """The openai package and a plain WebSocket print an answer and end."""
    shown = _run(cluster, [sys.executable, "-c"], _block("python", holds))
    assert shown.strip() == ANSWER
