"""One event of an answer, before it is written anywhere."""

from __future__ import annotations

from typing import Any

DONE = "[DONE]"
"""The end mark of chat and completions: an event that is no JSON."""

Event = dict[str, Any] | str
"""A JSON object, or :data:`DONE`."""
