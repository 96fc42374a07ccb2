"""The chunk size finds the longest step below the limit, whatever a step costs at least."""

from __future__ import annotations

import pytest

from baton.prefill.chunk_size import ChunkSize


@pytest.mark.parametrize(
    ("fixed_s", "per_token_s", "expected"),
    [
        (0.0, 0.001, 256),  # fast: the configured maximum
        (0.05, 0.004, 112),  # about 450 ms of tokens fit
        (0.3, 0.002, 96),  # weights alone take most of it, yet chunks stay long
    ],
)
def test_settles_near_the_limit(fixed_s: float, per_token_s: float, expected: int) -> None:
    """Steps that cost a + b * tokens end up as long as the limit allows, within a quarter."""
    size = ChunkSize(block_size=16, tokens_max=256, limit_s=0.5)
    for _ in range(50):
        tokens = size.tokens()
        size.learn(tokens, fixed_s + per_token_s * tokens)
    assert expected * 0.7 <= size.tokens() <= expected


def test_slow_minute_is_forgotten() -> None:
    """After steps that took too long for any size, fast ones bring the size back."""
    size = ChunkSize(block_size=16, tokens_max=256, limit_s=0.5)
    for _ in range(20):
        size.learn(size.tokens(), 2.0)
    assert size.tokens() == 16
    for _ in range(40):
        size.learn(size.tokens(), 0.1)
    assert size.tokens() == 256


def test_short_last_chunk_says_nothing_about_long_ones() -> None:
    """A prompt's short end is fast because it is short."""
    size = ChunkSize(block_size=16, tokens_max=256, limit_s=0.5)
    before = size.tokens()
    for _ in range(10):
        size.learn(3, 0.01)
    assert size.tokens() == before


@pytest.mark.parametrize(("seconds", "begins"), [(0.07, 256), (0.4, 128)])
def test_what_was_rehearsed_need_not_be_found_out(seconds: float, begins: int) -> None:
    """A rehearsed chunk that is well below the limit is the first one; others are grown into."""
    size = ChunkSize(block_size=16, tokens_max=256, limit_s=0.5)
    size.rehearsed(256, seconds)
    size.rehearsed(64, 0.02)
    assert size.tokens() == begins
