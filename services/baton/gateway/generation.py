"""One client request while it is answered: its choices' ids become text, stops and usage.

Decides what of each choice can be shown now. Every endpoint formats the same :class:`Part` in its
own words, so streaming or not, chat or completions, the text is the same.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.core.outcomes import Ending, Reason
from baton.gateway.errors import ApiError, of_outcome
from baton.gateway.exchange import Exchange, Stream
from baton.gateway.params import Wish
from baton.gateway.recipe import Recipe
from baton.gateway.text import AnswerText, Piece, TextToken
from baton.gateway.tokens import ModelText
from baton.gateway.vocabulary import Deliver, End


@dataclass(slots=True)
class Part:
    """What one choice gained since the last time."""

    index: int
    text: str = ""
    tokens: list[TextToken] = field(default_factory=list)
    finish: str | None = None
    """``stop`` or ``length``, with the choice's last part."""


@dataclass(slots=True)
class _Choice:
    request_id: str
    index: int
    answer: AnswerText
    stop_told: bool = False
    cached_tokens: int = 0
    completion_tokens: int = 0
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a client request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def object(self) -> dict[str, object]:
        """Return the ``usage`` object of chat and completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Generation:
    """The choices of one client request, running."""

    def __init__(self, exchange: Exchange, text: ModelText, recipe: Recipe, stream: Stream) -> None:
        """``stream`` brings the ids of the recipe's choices."""
        self._exchange = exchange
        self._recipe = recipe
        self._failed: ApiError | None = None
        self._choices = {
            choice_id: _Choice(choice_id, index, _answer(text, recipe.wish))
            for index, choice_id in enumerate(recipe.choice_ids())
        }
        self._unfinished = recipe.choices
        self.stream = stream

    @property
    def count(self) -> int:
        """Number of choices."""
        return len(self._choices)

    @property
    def done(self) -> bool:
        """Whether every choice has given its last part."""
        return self._unfinished == 0

    async def parts(self, timeout_s: float) -> list[Part]:
        """Return what can be shown now, one part a choice; nothing after ``timeout_s``.

        Raises:
            ApiError: a choice ended without success (after its text was handed out).
            ClientLeft: nobody is there to be shown anything.
        """
        if self._failed:
            raise self._failed
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while True:
            parts = await self._take(until - loop.time())
            shown = [part for part in parts.values() if part.text or part.tokens or part.finish]
            if self._failed and not shown:
                raise self._failed
            if shown or loop.time() >= until:
                return shown

    async def _take(self, timeout_s: float) -> dict[int, Part]:
        items = await self.stream.take(timeout_s)
        if self.stream.left is not None:
            raise ClientLeft(self.stream.left)
        parts: dict[int, Part] = {}
        for item in items:
            choice = self._choices[item.request_id]
            part = parts.setdefault(choice.index, Part(choice.index))
            if isinstance(item, Deliver):
                self._feed(choice, item, part)
            else:
                self._close(choice, item, part)
        return parts

    def usage(self) -> Usage:
        """Count the tokens so far. Prompt tokens count once, however many choices share them."""
        choices, n = self._choices.values(), self._recipe.wish.n
        return Usage(
            prompt_tokens=self._recipe.prompt_tokens,
            completion_tokens=sum(choice.completion_tokens for choice in choices),
            cached_tokens=sum(c.cached_tokens for c in choices if c.index % n == 0),
        )

    def close(self, reason: Reason = Reason.CLIENT_CANCELLED) -> None:
        """Cancel whatever still runs; harmless when all is over."""
        self.stream.close(reason)

    def _feed(self, choice: _Choice, item: Deliver, part: Part) -> None:
        if choice.finished:
            return
        if item.index == 0:
            choice.cached_tokens = item.cached_tokens
        answer = choice.answer
        _add(part, answer.feed(item.ids, item.logprobs, ends=item.finish is not None))
        choice.completion_tokens = answer.tokens_fed
        if answer.stop_string_found and not choice.stop_told:
            choice.stop_told = True
            self._exchange.stop_matched(choice.request_id, answer.tokens_fed)

    def _close(self, choice: _Choice, end: End, part: Part) -> None:
        if choice.finished:
            return
        choice.finished = True
        self._unfinished -= 1
        answer = choice.answer
        _add(part, answer.finish())
        outcome = end.outcome
        if outcome.ending is Ending.COMPLETED:
            part.finish = "stop" if answer.stop_string_found else str(outcome.finish)
        elif self._failed is None:
            # One choice that fails fails them all: there is no way to say it of one alone.
            self._failed = of_outcome(outcome, end.retry_after_ms)
            self.close()


class ClientLeft(Exception):
    """The client is gone or was cut off; there is nothing to write any more."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _answer(text: ModelText, wish: Wish) -> AnswerText:
    return AnswerText(
        text,
        stops=wish.stops,
        keep_stop=wish.keep_stop,
        skip_special=wish.skip_special,
        end_ids=wish.end_ids,
        strip_first_space=text.strip_first_space,
    )


def _add(part: Part, piece: Piece) -> None:
    part.text += piece.text
    part.tokens += piece.tokens
