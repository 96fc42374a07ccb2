"""Ids to text: nothing lost, nothing early, whatever the cuts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.gateway.text import AnswerText, StopScanner
from baton.wire.fields import TokenLogprob

END = 300
MARK = 301


class Bytes:
    """Ids below 256 are bytes; ids in ``words`` are texts; 300 and above mark structure."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self._words = words

    def token_bytes(self, token_id: int) -> bytes:
        if token_id >= 1000:
            return self._words[token_id - 1000].encode()
        return b"<mark>" if token_id >= END else bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return END <= token_id < 1000


def deltas(answer: AnswerText, ids: Sequence[int], cuts: Sequence[int] = ()) -> list[str]:
    """Feed ``ids`` cut at ``cuts``; return the pieces, the flush last."""
    borders = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    pieces = [
        answer.feed(ids[a:b], ends=b == len(ids)).text for a, b in itertools.pairwise(borders)
    ]
    return [*pieces, answer.finish().text]


def by_token(text: str | bytes, **options: object) -> tuple[list[str], AnswerText]:
    raw = text.encode() if isinstance(text, str) else text
    answer = AnswerText(Bytes(), **options)  # type: ignore[arg-type]
    return deltas(answer, list(raw), range(len(raw))), answer


def test_characters_are_never_split() -> None:
    """Single bytes of any script give whole characters, and the text back."""
    text = "Grüße 你好 👩‍👩‍👧 🇩🇪 नमस्ते"
    pieces, _ = by_token(text)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text


@pytest.mark.parametrize("cut", range(1, 60))
def test_every_cut_is_what_is_complete(cut: int) -> None:
    """An answer cut at its token limit ends with what is complete, and U+FFFD for the rest."""
    raw = "Grüße 你好 👩‍👩‍👧 🇩🇪 नमस्ते".encode()[:cut]
    pieces, _ = by_token(raw)
    assert "".join(pieces) == raw.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\xf0\x9f\x41\x42", "\ufffdAB"),
        (b"\xff\xfe\x43", "\ufffd\ufffdC"),
        (b"\xe4\xbd", "\ufffd"),
    ],
)
def test_invalid_bytes_do_not_stall(raw: bytes, text: str) -> None:
    """A byte that can begin or continue nothing is replaced at once; at most 3 are held."""
    pieces, _ = by_token(raw)
    assert "".join(pieces) == text
    stalled, _ = by_token(b"\xff" * 100)
    assert stalled[:100] == ["\ufffd"] * 100


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=10))
def test_joined_deltas_are_the_decode(raw: bytes, cuts: list[int]) -> None:
    """Joined deltas are the decode of all bytes, for any bytes and any cuts."""
    answer = AnswerText(Bytes())
    assert "".join(deltas(answer, list(raw), cuts)) == raw.decode("utf-8", "replace")


@given(
    st.text(alphabet="abcé", max_size=40),
    st.lists(st.text(alphabet="abcé", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 60), max_size=10),
    st.booleans(),
)
@settings(max_examples=400)
def test_stops_do_not_depend_on_cuts(
    text: str, stops: list[str], cuts: list[int], keep: bool
) -> None:
    """The text ends before the match that starts first, the longest of those, for any cuts."""
    answer = AnswerText(Bytes(), stops=stops, keep_stop=keep)
    joined = "".join(deltas(answer, list(text.encode()), cuts))
    starts = [(text.find(stop), -len(stop)) for stop in stops if stop in text]
    if not starts:
        assert joined == text
        assert not answer.stop_string_found
        return
    start, length = min(starts)
    assert joined == text[: start - length if keep else start]
    assert answer.stop_string_found


def test_stop_over_several_tokens_leaks_nothing() -> None:
    """No beginning of a stop string leaves before it is known to be none."""
    words = ["al", "pha be", "ta ga", "mma de", "lta"]
    ids = range(1000, 1005)
    answer = AnswerText(Bytes(words), stops=["beta gamma"])
    pieces = deltas(answer, list(ids), range(5))
    assert "".join(pieces) == "alpha "
    assert not any("be" in piece for piece in pieces)
    assert answer.stopped_at == 4
    answer = AnswerText(Bytes(words), stops=["beta gammX"])
    assert "".join(deltas(answer, list(ids), range(5))) == "alpha beta gamma delta"
    assert not answer.stop_string_found


@pytest.mark.parametrize(
    ("stops", "text"),
    [(["abd", "bca"], "a"), (["c", "abc"], ""), (["abd"], "abc"), (["abcabd"], "")],
)
def test_overlapping_stops(stops: list[str], text: str) -> None:
    """The first in the text wins, not the first in the list."""
    for options in (stops, stops[::-1]):
        assert "".join(by_token("abcabd", stops=options)[0]) == text


def test_nothing_after_the_stop() -> None:
    """What arrives with or after the stop is dropped, and not counted."""
    answer = AnswerText(Bytes(), stops=["e"])
    assert answer.feed(list(b"abcdefghi")).text == "abcd"
    assert answer.stopped_at == 5
    assert answer.feed(list(b"more")).text == ""
    assert answer.finish().text == ""
    assert answer.tokens_fed == 5


def test_pending_stop_prefix_is_flushed() -> None:
    """The held beginning of a stop that never came is text."""
    pieces, answer = by_token("bye <|eo", stops=["<|eot|>"])
    assert "".join(pieces) == "bye <|eo"
    assert pieces[-1] == "<|eo"
    assert not answer.stop_string_found


def test_end_id_adds_no_text_and_flushes_half_a_character() -> None:
    """The id that ended the answer is no text; half a character before it is U+FFFD."""
    answer = AnswerText(Bytes(), end_ids=frozenset({END, 65}), skip_special=False)
    pieces = [answer.feed([66, 65, 0xC3, END], ends=True).text, answer.finish().text]
    assert "".join(pieces) == "BA\ufffd"


def test_special_tokens_are_text_only_if_wanted() -> None:
    """skip_special_tokens decides."""
    for skip, text in ((True, "ab"), (False, "a<mark>b")):
        answer = AnswerText(Bytes(), skip_special=skip)
        assert answer.feed([97, MARK, 98]).text + answer.finish().text == text


@given(st.text(max_size=20), st.lists(st.integers(0, 90), max_size=8))
def test_every_token_is_handed_out_once_with_its_text(text: str, cuts: list[int]) -> None:
    """Log-probability entries: as many as tokens, in order, their bytes joined are the text."""
    ids = list(text.encode())
    answer = AnswerText(Bytes(), stops=["never matches"])
    tokens = []
    borders = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    for a, b in itertools.pairwise(borders):
        logprobs = [TokenLogprob(i, -1.0) for i in ids[a:b]]
        tokens += answer.feed(ids[a:b], logprobs).tokens
    tokens += answer.finish().tokens
    assert [token.token_id for token in tokens] == ids
    assert b"".join(token.raw for token in tokens) == text.encode()
    assert all(token.logprob is not None for token in tokens)


def test_tokens_are_not_handed_out_before_their_text() -> None:
    """A token whose text is held stays back with its entry."""
    answer = AnswerText(Bytes(), stops=["xyz"])
    assert [t.token_id for t in answer.feed(list(b"ax")).tokens] == [97]
    assert [t.token_id for t in answer.feed(list(b"q")).tokens] == [120, 113]


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=5))
def test_scanner_agrees_with_a_regular_expression(stops: list[str]) -> None:
    """On a long text over two letters the first match is what re finds."""
    text = "abbaabababbbaaababbabbaab" * 3
    scanner = StopScanner(stops, longest=True)
    scanner.feed(text)
    pattern = "|".join(re.escape(s) for s in sorted(stops, key=len, reverse=True))
    found = re.search(pattern, text)
    assert scanner.match == (found.span() if found else None)


def test_thousand_characters_of_stop_cost_little() -> None:
    """A long, nearly matching stop string costs one step a character."""
    stop = "a" * 1023 + "b"
    scanner = StopScanner([stop], longest=False)
    scanner.feed("a" * 20_000)
    assert scanner.match is None
    assert scanner.safe == 20_000 - 1023
