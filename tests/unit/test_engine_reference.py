"""Greedy output of the default model, id for id that of transformers' generate()."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.engine.build import build_engine
from baton.engine.info import read_info
from baton.engine.kernels import choose_kernels
from baton.engine.pack import pack
from baton.ports.engine import Engine
from support.engine_compiled import library_of
from support.engine_steps import Arena, Sequel, ids_of

pytest_plugins = ["support.engine_fixtures"]

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "reference" / "greedy.json").read_text()
)
PROMPTS: list[dict[str, Any]] = REFERENCE["prompts"]
#: One of each length, and three more of the short ones.
FEW = [*range(0, len(PROMPTS), 7), 1, 8, 15]
#: Requests decoded together.
BATCH = 12


@pytest.fixture(
    scope="session",
    params=[
        "torch",
        pytest.param("attention", marks=pytest.mark.slow),
        "step",
        pytest.param("int4", marks=pytest.mark.slow),
    ],
)
def engine(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Engine:
    """The default model in float32, on each kind of kernels; the packed weights lie elsewhere.

    Its weights come from 4 bits, so packing them in as many again changes no token either.
    """
    folder = tmp_path_factory.mktemp(request.param)
    for file in model_dir.iterdir():
        if not file.name.startswith("packed-"):
            (folder / file.name).symlink_to(file)
    if request.param == "torch":
        return build_engine(folder, dtype="float32", threads=1)
    library = library_of().path
    info = read_info(folder)
    weights = "int4" if request.param == "int4" else "full"
    if request.param != "attention":
        pack(folder, info, "float32", library, weights)
    kernels = choose_kernels(
        "compiled",
        folder,
        info,
        dtype="float32",
        block_size=16,
        cache_dir=library.parent.parent,
        weights=weights,
    )
    assert request.param in kernels.name
    return build_engine(folder, dtype="float32", threads=1, kernels=kernels)


def answered(engine: Engine, numbers: list[int]) -> list[list[int]]:
    """Return our greedy answers: chunks of 256 on blocks out of order, decoded all together."""
    steps = REFERENCE["new_tokens"]
    sizes = [-(-(len(PROMPTS[n]["prompt"]) + steps) // engine.layout.block_size) for n in numbers]
    arena = Arena(engine, sum(sizes))
    order = np.random.default_rng(numbers[0]).permutation(arena.blocks).astype(np.int32)
    tables = np.split(order, np.cumsum(sizes)[:-1])
    sequels = [
        Sequel(engine, ids_of(PROMPTS[n]["prompt"]), blocks, request_id=str(n))
        for n, blocks in zip(numbers, tables, strict=True)
    ]
    for sequel in sequels:
        sequel.prefill([256] * 8)
    while live := [s for s in sequels if len(s.output) < steps and not ended(s)]:
        results = engine.step([sequel.decode_row() for sequel in live])
        for sequel, result in zip(live, results, strict=True):
            sequel.take(result)
    return [sequel.output for sequel in sequels]


def ended(sequel: Sequel) -> bool:
    return sequel.output[-1] in REFERENCE["eos_ids"]


def check(engine: Engine, numbers: list[int]) -> None:
    assert engine.info.digest == REFERENCE["model"], (
        "the prepared model is not the one greedy.json was made from: make one of them anew "
        "(tests/reference/make_greedy.py)"
    )
    wrong = []
    for begin in range(0, len(numbers), BATCH):
        batch = numbers[begin : begin + BATCH]
        for number, output in zip(batch, answered(engine, batch), strict=True):
            if output != PROMPTS[number]["output"]:
                wrong.append(number)
    assert wrong == []


def test_the_reference_covers_the_borders() -> None:
    """At least 60 prompts, with lengths around a block and a tile, none decided by rounding."""
    assert len(PROMPTS) >= 60
    assert {len(line["prompt"]) for line in PROMPTS} == {1, 15, 16, 17, 255, 256, 257, 1000, 2000}
    assert min(line["margin"] for line in PROMPTS) >= 1e-3
    assert len({tuple(line["output"]) for line in PROMPTS}) > 50


@pytest.mark.model
def test_twelve_prompts_equal_generate(engine: Engine) -> None:
    """One prompt of each length and three more, decoded as one batch."""
    check(engine, FEW)


@pytest.mark.model
@pytest.mark.slow
def test_all_other_prompts_equal_generate(engine: Engine) -> None:
    """The whole reference."""
    check(engine, [number for number in range(len(PROMPTS)) if number not in FEW])
