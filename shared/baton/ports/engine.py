"""The compute engine: one step over a packed batch, K and V straight into arenas.

The contract (``tests/conformance/test_engine.py`` holds the torch engine and the fake to it):

- ``step`` runs in the worker's one engine thread and is never entered twice at once. When it
  returns, no thread, native pool or device queue will touch any arena on its behalf any more.
- For each row it computes K and V of ``token_ids`` at positions ``start ..`` and stores them into
  the row's blocks, in place; it reads the positions before from the same block table. It writes
  nowhere else.
- Row invariance: K, V and logits of a token depend only on the tokens before it, never on the other
  rows, the chunking, which part was cached, or the number of threads; bit for bit.
- A row with ``sample`` gets the token that follows its last fed one; the sampler is a pure function
  of (logits, params, prompt, output so far, index).
- ``stored`` is called once, in the engine thread, as soon as K and V of every row are in place and
  nothing will store into any block on the step's behalf any more; what is left is to choose tokens.
  A step that fails before, because of what it read or computed, does not call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.core.pages import Pages
from baton.core.sampling import SamplingParams
from baton.core.step_times import Rehearsed
from baton.wire.fields import TokenLogprob

TokenIds = NDArray[np.int32]
#: What the digest says of blocks on a device: how their checksums are made.
DEVICE_WORDS = ", on a device, sums of words 1"


class KVLayout(msgspec.Struct, frozen=True):
    """Shape of the KV cache. A block is one contiguous ``[layers, 2, part]``; axis 1 is K, V.

    A part lies in one of two orders, whichever the kernels read in place:

    - ``tokens``: ``[tokens, heads, head_dim]``.
    - ``lanes``: K ``[heads, head_dim / s, tokens, s]``, V ``[heads, tokens / s, head_dim, s]``,
      where ``s`` elements make four bytes.

    The same in every arena, process and kernel; part of the compatibility digest.
    """

    layers: int
    heads: int
    """KV heads."""
    head_dim: int
    block_size: int
    """Tokens a block."""
    dtype: str
    """``float32`` or ``bfloat16``."""
    order: str = "tokens"
    """``tokens`` or ``lanes``."""
    place: str = "host"
    """Of the blocks: ``host`` (in the arena's file) or ``device`` (``baton.ports.device``)."""

    @property
    def itemsize(self) -> int:
        return {"float32": 4, "bfloat16": 2}[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * self.block_size * self.token_bytes_per_axis

    @property
    def file_block_bytes(self) -> int:
        """Bytes of a block in the arena's file."""
        return self.block_bytes if self.place == "host" else 0

    @property
    def token_bytes_per_axis(self) -> int:
        """Bytes of one token's K (or V) in one layer."""
        return self.heads * self.head_dim * self.itemsize

    def describe(self) -> str:
        """The words that go into the compatibility digest."""
        return (
            f"[layers={self.layers}, kv=2, tokens={self.block_size}, heads={self.heads}, "
            f"head_dim={self.head_dim}] {self.dtype} in order of {self.order}"
            f"{DEVICE_WORDS * (self.place == 'device')}"
        )


class ModelInfo(msgspec.Struct, frozen=True):
    """What the rest of Baton needs to know of a prepared model (its ``baton.json``)."""

    name: str
    digest: str
    """Hex digest of weights and configuration."""
    tokenizer_digest: str
    architecture: str
    vocab_size: int
    context_max: int
    """Most tokens of prompt + output."""
    eos_ids: tuple[int, ...]
    layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    parameters: int
    created: int = 0
    proof: dict[str, Any] = {}
    """What the preparation's proof measured."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Sample the token after this row's last one.

    ``prompt`` and ``output`` are what penalties and bad words look at: all ids before ``index``.
    """

    params: SamplingParams
    index: int
    """Output index of the token to sample, the third key of the generator."""
    prompt: TokenIds
    output: Sequence[int]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step."""

    request_id: str
    token_ids: TokenIds
    """int32 [n], n >= 1: the tokens to compute."""
    start: int
    """Absolute position of ``token_ids[0]``; everything before it is in the blocks already."""
    blocks: TokenIds
    """int32 [>= ceil((start + n) / block_size)]: physical block of each logical one."""
    arena: str
    """Key given to ``attach``."""
    sample: SampleSpec | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token."""

    token_id: int
    logprob: TokenLogprob | None = None


class StepFailed(RuntimeError):
    """Some rows of a step have no result (NaN logits, KV that is provably wrong).

    Nothing is half done: K and V of every row are stored, and the rows that are not named may be
    stepped again in place, with the same result.
    """

    def __init__(
        self,
        message: str,
        request_ids: tuple[str, ...],
        *,
        retryable: bool,
        results: Sequence[Sampled | None] = (),
    ) -> None:
        super().__init__(message)
        self.results = results
        """If ``stored`` was called, what the step would have returned, ``None`` for who is named:
        the others need not be stepped again."""
        self.request_ids = request_ids
        """The rows to blame."""
        self.retryable = retryable
        """Whether another worker may succeed (its memory is another) or the request is at fault."""


def nothing() -> None:
    """Whom ``stored`` tells nothing."""


#: Of one core on the core board.
CORE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class SharedCores:
    """The cores of a worker, and those of other workers of its host that it may borrow."""

    lines: memoryview
    """The core board (``native/board.h``): one line of 64 bytes for each core, shared by all."""
    own: tuple[int, ...]
    borrows: tuple[int, ...]


class Engine(Protocol):
    """The compute engine of one worker process."""

    info: ModelInfo
    layout: KVLayout
    kernels: str
    """Name of the kernel set, part of the compatibility digest."""
    weight_pages: Pages | None
    """How the weights lay in memory when they were mapped; ``None``: they are no mapped file."""
    borrows: bool
    """Whether the next steps may have cores of other workers; at first they may."""
    borrowed: float
    """For which share of the last step cores of other workers were borrowed: 0 to 1."""

    def claim(self) -> None:
        """A step will begin at once: whoever has borrowed this worker's cores is to leave them.

        Called on any thread, while no step runs. If none begins they are lent again soon.
        """
        ...

    def attach(self, arena: str, blocks: memoryview) -> None:
        """Make ``blocks`` (writable, ``n_blocks * layout.block_bytes``) usable as ``arena``."""
        ...

    def detach(self, arena: str) -> None:
        """Drop every view of ``arena``; afterwards its memory may be unmapped."""
        ...

    def step(
        self, rows: Sequence[Row], stored: Callable[[], None] = nothing
    ) -> list[Sampled | None]:
        """Compute one packed batch; one result a row, ``None`` where nothing was to be sampled.

        Raises:
            StepFailed: rows without a result, by name.
        """
        ...

    def use_threads(self, threads: int, cores: SharedCores | None = None) -> None:
        """Compute with so many threads from now on, and on ``cores.borrows`` while they are idle;
        an engine that cannot borrow computes without.

        An engine is made and warmed up in one process, with one thread, and used in others that are
        forked from it: neither starts a thread or touches a device.
        """
        ...

    def warm_up(self) -> Rehearsed:
        """Run what the first request would otherwise pay for (allocations, kernel choice). Return
        what the steps took that were run for it."""
        ...
