"""One client request while it is answered: its choices' ids become text, stops and usage.

Decides what of each choice can be shown now. Every endpoint formats the same :class:`Part` in its
own words, so streaming or not, chat or completions, the text is the same.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from baton.core.outcomes import Ending, Reason
from baton.gateway.errors import ApiError, of_outcome
from baton.gateway.exchange import Exchange, Stream
from baton.gateway.params import Wish
from baton.gateway.recipe import Recipe
from baton.gateway.text import AnswerText, Piece, TextToken
from baton.gateway.tokens import ModelText
from baton.gateway.vocabulary import Deliver, End

#: Steps made of an answer before others have their turn.
SLICE_IDS = 256


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


@dataclass(slots=True)
class Part:
    """What one choice gained since the last time."""

    index: int
    text: str = ""
    tokens: list[TextToken] = field(default_factory=list)
    finish: str | None = None
    """``stop`` or ``length``, with the choice's last part."""
    step: int = 0
    """Which step of the choice this is (``numbering.py``), where each is a part of its own."""
    usage: Usage | None = None
    """Tokens of the whole request up to here."""


@dataclass(slots=True)
class _Choice:
    request_id: str
    index: int
    answer: AnswerText
    stop_told: bool = False
    cached_tokens: int = 0
    completion_tokens: int = 0
    finished: bool = False


class Generation:
    """The choices of one client request, running."""

    def __init__(
        self,
        exchange: Exchange,
        text: ModelText,
        recipe: Recipe,
        stream: Stream,
        *,
        stepwise: bool = False,
    ) -> None:
        """``stream`` brings the ids of the recipe's choices. ``stepwise``: one part a step, however
        many came at once; otherwise what came at once is one part."""
        self._exchange = exchange
        self._recipe = recipe
        self._failed: ApiError | None = None
        self._choices = {
            choice_id: _Choice(choice_id, index, _answer(text, recipe.wish))
            for index, choice_id in enumerate(recipe.choice_ids())
        }
        self._unfinished = recipe.choices
        self._stepwise = stepwise
        self._backlog: deque[Deliver | End] = deque()
        """Came, and not made into parts yet."""
        self.stream = stream

    @property
    def count(self) -> int:
        """Number of choices."""
        return len(self._choices)

    @property
    def done(self) -> bool:
        """Whether every choice has given its last part, and none a failure still to be raised: text
        that came in the same turn as the failure is shown first."""
        return self._unfinished == 0 and self._failed is None

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
            shown = [part for part in parts if part.text or part.tokens or part.finish]
            if self._failed and not shown:
                raise self._failed
            if shown or loop.time() >= until:
                return shown

    async def _take(self, timeout_s: float) -> list[Part]:
        if self._backlog:
            await asyncio.sleep(0)  # a long answer that is told again lets others have their turn
            timeout_s = 0.0
        for item in await self.stream.take(timeout_s):
            self._backlog += _slices(item) if self._stepwise else (item,)
        if self.stream.left is not None:
            raise ClientLeft(self.stream.left)
        parts: list[Part] = []
        merged: dict[int, Part] = {}
        ids = 0
        while self._backlog and (ids < SLICE_IDS or not self._stepwise):
            item = self._backlog.popleft()
            ids += len(item.ids) if isinstance(item, Deliver) else 0
            choice = self._choices[item.request_id]
            if choice.finished:
                continue
            if self._stepwise:
                parts += self._steps(choice, item)
                continue
            if choice.index not in merged:
                merged[choice.index] = Part(choice.index)
                parts.append(merged[choice.index])
            if isinstance(item, Deliver):
                self._feed(choice, item, merged[choice.index])
            else:
                self._close(choice, item, merged[choice.index])
        for part in merged.values():
            part.usage = self.usage()
        return parts

    def _steps(self, choice: _Choice, item: Deliver | End) -> Iterator[Part]:
        """Yield a part for each step of what came."""
        if isinstance(item, Deliver):
            for one in _singly(item):
                if choice.answer.stop_string_found:
                    return
                part = Part(choice.index)
                self._feed(choice, one, part)
                part.step = choice.answer.tokens_fed
                part.usage = self.usage()
                yield part
            return
        rest = Part(choice.index)
        self._close(choice, item, rest)
        if rest.finish is None:
            return  # what is held back belongs to whoever continues the answer, if anybody can
        fed, usage = choice.answer.tokens_fed, self.usage()
        yield Part(choice.index, rest.text, rest.tokens, step=fed + 1, usage=usage)
        yield Part(choice.index, finish=rest.finish, step=fed + 2, usage=usage)

    def usage_before(self) -> Usage:
        """Count the tokens before the first one."""
        return Usage(self._recipe.prompt_tokens, 0, 0)

    def usage(self) -> Usage:
        """Count the tokens so far. Prompt tokens count once, however many choices share them."""
        choices, n = self._choices.values(), self._recipe.wish.n
        return Usage(
            prompt_tokens=self._recipe.prompt_tokens,
            completion_tokens=sum(choice.completion_tokens for choice in choices),
            cached_tokens=sum(c.cached_tokens for c in choices if c.index % n == 0),
        )

    def close(self, reason: Reason) -> None:
        """Nobody reads what still runs; harmless when all is over."""
        self.stream.close(reason)

    def _feed(self, choice: _Choice, item: Deliver, part: Part) -> None:
        if item.index == 0:
            choice.cached_tokens = item.cached_tokens
        answer = choice.answer
        _add(part, answer.feed(item.ids, item.logprobs, ends=item.finish is not None))
        choice.completion_tokens = answer.tokens_fed
        if answer.stop_string_found and not choice.stop_told:
            choice.stop_told = True
            self._exchange.stop_matched(choice.request_id, answer.tokens_fed)

    def _close(self, choice: _Choice, end: End, part: Part) -> None:
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
            self.close(Reason.INTERNAL)


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


def _slices(item: Deliver | End) -> Iterator[Deliver | End]:
    """Yield ``item`` in pieces of at most :data:`SLICE_IDS` ids."""
    if isinstance(item, End) or len(item.ids) <= SLICE_IDS:
        yield item
        return
    for start in range(0, len(item.ids), SLICE_IDS):
        yield _piece(item, start, min(start + SLICE_IDS, len(item.ids)))


def _singly(item: Deliver) -> Iterator[Deliver]:
    """Yield ``item`` id by id."""
    for i in range(len(item.ids)):
        yield _piece(item, i, i + 1)


def _piece(item: Deliver, start: int, end: int) -> Deliver:
    return replace(
        item,
        index=item.index + start,
        ids=item.ids[start:end],
        logprobs=item.logprobs[start:end],
        finish=item.finish if end == len(item.ids) else None,
    )


def _add(part: Part, piece: Piece) -> None:
    part.text += piece.text
    part.tokens += piece.tokens
