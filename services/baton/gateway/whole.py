"""An answer that is sent in one piece: its parts, collected."""

from __future__ import annotations

from abc import ABC, abstractmethod

from baton.gateway.generation import Part


class WholeFormat(ABC):
    """Collects parts and makes one answer of them."""

    def __init__(self) -> None:
        self._parts: dict[int, Part] = {}

    def collect(self, part: Part) -> None:
        """Add what a choice gained."""
        whole = self._parts.setdefault(part.index, Part(part.index))
        whole.text += part.text
        whole.tokens += part.tokens
        whole.finish = part.finish or whole.finish

    @abstractmethod
    def whole(self) -> bytes:
        """Return the answer's body."""

    def in_order(self) -> list[Part]:
        """Return the choices by index."""
        return [self._parts[index] for index in sorted(self._parts)]
