"""Greedy output of the default model, id for id that of transformers' generate()."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.engine.build import build_engine
from baton.ports.engine import Engine
from support.engine_steps import Arena, Sequel, ids_of

pytest_plugins = ["support.engine_fixtures"]

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "reference" / "greedy.json").read_text()
)
PROMPTS: list[dict[str, Any]] = REFERENCE["prompts"]
#: One of each length, and three more of the short ones.
FEW = [*range(0, len(PROMPTS), 7), 1, 8, 15]
_BLOCKS = 130


@cache
def engine_of(model_dir: Path) -> Engine:
    return build_engine(model_dir, dtype="float32", threads=1)


def answered(engine: Engine, which: int) -> list[int]:
    """Return our greedy answer: chunks of 256 on blocks that lie out of order."""
    line = PROMPTS[which]
    Arena(engine, _BLOCKS)
    blocks = np.random.default_rng(which).permutation(_BLOCKS).astype(np.int32)
    sequel = Sequel(engine, ids_of(line["prompt"]), blocks)
    sequel.prefill([256] * 8)
    sequel.decode(REFERENCE["new_tokens"], stop=REFERENCE["eos_ids"])
    return sequel.output


def check(model_dir: Path, numbers: list[int]) -> None:
    engine = engine_of(model_dir)
    assert engine.info.digest == REFERENCE["model"], (
        "the prepared model is not the one greedy.json was made from: make one of them anew "
        "(tests/reference/make_greedy.py)"
    )
    wrong = [number for number in numbers if answered(engine, number) != PROMPTS[number]["output"]]
    assert wrong == []


def test_the_reference_covers_the_borders() -> None:
    """At least 60 prompts, with lengths around a block and a tile, none decided by rounding."""
    assert len(PROMPTS) >= 60
    assert {len(line["prompt"]) for line in PROMPTS} == {1, 15, 16, 17, 255, 256, 257, 1000, 2000}
    assert min(line["margin"] for line in PROMPTS) >= 1e-3
    assert len({tuple(line["output"]) for line in PROMPTS}) > 50


@pytest.mark.model
def test_twelve_prompts_equal_generate(model_dir: Path) -> None:
    """One prompt of each length and three more."""
    check(model_dir, FEW)


@pytest.mark.model
@pytest.mark.slow
def test_all_other_prompts_equal_generate(model_dir: Path) -> None:
    """The whole reference."""
    check(model_dir, [number for number in range(len(PROMPTS)) if number not in FEW])
