"""From logits to one token: a pure function, the same in every process and after every recovery.

Decides the order of the rules (bias, penalties, masks, temperature, min_p, top_k, top_p, draw) and
the generator. Knows nothing of text, stop strings or budgets. Needs numpy only.

The draw is *counter-based*: the uniform number of a token is Philox4x64-10 with the key
``(seed, choice)`` at the counter ``index``. There is no state to hand over or to recover: whoever
computes output token ``index`` of a request draws the same number.

Ties go to the lower token id everywhere, so that equal logits never depend on a sort's whims.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from baton.core.sampling import SamplingParams
from baton.ports.engine import Row, Sampled, SampleSpec, StepFailed
from baton.wire.fields import TokenLogprob

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Ids = NDArray[np.int64]

_MASK_64 = 2**64 - 1
#: Candidates looked at, in turn, before the whole vocabulary is sorted for top_p:
#: a full sort takes longer than a step.
_HEADS = (256, 4_096)
#: Summed at a time where a draw goes through the whole vocabulary.
_STRETCH = 256


class SamplingFailed(ValueError):
    """No token can be chosen from these logits; repeating the same step cannot help."""

    retryable = False


def uniform(seed: int, choice: int, index: int) -> float:
    """Return the number in [0, 1) that draws output token ``index``; a multiple of 2**-53."""
    key = np.array([seed & _MASK_64, choice], dtype=np.uint64)
    raw = int(np.random.Philox(key=key, counter=[index, 0, 0, 0]).random_raw())
    return (raw >> 11) * 2.0**-53


def sample_rows(
    rows: Sequence[Row], logits: Iterable[F32], *, stored: bool
) -> list[Sampled | None]:
    """Choose the token of every row that samples; ``logits`` has their lines in order.

    ``stored``: whether it was told that the step is stored, which is not done again then.

    Raises:
        StepFailed: names the rows for which none can be chosen.
    """
    results: list[Sampled | None] = []
    failed: dict[str, str] = {}
    lines = iter(logits)
    for row in rows:
        if row.sample is None:
            results.append(None)
            continue
        try:
            results.append(sample(next(lines), row.sample))
        except SamplingFailed as error:
            results.append(None)
            failed[row.request_id] = str(error)
    if failed:
        text = "; ".join(f"request {name}: {why}" for name, why in failed.items())
        whole = results if stored else ()
        raise StepFailed(text, tuple(failed), retryable=False, results=whole)
    return results


def sample(logits: F32, spec: SampleSpec) -> Sampled:
    """Choose the token after ``spec.output``.

    Args:
        logits: float32 [vocab], as the model gave them; not changed.
        spec: parameters and the ids before.

    Raises:
        SamplingFailed: a logit is not finite, or the masks leave no token.
    """
    params = spec.params
    if not np.isfinite(logits).all():
        bad = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise SamplingFailed(
            f"logits are not finite (id {bad}: {logits[bad]}) at output index {spec.index}"
        )
    scores = _masked(_penalised(logits, spec), spec)
    token = int(scores.argmax())
    if not np.isfinite(scores[token]):
        raise SamplingFailed(f"the masks leave no token to choose at output index {spec.index}")
    if params.temperature != 0:
        scores -= scores[token]
        token = _draw(scores, params, spec.index)
    return Sampled(token, _logprob(logits, token, params.logprobs))


def _penalised(logits: F32, spec: SampleSpec) -> F64:
    """Return a float64 copy with bias and penalties applied.

    Repetition looks at prompt and output (Keskar et al. 2019, as transformers does), presence and
    frequency at the output alone (OpenAI's definition).
    """
    params = spec.params
    scores = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    output = np.asarray(spec.output, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate((spec.prompt.astype(np.int64), output)))
        held = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = np.where(held > 0, held / penalty, held * penalty)
    if output.size and (params.presence_penalty or params.frequency_penalty):
        seen, counts = np.unique(output, return_counts=True)
        scores[seen] -= params.presence_penalty + params.frequency_penalty * counts
    return scores


def _masked(scores: F64, spec: SampleSpec) -> F64:
    """Set what must not be chosen to -inf. After the bias: a mask is never outvoted."""
    params = spec.params
    if params.allowed_token_ids:
        allowed = np.asarray(params.allowed_token_ids, dtype=np.int64)
        kept = np.full_like(scores, -np.inf)
        kept[allowed] = scores[allowed]
        scores = kept
    for word in params.bad_words_ids:
        before = word[:-1]
        if not before or tuple(spec.output[-len(before) :]) == tuple(before):
            scores[word[-1]] = -np.inf
    if spec.index < params.min_tokens:
        scores[list(params.stop_token_ids)] = -np.inf
    return scores


def _draw(scores: F64, params: SamplingParams, index: int) -> int:
    """Draw by inverse transform: in order of ids, or from the best down where a filter cuts.

    ``scores``, of which the largest is 0, are used up: fresh memory of that size costs more than
    what is computed in it.
    """
    scores /= params.temperature
    weights = np.exp(scores, out=scores)
    point = uniform(params.seed, params.choice, index)
    if params.min_p > 0:
        weights[weights < params.min_p] = 0.0  # the largest weight is exp(0) = 1
    if params.top_k <= 0 and params.top_p >= 1.0:
        return _inverse_of_all(weights, point)
    kept = _filtered(weights, params)
    return int(kept[_inverse(weights[kept], point)])


def _filtered(weights: F64, params: SamplingParams) -> Ids:
    """Return the ids that top_k and then top_p leave, best first."""
    if params.top_k > 0:
        best = _best(weights, min(params.top_k, weights.size))
        whole = float(weights[best].sum())
    else:
        whole = float(weights.sum())
        for count in (*_HEADS, weights.size):
            best = _best(weights, min(count, weights.size))
            if weights[best].sum() >= params.top_p * whole:
                break
    if params.top_p >= 1.0:
        return best
    mass = np.cumsum(weights[best])
    return best[: int(np.searchsorted(mass, params.top_p * whole)) + 1]


def _best(values: F64, count: int) -> Ids:
    """Return the ids of the ``count`` largest, best first, ties by id.

    All ties of the smallest kept value take part before the cut, so the answer is that of a full
    stable sort.
    """
    if count < values.size:
        edge = np.partition(values, values.size - count)[values.size - count]
        ids = np.flatnonzero(values >= edge)
    else:
        ids = np.arange(values.size)
    order = np.argsort(-values[ids], kind="stable")
    return ids[order][:count]


def _inverse_of_all(weights: F64, point: float) -> int:
    """Return the same as :func:`_inverse` but for roundings: by sums of stretches first, since
    adding one number after the other is the slowest part of a draw."""
    even = weights.size - weights.size % _STRETCH
    sums = weights[:even].reshape(-1, _STRETCH).sum(axis=1)
    mass = np.cumsum(np.append(sums, weights[even:].sum()))
    aim = point * mass[-1]
    stretch = int(np.searchsorted(mass, aim, side="right"))
    if stretch >= mass.size:  # rounding put the point on the total itself
        return int(np.flatnonzero(weights)[-1])
    start = stretch * _STRETCH
    part = weights[start : start + _STRETCH]
    before = mass[stretch - 1] if stretch else 0.0
    found = int(np.searchsorted(np.cumsum(part), aim - before, side="right"))
    if found >= part.size:  # the same on the total of the stretch
        found = int(np.flatnonzero(part)[-1])
    return start + found


def _inverse(weights: F64, point: float) -> int:
    """Return the first index whose cumulative weight exceeds ``point`` of the total."""
    mass = np.cumsum(weights)
    found = int(np.searchsorted(mass, point * mass[-1], side="right"))
    if found >= weights.size:  # rounding put the point on the total itself
        found = int(np.flatnonzero(weights)[-1])
    return found


def _logprob(logits: F32, token: int, best: int) -> TokenLogprob | None:
    """Return log-softmax of the model's own logits: before bias, penalties and temperature."""
    if best < 0:
        return None
    raw = logits.astype(np.float64)
    raw -= raw.max()
    raw -= np.log(np.exp(raw).sum())
    top = tuple((int(i), float(raw[i])) for i in _best(raw, best)) if best else ()
    return TokenLogprob(token, float(raw[token]), top)
