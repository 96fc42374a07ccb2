"""The ids of events: which one each gets, and which ones a client has that comes back."""

from __future__ import annotations

import pytest

from baton.gateway.errors import ApiError
from baton.gateway.events import DONE, Event
from baton.gateway.generation import Part
from baton.gateway.numbering import NoSuchEvent, Numbering, Position, Unnumbered, read_position

OPENING: list[Event] = [{"o": 0}, {"o": 1}]
CLOSING: list[Event] = [{"c": 1}, DONE]


def steps(*choices: int) -> list[Part]:
    """Parts as they come: each choice's next step, in the order given; the last one finishes."""
    counts = dict.fromkeys(choices, 0)
    parts = []
    for position, index in enumerate(choices):
        counts[index] += 1
        last = index not in choices[position + 1 :]
        finish = "stop" if last else None
        parts.append(Part(index, f"{index}.{counts[index]}", step=counts[index], finish=finish))
    return parts


def tell(labels: Numbering | Unnumbered, parts: list[Part]) -> list[tuple[str, Event]]:
    """Label a whole answer; a part with an odd step has no event of its own."""
    told = list(labels.opening(OPENING))
    for part in parts:
        told += labels.part(part, [{"p": part.text}] if part.step % 2 == 0 else [])
    return told + list(labels.closing(CLOSING))


def test_events_are_numbered_by_what_was_consumed() -> None:
    """An id counts steps; the opening and the closing are told apart by a suffix."""
    told = tell(Numbering(1), steps(0, 0, 0, 0))
    assert [event_id for event_id, _ in told] == ["0", "0+1", "2", "4", "4+1", "4+2"]


def test_choices_are_counted_each_for_itself() -> None:
    """An id names the place of every choice."""
    told = tell(Numbering(2), steps(0, 1, 0, 1, 1, 1))
    assert [event_id for event_id, _ in told][2:] == ["2.1", "2.2", "2.4", "2.4+1", "2.4+2"]


@pytest.mark.parametrize("order", [(0, 0, 0, 0), (0, 1, 0, 1, 1, 1), (1, 1, 1, 1, 0, 0)])
def test_after_each_event_come_the_others(order: tuple[int, ...]) -> None:
    """Whatever was had last, the rest is what comes, with the ids it would have had."""
    choices = len(set(order))
    told = tell(Numbering(choices), steps(*order))
    for position, (event_id, _) in enumerate(told):
        after = read_position(event_id, [9] * choices)
        assert tell(Numbering(choices, after), steps(*order)) == told[position + 1 :]


def test_another_order_of_the_choices_loses_nothing() -> None:
    """Choices come in any order; each goes on where the client has it."""
    told = tell(Numbering(2), steps(0, 1, 0, 1, 0, 0, 1, 1))
    after = read_position(told[4][0], [9, 9])
    rest = tell(Numbering(2, after), steps(1, 1, 1, 1, 0, 0, 0, 0))
    had = [event for _, event in told[:5]]
    assert sorted(map(str, had + [e for _, e in rest])) == sorted(str(e) for _, e in told)


def test_nothing_is_numbered_that_nobody_can_resume() -> None:
    """Without a window there are no ids."""
    told = tell(Unnumbered(), steps(0, 0))
    assert {event_id for event_id, _ in told} == {""}
    assert len(told) == 5


@pytest.mark.parametrize("text", ["0", "0+1", "17", "3.0.12", "4.5+2"])
def test_an_id_says_its_position(text: str) -> None:
    """Reading what was written gives it back."""
    assert str(read_position(text, [99] * (text.count(".") + 1))) == text


@pytest.mark.parametrize(
    "text",
    ["", "a", "1.2", "1,2", "1+", "+1", "1+x", "-1", "1 ", "²", "1" * 11, "0" * 5_000, "103"],
)
def test_what_is_no_id_is_refused(text: str) -> None:
    """With an error that names it, shortened."""
    with pytest.raises(ApiError) as error:
        read_position(text, [100])
    assert error.value.status == 400
    assert len(error.value.message) < 250


def test_more_than_there_is_is_refused() -> None:
    """Who claims to have more than the answer's end has some other answer's id."""
    with pytest.raises(NoSuchEvent) as error:
        tell(Numbering(2, Position((9, 1))), steps(0, 1, 0, 1))
    assert "the id '9.1'" in error.value.message


def test_the_last_steps_are_those_after_the_last_token() -> None:
    """The text that was held back, and the finish: an id may be that of either, and no more."""
    assert str(read_position("102+1", [100])) == "102+1"
    with pytest.raises(NoSuchEvent):
        read_position("5.8", [9, 5])
