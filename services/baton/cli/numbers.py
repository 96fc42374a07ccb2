"""Numbers on the command line: what is none, or out of range, is refused before anything begins.

For ``type=`` of an option; lists are separated by commas.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from math import isfinite
from typing import TypeVar

_N = TypeVar("_N", int, float)


def above_zero(text: str) -> float:
    """Return a number above 0."""
    number = _finite(text)
    if number <= 0:
        raise ArgumentTypeError(f"{text} is not above 0")
    return number


def at_least_zero(text: str) -> float:
    """Return a number that is 0 or more."""
    number = _finite(text)
    if number < 0:
        raise ArgumentTypeError(f"{text} is below 0")
    return number


def share(text: str) -> float:
    """Return a number above 0 that is at most 1."""
    number = above_zero(text)
    if number > 1:
        raise ArgumentTypeError(f"{text} is above 1")
    return number


def count(text: str) -> int:
    """Return a whole number that is 1 or more."""
    number = whole(text)
    if number < 1:
        raise ArgumentTypeError(f"{text} is less than 1")
    return number


def whole(text: str) -> int:
    """Return a whole number that is 0 or more."""
    try:
        number = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text} is no whole number") from None
    if number < 0:
        raise ArgumentTypeError(f"{text} is below 0")
    return number


def many(one: Callable[[str], _N]) -> Callable[[str], tuple[_N, ...]]:
    """Return what reads numbers separated by commas, each as ``one`` reads it."""
    return lambda text: tuple(one(each.strip()) for each in text.split(","))


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text} is no number") from None
    if not isfinite(number):
        raise ArgumentTypeError(f"{text} is no finite number")
    return number
