"""The ids of an answer's events, and which of them a client that comes back has.

Decides what ``id:`` (``event_id`` on a socket) says: how many *steps* of each choice the answer
has made, joined by dots. A step is one token id; the two after the last are the text that was held
back and the finish. A step gives at most one event, so two events never share an id, and what comes
after an id is a pure function of the recipe and the token ids. Events before the first step and
after the last are told apart by a suffix: ``0+1`` is the second of the opening, ``14+1`` the first
of the closing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.gateway.errors import ApiError
from baton.gateway.events import Event
from baton.gateway.generation import Part

#: Longer ids are no ids of ours: 64 choices of up to ten digits, and the suffix.
ID_CHARS_MAX = 720
#: Steps after the last token: the text that was held back, and the finish.
LAST_STEPS = 2
Numbered = Iterator[tuple[str, Event]]


@dataclass(frozen=True, slots=True)
class Position:
    """A place in an answer: after the event that has this id."""

    steps: tuple[int, ...]
    """Steps of each choice."""
    suffix: int = 0

    def __str__(self) -> str:
        text = ".".join(str(count) for count in self.steps)
        return f"{text}+{self.suffix}" if self.suffix else text


class NoSuchEvent(ApiError):
    """A client says that it has an event which its answer never had."""

    def __init__(self, text: str) -> None:
        super().__init__(
            400,
            f"no event of this answer has the id {text[:80]!r}; leave it out to begin from the "
            "start",
            "last_event_id",
            "event_id_unknown",
        )


def read_position(text: str, tokens_max: Sequence[int]) -> Position:
    """Return the position that an event's id names; ``tokens_max``: of each choice, at most.

    Raises:
        NoSuchEvent: no event of this answer can have such an id.
    """
    steps, plus, suffix = text.partition("+")
    counts = steps.split(".")
    digits = [*counts, suffix] if plus else counts
    usable = len(text) <= ID_CHARS_MAX and len(counts) == len(tokens_max)
    if not usable or not all(_is_count(each) for each in digits):
        raise NoSuchEvent(text)
    position = Position(tuple(int(each) for each in counts), int(suffix or 0))
    if any(
        count > most + LAST_STEPS for count, most in zip(position.steps, tokens_max, strict=True)
    ):
        raise NoSuchEvent(text)
    return position


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


class Labels(Protocol):
    """Gives events their ids, and leaves out what the client has."""

    def opening(self, events: list[Event]) -> Numbered:
        """Label the events before the first part."""
        ...

    def part(self, part: Part, events: list[Event]) -> Numbered:
        """Label the events of one part."""
        ...

    def closing(self, events: list[Event]) -> Numbered:
        """Label the events after the last part."""
        ...


def unlabelled(events: list[Event]) -> Numbered:
    """Return events that have no place in the answer: how it failed, that it was cancelled."""
    return (("", event) for event in events)


class Unnumbered:
    """An answer that nobody can resume: no ids, every event."""

    def opening(self, events: list[Event]) -> Numbered:
        return unlabelled(events)

    def part(self, part: Part, events: list[Event]) -> Numbered:
        return unlabelled(events)

    def closing(self, events: list[Event]) -> Numbered:
        return unlabelled(events)


class Numbering:
    """The ids of one answer's events, from the position its client has reached."""

    def __init__(self, choices: int, after: Position | None = None) -> None:
        self._steps = list(after.steps) if after is not None else [0] * choices
        self._suffix = after.suffix if after is not None else -1
        """Of the last event that the client has; counts at both ends of the answer only."""
        self._has_begun = any(self._steps)
        self._after = after

    def opening(self, events: list[Event]) -> Numbered:
        if self._has_begun:
            return
        for suffix, event in enumerate(events):
            if suffix > self._suffix:
                yield str(Position(tuple(self._steps), suffix)), event

    def part(self, part: Part, events: list[Event]) -> Numbered:
        """Label the event of one step.

        Raises:
            NoSuchEvent: the client says that it has more than there is.
        """
        assert len(events) <= 1, "two events of one step"
        if part.step <= self._steps[part.index]:
            if part.finish is not None and part.step < self._steps[part.index]:
                raise NoSuchEvent(str(self._after))
            return
        self._steps[part.index] = part.step
        self._suffix = 0
        for event in events:
            yield str(Position(tuple(self._steps))), event

    def closing(self, events: list[Event]) -> Numbered:
        for suffix, event in enumerate(events, 1):
            if suffix > self._suffix:
                yield str(Position(tuple(self._steps), suffix)), event
