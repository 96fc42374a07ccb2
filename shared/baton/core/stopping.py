"""When a request is complete: one place for the first token and for every later one.

Decides on ids and counts only. Stop *strings* are the gateway's, which alone knows the text.
"""

from __future__ import annotations

from baton.core.outcomes import FinishReason
from baton.core.sampling import SamplingParams


def finish_of(
    params: SamplingParams, max_tokens: int, index: int, token_id: int
) -> FinishReason | None:
    """Return why output token ``index`` ends the request, or ``None`` if it does not.

    Stop ids below ``min_tokens`` cannot occur: the sampler masks them.
    """
    if token_id in params.stop_token_ids:
        return FinishReason.STOP
    if index + 1 >= max_tokens:
        return FinishReason.LENGTH
    return None
