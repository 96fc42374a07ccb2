"""A way to step one sequence through an engine, on memory that shows what was written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from baton.core.sampling import SamplingParams
from baton.ports.engine import (
    Engine,
    KVLayout,
    Row,
    Sampled,
    SampleSpec,
    StepFailed,
    TokenIds,
)

GREEDY = SamplingParams(seed=1, temperature=0.0)


def child_env() -> dict[str, str]:
    """Return the environment in which a child process imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def ids_of(values: Iterable[int]) -> TokenIds:
    """Return token ids as the engine takes them."""
    return np.array(list(values), dtype=np.int32)


def by_token(memory: bytes | bytearray, layout: KVLayout) -> Any:
    """Return what lies in blocks, whatever their order: uint8 [blocks, block_size, ...]."""
    side, size = 4 // layout.itemsize, layout.block_size
    heads, width = layout.heads, layout.head_dim
    whole = np.frombuffer(memory, f"u{layout.itemsize}")
    if layout.order == "tokens":
        found = whole.reshape(-1, layout.layers, 2, size, heads, width).transpose(0, 3, 1, 2, 4, 5)
    else:
        parts = whole.reshape(-1, layout.layers, 2, heads, size * width)
        lines = parts.shape[:2]
        keys = parts[:, :, 0].reshape(*lines, heads, width // side, size, side)
        values = parts[:, :, 1].reshape(*lines, heads, size // side, width, side)
        found = np.stack(
            (
                keys.transpose(0, 4, 1, 2, 3, 5).reshape(-1, size, layout.layers, heads, width),
                values.transpose(0, 3, 5, 1, 2, 4).reshape(-1, size, layout.layers, heads, width),
            ),
            axis=3,
        )
    return np.ascontiguousarray(found).view(np.uint8).reshape(len(found), size, -1)


@dataclass
class Arena:
    """Blocks with one block of guard bytes on either side; ``fill`` is what nobody wrote."""

    engine: Engine
    blocks: int
    name: str = "arena"
    fill: int = 0
    memory: bytearray = field(init=False)

    def __post_init__(self) -> None:
        size = self.engine.layout.block_bytes
        self.memory = bytearray([self.fill]) * (self.blocks * size)
        self.engine.attach(self.name, memoryview(self.memory))

    def block(self, number: int) -> bytes:
        """Return one block's bytes."""
        size = self.engine.layout.block_bytes
        return bytes(self.memory[number * size : (number + 1) * size])


@dataclass
class Sequel:
    """One request: its blocks, what was fed, what came out."""

    engine: Engine
    prompt: TokenIds
    blocks: TokenIds
    arena: str = "arena"
    params: SamplingParams = GREEDY
    request_id: str = "request"
    output: list[int] = field(default_factory=list)

    def prompt_row(self, start: int, end: int) -> Row:
        """Return the row of one prompt chunk; the last one samples."""
        spec = self._spec() if end == len(self.prompt) else None
        return Row(self.request_id, self.prompt[start:end], start, self.blocks, self.arena, spec)

    def decode_row(self) -> Row:
        """Return the row of the next decode step."""
        start = len(self.prompt) + len(self.output) - 1
        fed = ids_of(self.output[-1:])
        return Row(self.request_id, fed, start, self.blocks, self.arena, self._spec())

    def _spec(self) -> SampleSpec:
        return SampleSpec(self.params, len(self.output), self.prompt, tuple(self.output))

    def take(self, sampled: Sampled | None) -> Sampled:
        """Append a sampled token."""
        assert sampled is not None
        self.output.append(sampled.token_id)
        return sampled

    def prefill(self, chunks: Sequence[int] = (), *, start: int = 0) -> None:
        """Feed the prompt from ``start`` in chunks of these sizes; the rest at once."""
        sizes = list(chunks)
        while start < len(self.prompt):
            end = min(start + (sizes.pop(0) if sizes else len(self.prompt)), len(self.prompt))
            result = self.engine.step([self.prompt_row(start, end)])[0]
            if end == len(self.prompt):
                self.take(result)
            else:
                assert result is None
            start = end

    def decode(self, steps: int, stop: Sequence[int] = ()) -> None:
        """Take decode steps until there are ``steps`` output ids or one of ``stop``."""
        while len(self.output) < steps and self.output[-1] not in stop:
            self.take(self.engine.step([self.decode_row()])[0])


def assert_nan_costs_no_other_row(engine: Engine, prompt: TokenIds) -> None:
    """Break one of two sequences' memory: it is named and not retryable, and the other one, stepped
    again, has the token that it has without a neighbour."""
    arena = Arena(engine, 6)
    good = Sequel(engine, prompt, ids_of([0, 1]), request_id="good")
    bad = Sequel(engine, prompt, ids_of([4, 5]), request_id="bad")
    good.prefill()
    bad.prefill()
    size = engine.layout.block_bytes
    arena.memory[4 * size : 5 * size] = b"\xff" * size
    told: list[bool] = []
    with pytest.raises(StepFailed, match="request bad: logits are not finite") as caught:
        engine.step([bad.decode_row(), good.decode_row()], lambda: told.append(True))
    assert caught.value.request_ids == ("bad",)
    assert not caught.value.retryable
    assert not told and not caught.value.results, "what is certainly wrong is shown to nobody"
    twin = Sequel(engine, prompt, ids_of([2, 3]), request_id="twin")
    twin.prefill()
    twin.decode(2)
    good.take(engine.step([good.decode_row()])[0])
    assert good.output == twin.output
