"""The comparison with other servers: what its figures mean, without any server."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from baton.bench.asker import Prompts, first_at
from baton.bench.cluster import BenchError
from baton.bench.figures import gaps_within
from baton.bench.load.answer import Answer
from baton.bench.peer_figures import (
    medians,
    rate,
    spread,
    tokens_per_piece,
    waited,
)
from baton.bench.peer_servers import Llama, llama_version
from baton.bench.peers import page


def came(arrivals: list[float], tokens: int | None = None) -> Answer:
    """An answer whose pieces came then."""
    answer = Answer(0.0)
    answer.arrivals = arrivals
    answer.usage_tokens = tokens
    return answer


def test_rate_counts_only_while_all_streams_run() -> None:
    """A stream that starts late or ends early narrows the window; pieces may be several tokens."""
    one = [came([1.0, 2.0, 3.0])]
    assert rate(one) == pytest.approx(1.0)
    late = [came([0.0, 1.0, 2.0, 3.0, 4.0]), came([2.0, 2.5, 3.0, 3.5, 4.0])]
    assert rate(late) == pytest.approx((2 + 4) / 2.0)
    pairs = [came([1.0, 2.0, 3.0], tokens=6)]
    assert rate(pairs) == pytest.approx(2.0)
    assert tokens_per_piece(pairs) == pytest.approx(2.0)
    apart = [came([0.0, 1.0]), came([2.0, 3.0])]
    assert math.isnan(rate(apart))


def test_gaps_lie_within_the_window_and_within_a_stream() -> None:
    """A gap that reaches over the window's edge is left out, and so is one between streams."""
    streams = [[0.0, 1.0, 1.5, 3.0], [1.2, 1.3]]
    assert gaps_within(streams, 0.5, 2.0) == pytest.approx([0.5, 0.1])


def test_spread_has_the_tail() -> None:
    """Of a thousand gaps p99.9 is the second largest, max the largest."""
    figures = spread([number / 1e3 for number in range(1, 1001)])
    assert figures == {"p50": 500.0, "p99": 990.0, "p999": 999.0, "max": 1000.0}


def test_a_request_without_an_answer_counts_as_waiting_to_the_end() -> None:
    """A median that is such a one is marked as a lower bound."""
    answered = waited([0.0, 3.0, 6.0], [2.0, 4.0, None], end=9.0)
    assert answered == {"p50": 2.0, "at_least": False, "sent": 3, "answered": 2}
    queue = waited([0.0, 3.0, 6.0], [8.0, None, None], end=9.0)
    assert queue == {"p50": 6.0, "at_least": True, "sent": 3, "answered": 1}


def test_medians_go_figure_by_figure() -> None:
    """Nested figures too; of maxima the largest stays, of flags any."""
    runs = [
        {"speed": 1.0, "gap": {"p50": 5.0, "max": 7.0}, "at_least": False},
        {"speed": 9.0, "gap": {"p50": 6.0, "max": 90.0}, "at_least": True},
        {"speed": 2.0, "gap": {"p50": 1.0, "max": 8.0}, "at_least": False},
    ]
    assert medians(runs) == {
        "speed": 2.0,
        "gap": {"p50": 5.0, "max": 90.0},
        "at_least": True,
    }


def test_no_prompt_comes_twice() -> None:
    """A repeated prompt would be found in a server's prefix cache."""
    prompts = Prompts(1)
    assert prompts.fresh(64) != prompts.fresh(64)
    assert Prompts(1).fresh(64) == Prompts(1).fresh(64)


def test_the_page_says_who_was_left_out_and_which_medians_are_bounds() -> None:
    """Both tables have a line for each server that was measured."""
    gaps = {"p50": 10.0, "p99": 20.0, "p999": 30.0, "max": 40.0}
    figures = {
        "prefill": {"512": 1000.0, "1024": 900.0, "2048": 800.0},
        "decode": {"1": 50.0, "4": 200.0, "8": 300.0, "16": 400.0},
        "alone": {"gap_ms": gaps, "tokens_per_s": 200.0},
        "with_intruders": {"gap_ms": gaps | {"p99": 50.0}, "tokens_per_s": 100.0},
        "intruders": {"p50": 4.5, "at_least": True, "sent": 3, "answered": 1},
        "start_s": 2.0,
        "memory_mb": 1024.0,
        "others_cores": 0.05,
    }
    text = page(
        {
            "medians": {"baton": figures},
            "left_out": {"vllm": "not installed"},
            "versions": {"llama.cpp": "0.6"},
        }
    )
    assert "| baton | 1,000 / 900 / 800 | 50 / 200 / 300 / 400 | 2.0 | 1.0 | 0.05 |" in text
    assert "| 10.0 / 50.0 / 30.0 / 40.0 | 2.50 | >= 4.50 | 200 / 100 |" in text
    assert "Left out: vllm: not installed." in text
    assert "Peers: llama.cpp 0.6." in text


def test_a_first_token_without_text_came_with_the_end() -> None:
    """Half of a character is a token, but no piece."""
    silent, spoken = came([]), came([2.0, 3.0])
    silent.ended_at = spoken.ended_at = 4.0
    assert first_at(silent) == 4.0
    assert first_at(spoken) == 2.0


@pytest.mark.parametrize(
    ("does", "how"), [("kill -9 $$", "signal SIGKILL"), ("exit 3", "status 3")]
)
def test_a_peer_that_ends_while_it_starts_is_not_waited_for(
    tmp_path: Path, does: str, how: str
) -> None:
    """What left it out is told with its last words."""
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\necho too bad\n{does}\n")
    program.chmod(0o755)
    server = Llama(tmp_path, tmp_path, "broken", tmp_path / "none.gguf")
    try:
        with pytest.raises(BenchError, match=f"broken ended with {how} .*too bad"):
            asyncio.run(server.start(Prompts(0)))
    finally:
        server.stop()


def test_a_version_is_found_beside_other_lines() -> None:
    """Newer programs log before they tell it."""
    assert llama_version("version: 1 (a)\nbuilt with GNU 12\n") == "1 (a), built with GNU 12"
    assert llama_version("0.0 I srv init: ...\nversion: 2\n\nbuilt with X") == "2, built with X"
    assert llama_version("") == "unknown"
