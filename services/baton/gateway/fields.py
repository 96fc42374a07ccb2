"""Reads fields of a client's JSON object, each with its type and range; an error names the field.

JSON has no NaN (orjson refuses it), but it has huge numbers, booleans that Python counts as
integers, and nesting; all of that ends here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

from baton.gateway.errors import ApiError, invalid

INT64 = 2**63


def parse_object(body: bytes) -> Fields:
    """Return the body's JSON object.

    Raises:
        ApiError: it is not JSON, or not an object.
    """
    try:
        value = orjson.loads(body)
    except (orjson.JSONDecodeError, RecursionError) as error:
        message = str(error) if isinstance(error, orjson.JSONDecodeError) else "nested too deep"
        raise ApiError(400, f"the body is not valid JSON: {message}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return Fields(value)


class Fields:
    """A JSON object and where it stands in the body."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self._path = path

    def name(self, key: str) -> str:
        """Return the field's full name for messages."""
        return f"{self._path}.{key}" if self._path else key

    def fail(self, key: str, message: str) -> ApiError:
        """Return (not raise) the 400 for ``key``."""
        return invalid(self.name(key), f"'{self.name(key)}' {message}")

    def get(self, key: str) -> Any:
        """Return the raw value; a missing one and null are the same."""
        return self.values.get(key)

    def number(self, key: str, default: float, low: float, high: float) -> float:
        """A finite number in ``[low, high]``."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "must be a number")
        if not math.isfinite(value) or not low <= value <= high:
            raise self.fail(key, f"must be between {low:g} and {high:g}")
        return float(value)

    def integer(self, key: str, default: int | None, low: int, high: int) -> int | None:
        """An integer in ``[low, high]``; 3.0 is no integer."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, "must be an integer")
        if value < low and high == INT64 - 1 and low > -INT64:
            raise self.fail(key, f"must be at least {low}")
        if not low <= value <= high:
            raise self.fail(key, f"must be between {low} and {high}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(key, "must be a string")
        return value

    def object(self, key: str) -> Fields | None:
        """A JSON object."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, "must be an object")
        return Fields(value, self.name(key))

    def strings(self, key: str, max_count: int, max_chars: int) -> tuple[str, ...]:
        """A string or a list of strings, none empty."""
        value = self.values.get(key)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise self.fail(key, "must be a string or a list of strings")
        if len(items) > max_count:
            raise self.fail(key, f"may hold at most {max_count} strings")
        for item in items:
            if not isinstance(item, str):
                raise self.fail(key, "must be a string or a list of strings")
            if not item:
                raise self.fail(key, "must not hold an empty string")
            if len(item) > max_chars:
                raise self.fail(key, f"strings may have at most {max_chars} characters")
        return tuple(items)

    def token_ids(self, key: str, vocab_size: int, max_count: int) -> tuple[int, ...]:
        """A list of token ids of this vocabulary."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.fail(key, "must be a list of token ids")
        if len(value) > max_count:
            raise self.fail(key, f"may hold at most {max_count} token ids")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.fail(key, "must be a list of token ids")
            if not 0 <= item < vocab_size:
                raise self.fail(key, f"holds token ids outside 0..{vocab_size - 1}")
        return tuple(value)
