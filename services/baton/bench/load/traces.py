"""Reads the traces that stand beside this package: lengths and times of real requests.

Decides nothing about scaling: rows are the sources' own values (services/baton/bench/traces).
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files

import orjson

#: Tokens that one of Mooncake's hash ids stands for.
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace."""

    at_s: float
    """Seconds after the first one."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Names of the prompt's blocks of 512 tokens each: equal leading names, equal leading text."""


@dataclass(frozen=True, slots=True)
class Window:
    """Ten minutes of ServeGen's trace."""

    rate: float
    """Requests a second."""
    variation: float
    """Coefficient of variation of the gaps between arrivals."""


def azure(kind: str) -> list[Row]:
    """Return the rows of ``code`` or ``conv``."""
    rows: list[Row] = []
    began: datetime | None = None
    for stamp, prompt, output in _csv(f"azure_llm_2023_{kind}.csv.gz"):
        # Seven digits of a second; Python reads six.
        at = datetime.fromisoformat(stamp[:26])
        began = began or at
        rows.append(Row((at - began).total_seconds(), int(prompt), int(output)))
    return rows


def mooncake() -> list[Row]:
    """Return the rows of the conversation trace, with their prefix chains."""
    rows = []
    for line in _text("mooncake_fast25_conversation.jsonl.gz").splitlines():
        row = orjson.loads(line)
        blocks = tuple(row["hash_ids"])
        at_s = row["timestamp"] / 1e3
        rows.append(Row(at_s, row["input_length"], row["output_length"], blocks))
    return rows


def sharegpt() -> list[list[tuple[int, int]]]:
    """Return (tokens asked, tokens answered) of each turn, by conversation."""
    conversations: dict[str, list[tuple[int, int]]] = {}
    asked: dict[str, int] = {}
    for conversation, _, role, tokens, _ in _csv("sharegpt_v3_turn_lengths.csv.gz"):
        if not tokens:
            continue  # a turn without text
        if role == "human":
            asked[conversation] = asked.get(conversation, 0) + int(tokens)
        elif conversation in asked:
            turn = (asked.pop(conversation), int(tokens))
            conversations.setdefault(conversation, []).append(turn)
    return list(conversations.values())


def servegen() -> tuple[list[Window], list[int], list[int]]:
    """Return the windows and the quantiles of prompt and output lengths, equally spaced."""
    rows = _csv("servegen_deepseek-r1_windows.csv.gz")
    windows = [Window(float(rate), float(variation)) for _, _, rate, variation in rows]
    lengths = orjson.loads(_text("servegen_deepseek-r1_lengths.json.gz"))
    return windows, lengths["input_tokens"], lengths["output_tokens"]


def _text(name: str) -> str:
    raw = files("baton.bench").joinpath("traces", name).read_bytes()
    return gzip.decompress(raw).decode()


def _csv(name: str) -> Iterator[list[str]]:
    reader = csv.reader(io.StringIO(_text(name)))
    next(reader)
    return reader
