"""One structured event a line, as JSON, on standard error.

Decides the shape of a line and what may never stand in one: a prompt's text or ids. Everything
that other libraries log goes the same way.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, BinaryIO

import orjson
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

__all__ = ["FORBIDDEN", "FilteringBoundLogger", "configure"]

#: Fields that would carry what a client wrote or got.
FORBIDDEN = frozenset(
    {"prompt", "text", "ids", "token_ids", "output", "messages", "content", "stop_strings", "body"}
)

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(
    level: str = "info",
    *,
    bound: Mapping[str, object] | None = None,
    stream: BinaryIO | None = None,
    console: bool = False,
) -> FilteringBoundLogger:
    """Set logging up for this process and return its logger.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        bound: fields of every line: ``worker``, ``incarnation``.
        stream: where lines go; standard error by default.
        console: for people at a terminal (the CLI) instead of JSON.
    """
    target = stream or sys.stderr.buffer
    processors: list[Any] = [
        _withhold,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
    if console:
        processors += [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()), _encoded]
    else:
        processors += [structlog.processors.format_exc_info, _render]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.BytesLoggerFactory(target),
        cache_logger_on_first_use=False,
    )
    logger: FilteringBoundLogger = structlog.get_logger().bind(**(bound or {}))
    _adopt_libraries(logger)
    return logger


def _withhold(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Take forbidden fields out; with ``BATON_CHECK`` they are what they are: a bug."""
    found = FORBIDDEN.intersection(event)
    if found:
        assert not os.environ.get("BATON_CHECK"), f"log fields {sorted(found)} are forbidden"
        for name in found:
            del event[name]
        event["withheld"] = sorted(found)
    return event


def _render(_: WrappedLogger, __: str, event: EventDict) -> bytes:
    ordered: MutableMapping[str, Any] = {
        key: event.pop(key) for key in ("ts", "level", "event") if key in event
    }
    ordered.update(event)
    return orjson.dumps(ordered, default=_plain, option=orjson.OPT_NON_STR_KEYS)


def _encoded(_: WrappedLogger, __: str, line: str) -> bytes:
    return line.encode()


def _plain(value: object) -> str:
    """Names (peers, paths) as text; bytes are somebody's data and only counted."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    return str(value)


class _Library(logging.Handler):
    """Sends what a library logs with :mod:`logging` the way of our own events."""

    def __init__(self, logger: FilteringBoundLogger) -> None:
        super().__init__(logging.WARNING)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        log = self._logger.error if record.levelno >= logging.ERROR else self._logger.warning
        log(
            "library_message",
            library=record.name,
            detail=record.getMessage(),
            exc_info=record.exc_info,
        )


def _adopt_libraries(logger: FilteringBoundLogger) -> None:
    root = logging.getLogger()
    root.handlers[:] = [_Library(logger)]
    root.setLevel(logging.WARNING)
