"""`baton chat` in a terminal: Ctrl-C ends the answer, not the program."""

from __future__ import annotations

import os
import pty
from collections.abc import Iterator

import pytest

from support.ops_cluster import BATON, OpsCluster, ops_cluster, wait_until
from support.ops_terminal import exit_code, read_until


@pytest.fixture(scope="module")
def cluster() -> Iterator[OpsCluster]:
    """One that wants a key, which the terminal of the chat does not have."""
    with ops_cluster(BATON_FAKE_STEP_MS="60") as place:
        place.up(BATON_GATEWAY_API_KEYS="only-at-the-start")
        yield place


def test_ctrl_c_cancels_the_answer_and_leaves_the_program(cluster: OpsCluster) -> None:
    """After Ctrl-C nothing runs for the request any more, and the next question is answered."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(BATON[0], [*BATON, "chat", "--max-tokens", "400"], cluster.env())
    try:
        read_until(terminal, "> ", 30)
        os.write(terminal, b"Tell me a story\n")
        read_until(terminal, "story", 10)

        def sequences() -> int:
            return sum(cluster.reports()["decode-0"].get("sequences", {}).values())

        wait_until(lambda: sequences() == 1, 20.0, "decode works on it")
        os.write(terminal, b"\x03")
        read_until(terminal, "[cancelled]", 10)
        wait_until(lambda: sequences() == 0, 10.0, "decode has dropped it")
        os.write(terminal, b"/reset\n")
        read_until(terminal, "(forgotten)", 10)
        os.write(terminal, b"/exit\n")
        assert exit_code(pid, terminal) == 0
    finally:
        os.close(terminal)


def test_chat_takes_the_key_that_the_cluster_was_started_with(cluster: OpsCluster) -> None:
    """The settings of the start count, whatever the terminal of the chat has."""
    assert "tokens" in cluster.ask()
