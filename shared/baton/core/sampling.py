"""The sampling parameters of a request, as every process sees them.

Decides their names, units and defaults, not how a token is drawn (``baton.engine.sampler``).
The gateway validates what a client sent; nobody checks again behind it.
"""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. A recovered request carries the very same parameters."""

    seed: int
    """Of the counter-based generator, any signed 64-bit value; drawn at admission if not given."""
    choice: int = 0
    """Index of the choice (``n > 1``): the second key of the generator."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 switches it off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides (positive) or multiplies (negative) logits of ids in prompt or output."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    """Empty allows all."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is banned where the ones before it were just emitted."""
    min_tokens: int = 0
    """Stop ids are masked until that many tokens were produced."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request, the model's own end-of-sequence ids included unless ignored."""
    logprobs: int = -1
    """-1 none; k >= 0: the chosen token's log-probability and the k best."""
