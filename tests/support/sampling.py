"""One request's wishes that ask for everything at once."""

from __future__ import annotations

from baton.core.sampling import SamplingParams

#: None of it may begin anew where a request goes on. The ids are letters of the fake model's text;
#: answers end at a stop id after their least length.
EVERY_RULE = SamplingParams(
    seed=11,
    choice=1,
    temperature=1.2,
    top_p=0.85,
    top_k=14,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.4,
    frequency_penalty=0.9,
    logit_bias={97: 1.5, 101: 2.5, 116: -2.0},
    allowed_token_ids=tuple(range(95, 123)),
    bad_words_ids=((101, 116), (110,)),
    min_tokens=6,
    stop_token_ids=(101, 115),
)
