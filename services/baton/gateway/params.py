"""Checks what a client asked for and turns it into what the engine understands.

The one place of validation: behind it nobody checks again. Decides names, ranges and defaults of
all request fields that the endpoints share; each error is a 400 that names the field.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs

from baton.core.limits import Limits
from baton.core.sampling import SamplingParams
from baton.gateway.errors import context_exceeded, invalid, model_not_found, not_supported
from baton.gateway.fields import INT64, Fields
from baton.gateway.tokens import ModelText

LOGIT_BIAS_MAX = 1_024
TOKEN_IDS_MAX = 1_024
BAD_WORDS_MAX = 64


@dataclass(frozen=True, slots=True)
class Wish:
    """A checked request, apart from its prompt."""

    sampling: SamplingParams
    """Without a seed of its own (0) until :attr:`seed` is settled."""
    seed: int | None
    max_tokens: int | None
    """``None``: up to the context's end."""
    max_tokens_field: str
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stops: tuple[str, ...]
    keep_stop: bool
    skip_special: bool
    return_token_ids: bool
    end_ids: frozenset[int]
    """Ids that end the answer and are no part of its text."""


def read_wish(
    fields: Fields, text: ModelText, limits: Limits, *, max_tokens_keys: tuple[str, ...]
) -> Wish:
    """Check the fields that all endpoints share, but for log-probabilities."""
    context = text.info.context_max
    stream = fields.flag("stream")
    include_usage, continuous = _stream_options(fields, stream)
    max_key = next((k for k in max_tokens_keys if fields.get(k) is not None), max_tokens_keys[0])
    max_tokens = fields.integer(max_key, None, 1, INT64 - 1)
    for key in max_tokens_keys:
        fields.integer(key, None, 1, INT64 - 1)
    n = fields.integer("n", 1, 1, limits.choices_max)
    assert n is not None
    ignore_eos = fields.flag("ignore_eos")
    stop_ids = fields.token_ids("stop_token_ids", text.info.vocab_size, TOKEN_IDS_MAX)
    end_ids = frozenset(stop_ids) | (frozenset() if ignore_eos else frozenset(text.info.eos_ids))
    sampling = _read_sampling(fields, text, end_ids)
    if max_tokens is not None and sampling.min_tokens > max_tokens:
        raise fields.fail("min_tokens", f"must not be larger than '{max_key}'")
    if sampling.min_tokens > context:
        raise fields.fail("min_tokens", f"must be at most {context}")
    return Wish(
        sampling=sampling,
        seed=fields.integer("seed", None, -INT64, INT64 - 1),
        max_tokens=max_tokens,
        max_tokens_field=max_key,
        n=n,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous,
        stops=fields.strings("stop", limits.stops_max, limits.stop_chars_max),
        keep_stop=fields.flag("include_stop_str_in_output"),
        skip_special=fields.flag("skip_special_tokens", True),
        return_token_ids=fields.flag("return_token_ids"),
        end_ids=end_ids,
    )


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    options = fields.object("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise fields.fail("stream_options", "is only allowed with 'stream': true")
    usage = options.flag("include_usage")
    return usage, options.flag("continuous_usage_stats")


def _read_sampling(fields: Fields, text: ModelText, end_ids: frozenset[int]) -> SamplingParams:
    vocab = text.info.vocab_size
    top_k = fields.integer("top_k", 0, -1, INT64 - 1)
    min_tokens = fields.integer("min_tokens", 0, 0, INT64 - 1)
    assert top_k is not None
    assert min_tokens is not None
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise fields.fail("top_p", "must be greater than 0 and at most 1")
    penalty = fields.number("repetition_penalty", 1.0, 0.0, 100.0)
    if penalty < 0.01:
        raise fields.fail("repetition_penalty", "must be between 0.01 and 100")
    return SamplingParams(
        seed=0,
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=top_p,
        top_k=min(max(top_k, 0), vocab),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=penalty,
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(fields, vocab),
        allowed_token_ids=fields.token_ids("allowed_token_ids", vocab, vocab),
        bad_words_ids=_bad_words(fields, text),
        min_tokens=min_tokens,
        stop_token_ids=tuple(sorted(end_ids)),
    )


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    bias = fields.object("logit_bias")
    if bias is None:
        return {}
    if len(bias.values) > LOGIT_BIAS_MAX:
        raise fields.fail("logit_bias", f"may hold at most {LOGIT_BIAS_MAX} entries")
    bad = [key for key in bias.values if not _is_token(key, vocab_size)]
    if bad:
        shown = ", ".join(repr(key[:40]) for key in bad[:20])
        raise fields.fail(
            "logit_bias",
            f"keys must be token ids from 0 to {vocab_size - 1} as strings; wrong: {shown}",
        )
    result = {}
    for key in bias.values:
        if bias.get(key) is None:
            raise bias.fail(key, "must be a number")
        result[int(key)] = bias.number(key, 0.0, -100.0, 100.0)
    return result


def _is_token(key: str, vocab_size: int) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size


def _bad_words(fields: Fields, text: ModelText) -> tuple[tuple[int, ...], ...]:
    words = fields.strings("bad_words", BAD_WORDS_MAX, 256)
    sequences = []
    for word in words:
        # With and without the blank before it: both spellings are the same word to a reader.
        for spelling in (word, " " + word.lstrip()):
            ids = tuple(text.encode(spelling, special=False))
            if ids and ids not in sequences:
                sequences.append(ids)
    return tuple(sequences)


def chat_logprobs(fields: Fields, limits: Limits) -> int:
    """Return ``SamplingParams.logprobs`` for chat: a flag and a count."""
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", None, 0, limits.logprobs_max)
    if top is not None and not wanted:
        raise fields.fail("top_logprobs", "needs 'logprobs': true")
    return (top or 0) if wanted else -1


def completion_logprobs(fields: Fields, limits: Limits) -> int:
    """Return ``SamplingParams.logprobs`` for completions: a count."""
    count = fields.integer("logprobs", -1, 0, limits.logprobs_max)
    assert count is not None
    return count


def with_logprobs(wish: Wish, count: int) -> Wish:
    """Return ``wish`` with that many alternatives a token."""
    return replace(wish, sampling=structs.replace(wish.sampling, logprobs=count))


def sampling_of(wish: Wish, seed: int, choice: int) -> SamplingParams:
    """Return the parameters of one choice."""
    return structs.replace(wish.sampling, seed=seed, choice=choice)


def refuse_unsupported(fields: Fields) -> None:
    """Refuse what would change the answer and is not there yet; ignore what would not."""
    response_format = fields.object("response_format")
    if response_format is not None:
        kind = response_format.text("type")
        if kind in ("json_object", "json_schema"):
            raise not_supported("response_format", f"'response_format' of type '{kind}'")
        if kind != "text":
            raise invalid("response_format.type", "'response_format.type' must be 'text'")
    for key in ("tools", "functions"):
        value = fields.get(key)
        if value is not None and not isinstance(value, list):
            raise fields.fail(key, "must be a list")
        if value:
            raise not_supported(key, f"'{key}'")
    choice = fields.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise fields.fail("tool_choice", "needs 'tools', which is not supported yet")
    if fields.get("function_call") not in (None, "none", "auto"):
        raise not_supported("function_call", "'function_call'")
    for key in ("audio", "guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if fields.get(key) is not None:
            raise not_supported(key, f"'{key}'")
    modalities = fields.get("modalities")
    if modalities not in (None, ["text"]):
        raise fields.fail("modalities", 'must be ["text"]')


def check_model(fields: Fields, names: frozenset[str]) -> str:
    """Return the model's name as the client wrote it."""
    name = fields.text("model")
    if name is None:
        raise invalid("model", "'model' is required")
    if name not in names:
        raise model_not_found(name)
    return name


def check_context(wish: Wish, prompt_tokens: int, context: int, param: str) -> int:
    """Return the most output tokens, or raise the 400 that names the limit."""
    room = context - prompt_tokens
    if wish.max_tokens is None:
        if room < 1:
            raise context_exceeded(context, prompt_tokens, None, param)
        return room
    if wish.max_tokens > room:
        raise context_exceeded(context, prompt_tokens, wish.max_tokens, wish.max_tokens_field)
    return wish.max_tokens
