"""The sampling parameters of a request, as every process sees them.

Decides their names, units and defaults, not how a token is drawn (``baton.engine.sampler``).
The gateway validates what a client sent; behind it, the bounds here keep nonsense out of the wire.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Weight = Annotated[float, Meta(ge=-1_000, le=1_000)]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. A recovered request carries the very same parameters."""

    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    """Of the counter-based generator, any signed 64-bit value; drawn at admission if not given."""
    choice: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Index of the choice (``n > 1``): the second key of the generator."""
    temperature: Annotated[float, Meta(ge=0, le=1_000)] = 1.0
    """0 is greedy."""
    top_p: _Share = 1.0
    top_k: int = 0
    """0 switches it off."""
    min_p: _Share = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=1_000)] = 1.0
    """Divides (positive) or multiplies (negative) logits of ids in prompt or output."""
    presence_penalty: _Weight = 0.0
    frequency_penalty: _Weight = 0.0
    logit_bias: dict[_Id, _Weight] = {}
    allowed_token_ids: tuple[_Id, ...] = ()
    """Empty allows all."""
    bad_words_ids: tuple[tuple[_Id, ...], ...] = ()
    """Token sequences whose last token is banned where the ones before it were just emitted."""
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Stop ids are masked until that many tokens were produced."""
    stop_token_ids: tuple[_Id, ...] = ()
    """Ids that end the request, the model's own end-of-sequence ids included unless ignored."""
    logprobs: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    """-1 none; k >= 0: the chosen token's log-probability and the k best."""
