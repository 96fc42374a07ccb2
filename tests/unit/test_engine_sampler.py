"""How a token is chosen: order of the rules, ties, the generator, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.sampling import SamplingParams
from baton.engine.sampler import SamplingFailed, sample, uniform
from baton.ports.engine import Sampled, SampleSpec

LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -1.0, 0.5], dtype=np.float32)


def choose(
    logits: Any = LOGITS,
    *,
    index: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    seed: int = 0,
    **params: Any,
) -> Sampled:
    spec = SampleSpec(
        SamplingParams(seed=seed, **params), index, np.array(prompt, dtype=np.int32), output
    )
    return sample(np.asarray(logits, dtype=np.float32), spec)


def kept(draws: int = 400, **params: Any) -> set[int]:
    """Return all ids drawn under ``params``."""
    return {choose(index=i, **params).token_id for i in range(draws)}


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    """Ids 1 and 3 tie: the answer is 1, whatever a sort would do."""
    assert choose(temperature=0.0).token_id == 1


def test_the_generator_is_pinned() -> None:
    """The numbers of Philox4x64-10 keyed by (seed, choice) never change between versions."""
    assert uniform(7, 0, 0) == pytest.approx(PINNED[0], abs=0)
    assert uniform(7, 1, 0) == pytest.approx(PINNED[1], abs=0)
    assert uniform(7, 0, 1) == pytest.approx(PINNED[2], abs=0)
    assert uniform(-1, 0, 0) == pytest.approx(PINNED[3], abs=0)


PINNED = (0.8720734548204873, 0.8824668302545412, 0.0828426870273763, 0.23494158814525556)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 15), st.integers(0, 2**31))
def test_a_draw_depends_on_seed_choice_and_index_alone(seed: int, choice: int, index: int) -> None:
    """Any process, at any time, draws the same number for the same three keys."""
    number = uniform(seed, choice, index)
    assert 0.0 <= number < 1.0
    assert uniform(seed, choice, index) == number
    assert uniform(seed, choice, index + 1) != number


def test_draws_follow_the_softmax() -> None:
    """Frequencies of 4,000 draws are those of softmax(logits / temperature) within 4 sigma."""
    draws = 4_000
    found = Counter(choose(index=i, temperature=0.7).token_id for i in range(draws))
    weights = np.exp(LOGITS.astype(np.float64) / 0.7)
    for token, share in enumerate(weights / weights.sum()):
        assert abs(found[token] / draws - share) < 4 * (share * (1 - share) / draws) ** 0.5 + 1e-9


def test_top_k_keeps_exactly_k_and_the_lower_id_of_a_tie() -> None:
    """With k = 1 only id 1 is left of the tie of 1 and 3."""
    assert kept(top_k=1) == {1}
    assert kept(top_k=2) == {1, 3}
    assert kept(top_k=3) == {1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """1 and 3 hold 0.37 each: p = 0.3 keeps one, p = 0.5 two, p = 1 all."""
    assert kept(top_p=0.3) == {1}
    assert kept(top_p=0.5) == {1, 3}
    assert kept(top_p=1.0, draws=3000) == {0, 1, 2, 3, 4, 5}


def test_min_p_cuts_below_a_share_of_the_best() -> None:
    """exp(2 - 3) = 0.37 of the best stays at 0.3 and goes at 0.4."""
    assert kept(min_p=0.3) == {1, 2, 3}
    assert kept(min_p=0.4) == {1, 3}


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from([0.3, 0.9, 0.999]), st.sampled_from([0, 5, 400]))
def test_the_short_cut_of_top_p_equals_a_full_sort(seed: int, top_p: float, top_k: int) -> None:
    """Looking at the best 256 first never changes the answer."""
    logits = np.random.default_rng(seed).normal(0, 2, 2_000).astype(np.float32).round(1)
    order = np.lexsort((np.arange(logits.size), -logits))
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    if top_k:
        weights, order = weights[:top_k], order[:top_k]
    mass = np.cumsum(weights)
    count = int(np.searchsorted(mass, top_p * weights.sum())) + 1
    mass = mass[:count]
    wanted = order[int(np.searchsorted(mass, uniform(seed, 0, 3) * mass[-1], side="right"))]
    got = choose(logits, index=3, seed=seed, top_p=top_p, top_k=top_k).token_id
    assert got == wanted


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([1, 255, 256, 257, 3_000]), st.booleans())
def test_a_draw_from_all_ids_is_the_inverse_of_their_mass(
    seed: int, size: int, masked: bool
) -> None:
    """Summing by stretches gives the id that one running sum gives."""
    logits = np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)
    allowed = tuple(range(0, size, 7)) if masked else ()
    weights = np.exp(logits.astype(np.float64) - logits.max())
    if masked:
        weights = np.where(np.arange(size) % 7 == 0, weights, 0.0)
    mass = np.cumsum(weights)
    wanted = int(np.searchsorted(mass, uniform(seed, 0, 3) * mass[-1], side="right"))
    got = choose(logits, index=3, seed=seed, allowed_token_ids=allowed).token_id
    assert got == wanted


def test_repetition_penalty_looks_at_prompt_and_output() -> None:
    """Positive logits are divided, negative ones multiplied, each id once."""
    assert choose(temperature=0.0, repetition_penalty=2.0, prompt=(1, 1)).token_id == 3
    assert choose(temperature=0.0, repetition_penalty=2.0, prompt=(1,), output=(3,)).token_id == 2
    found = choose([-1.0, -1.5], temperature=0.0, repetition_penalty=2.0, output=(0,))
    assert found.token_id == 1


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    """Ids of the prompt cost nothing; each repeat adds the frequency penalty once more."""
    assert choose(temperature=0.0, presence_penalty=2.0, prompt=(1,)).token_id == 1
    assert choose(temperature=0.0, presence_penalty=0.5, output=(1,)).token_id == 3
    twice = {"temperature": 0.0, "frequency_penalty": 0.6}
    assert choose(output=(1, 3), **twice).token_id == 1
    assert choose(output=(1, 1, 3, 3), **twice).token_id == 2


def test_bias_and_masks() -> None:
    """A bias is added; what is not allowed is never chosen, not even by a bias of 100."""
    assert choose(temperature=0.0, logit_bias={4: 100.0}).token_id == 4
    assert choose(temperature=0.0, logit_bias={4: 100.0}, allowed_token_ids=(0, 5)).token_id == 0
    assert kept(allowed_token_ids=(0, 5)) == {0, 5}


def test_bad_words_ban_the_last_id_only_after_the_others() -> None:
    """(2, 1) bans 1 after 2 was emitted; (3,) bans 3 always; the prompt does not count."""
    banned = ((2, 1), (3,))
    assert choose(temperature=0.0, bad_words_ids=banned).token_id == 1
    assert choose(temperature=0.0, bad_words_ids=banned, prompt=(2,)).token_id == 1
    assert choose(temperature=0.0, bad_words_ids=banned, output=(2,)).token_id == 2


def test_stop_ids_are_masked_until_min_tokens() -> None:
    """With min_tokens 2 the stop id may come at index 2, not at 0 or 1."""
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (1, 3)}
    assert [choose(index=i, **params).token_id for i in range(3)] == [2, 2, 1]


def test_logprobs_are_of_the_models_own_logits() -> None:
    """Bias, penalties and temperature do not show; ties are listed by id."""
    found = choose(temperature=0.0, logit_bias={4: 100.0}, logprobs=3)
    raw = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert found.logprob is not None
    assert found.logprob.token_id == 4
    assert found.logprob.logprob == pytest.approx(raw[4])
    assert [token for token, _ in found.logprob.top] == [1, 3, 2]
    assert found.logprob.top[0][1] == pytest.approx(raw[1])
    assert choose(temperature=0.0).logprob is None
    none = choose(temperature=0.0, logprobs=0).logprob
    assert none is not None
    assert none.top == ()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_is_an_error(bad: float) -> None:
    """No token is made up from broken logits, and nobody is told to try again."""
    logits = LOGITS.copy()
    logits[2] = bad
    with pytest.raises(SamplingFailed, match="not finite") as caught:
        choose(logits, temperature=0.0)
    assert not caught.value.retryable


def test_masks_that_leave_nothing_are_an_error() -> None:
    """Allowing one id and banning it is said, not papered over."""
    with pytest.raises(SamplingFailed, match="no token"):
        choose(allowed_token_ids=(2,), bad_words_ids=((2,),))


def test_the_logits_are_not_changed() -> None:
    """The caller may sample the same logits again."""
    logits = LOGITS.copy()
    choose(logits, logit_bias={0: 5.0}, allowed_token_ids=(0,), top_p=0.5, logprobs=2)
    assert np.array_equal(logits, LOGITS)
