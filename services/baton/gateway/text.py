"""From token ids to the text a client sees: pure functions of the ids and the request.

Decides what of the text may leave (complete characters, nothing that may become a stop string)
and where it ends. Whatever way the ids are cut into runs, the joined pieces are the same text, so
any gateway, streaming or not, gives the same answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.wire.fields import TokenLogprob


class Vocabulary(Protocol):
    """The bytes of each token."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes ``token_id`` adds to the text; unknown ids add none."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token marks structure and is no text."""
        ...


class StopScanner:
    """Finds the first stop string in a growing text.

    The match that starts earliest counts, the longest of those that start together. One
    Knuth-Morris-Pratt automaton a stop string, one step a character: the result cannot depend on
    how the text is cut, and what must be held back is known exactly.
    """

    def __init__(self, stops: Sequence[str], *, longest: bool) -> None:
        self._stops = stops
        self._failures = [_failures(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._longest = longest
        """Whether a longer match at the same start is worth waiting for (its text is kept)."""
        self._length = 0
        self.match: tuple[int, int] | None = None
        """Start and end of the best match so far; final when :attr:`decided`."""
        self.decided = False

    def feed(self, text: str) -> None:
        """Scan more text, up to the character that decides."""
        for char in text:
            if self.decided:
                return
            self._length += 1
            for number, stop in enumerate(self._stops):
                self._step(number, stop, char)
            self.decided = self.match is not None and not self._better_possible()

    def _step(self, number: int, stop: str, char: str) -> None:
        failures = self._failures[number]
        state = self._states[number]
        while state and (state == len(stop) or stop[state] != char):
            state = failures[state - 1]
        if stop[state] == char:
            state += 1
        self._states[number] = state
        if state == len(stop):
            start = self._length - state
            if self.match is None or (start, -self._length) < (self.match[0], -self.match[1]):
                self.match = (start, self._length)

    def _better_possible(self) -> bool:
        assert self.match is not None
        for state, stop in zip(self._states, self._stops, strict=True):
            start = self._length - state
            if 0 < state < len(stop) and (
                start < self.match[0] or (self._longest and start == self.match[0])
            ):
                return True
        return False

    @property
    def safe(self) -> int:
        """How many characters can belong to no stop string any more."""
        if self.match is not None:
            held = self._length - self.match[0]
            return self._length - max(held, *self._states)
        return self._length - max(self._states, default=0)


def _failures(stop: str) -> list[int]:
    """The failure function: longest proper prefix that is also a suffix, for each length."""
    table = [0] * len(stop)
    state = 0
    for i in range(1, len(stop)):
        while state and stop[i] != stop[state]:
            state = table[state - 1]
        if stop[i] == stop[state]:
            state += 1
        table[i] = state
    return table


@dataclass(slots=True)
class Piece:
    """What one feeding released."""

    text: str = ""
    tokens: list[TextToken] = field(default_factory=list)
    """Tokens whose text is now wholly released (or cut away), in order, each exactly once."""


@dataclass(frozen=True, slots=True)
class TextToken:
    """One output token with what the client may learn of it."""

    token_id: int
    raw: bytes
    """Its bytes; empty where its text is no part of the answer."""
    offset: int
    """Where its text begins in the answer, in characters."""
    logprob: TokenLogprob | None


class AnswerText:
    """The text of one choice, from ids in order."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        skip_special: bool = True,
        end_ids: frozenset[int] = frozenset(),
        strip_first_space: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._scanner = StopScanner(stops, longest=keep_stop) if stops else None
        self._keep_stop = keep_stop
        self._skip_special = skip_special
        self._end_ids = end_ids
        self._strip = strip_first_space
        self._held = ""
        """Decoded and not released."""
        self._released = 0
        self._length = 0
        """Characters decoded."""
        self._waiting: list[tuple[TextToken, int]] = []
        """Tokens not released yet, with the text length after each."""
        self.tokens_fed = 0
        self.stopped_at: int | None = None
        """Tokens used when a stop string was complete; the text is over then."""

    def feed(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] = (), *, ends: bool = False
    ) -> Piece:
        """Take the next ids. ``ends``: the last of them finished the answer at the worker; if it
        is a stop id, it adds no text. After a stop string was found everything is ignored."""
        for position, token_id in enumerate(ids):
            if self.stopped_at is not None:
                break
            last = ends and position == len(ids) - 1
            raw = self._bytes_of(token_id, final=last)
            text = self._decoder.decode(raw)
            logprob = logprobs[position] if logprobs else None
            token = TextToken(token_id, raw, self._length, logprob)
            self._held += text
            self._length += len(text)
            self._waiting.append((token, self._length))
            self.tokens_fed += 1
            self._scan(text)
        return self._release(self._safe())

    def finish(self) -> Piece:
        """No more ids come: release what is held (an incomplete character as U+FFFD)."""
        if self.stopped_at is None:
            rest = self._decoder.decode(b"", final=True)
            self._held += rest
            self._length += len(rest)
            self._scan(rest)
        if self._scanner is not None and self._scanner.match is not None:
            self.stopped_at = self.stopped_at or self.tokens_fed
            piece = self._release(self._cut())
        else:
            piece = self._release(self._length)
        piece.tokens += [token for token, _ in self._waiting]
        self._waiting.clear()
        self._held = ""
        return piece

    @property
    def stop_string_found(self) -> bool:
        """Whether a stop string ended the text."""
        return self.stopped_at is not None

    def _bytes_of(self, token_id: int, *, final: bool) -> bytes:
        if final and token_id in self._end_ids:
            return b""
        if self._skip_special and self._vocabulary.is_special(token_id):
            return b""
        raw = self._vocabulary.token_bytes(token_id)
        if self._strip and raw:
            self._strip = False
            return raw.removeprefix(b" ")
        return raw

    def _scan(self, text: str) -> None:
        if self._scanner is None or self.stopped_at is not None:
            return
        self._scanner.feed(text)
        if self._scanner.decided:
            self.stopped_at = self.tokens_fed

    def _safe(self) -> int:
        if self._scanner is None:
            return self._length
        return self._cut() if self.stopped_at is not None else self._scanner.safe

    def _cut(self) -> int:
        """Where the text ends, given a match."""
        assert self._scanner is not None
        assert self._scanner.match is not None
        start, end = self._scanner.match
        return end if self._keep_stop else start

    def _release(self, upto: int) -> Piece:
        count = upto - self._released
        assert count >= 0, "text is never taken back"
        piece = Piece(self._held[:count])
        self._held = self._held[count:]
        self._released = upto
        done = 0
        for _, end in self._waiting:
            if end > upto:
                break
            done += 1
        piece.tokens = [token for token, _ in self._waiting[:done]]
        del self._waiting[:done]
        return piece
