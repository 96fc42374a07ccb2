"""A deterministic engine without a model, for the simulator and for fault tests.

Decides nothing the real engine does not: same contract, same sampler, same packed rows. Its KV
bytes say whose they are. Position ``p`` of a sequence has a 64-bit digest chained over the tokens
up to ``p``; the first two words of its first slot hold that digest and the token, every other word
a function of (digest, layer, axis, head, word). So any byte out of place can be named, and every
step *reads all positions before* and checks them: a token computed from KV that is not this very
prefix's is never produced, :class:`KVCorrupt` is raised.

A token is a function of the digest of all ids before it (and of the request's sampling). Forced
ids come from ``FakeKnobs.forced`` or from the prompt itself: ``[[forced 72 105 257]]`` in its text
(ids below 256 are bytes, see ``fake_model``) makes the output exactly these ids and then the
end-of-sequence id, in every process and after every retry, because the prompt travels along.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from baton.core.pages import Pages
from baton.core.step_times import Rehearsed
from baton.engine.info import KERNELS
from baton.engine.sampler import sample_rows
from baton.engine.stop_points import NoStopPoints, StopPoints
from baton.ports.engine import (
    KVLayout,
    ModelInfo,
    Row,
    Sampled,
    SampleSpec,
    SharedCores,
    StepFailed,
    nothing,
)

Words = NDArray[np.uint64]

#: Id of the fake model's end-of-sequence token; ids below are bytes.
EOS_ID = 256
#: What a forced id's logit is above all others: sure at any temperature, yet maskable by a bias.
_FORCED_LOGIT = 60.0
_FORCED = re.compile(rb"\[\[forced((?: +\d+)*) *\]\]")
_TEXT_IDS = np.frombuffer(b" etaoinshrdlucmfwypvbgkqjxz", dtype=np.uint8).astype(np.int64)
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class KVCorrupt(StepFailed):
    """KV read by a step is not what this request's prefix must have written."""


@dataclass(frozen=True, slots=True)
class FakeKnobs:
    """Times and forced output of the fake engine."""

    prefill_ms: float = 0.0
    """Of one prompt chunk."""
    step_ms: float = 0.0
    """Of one decode step, whatever its batch."""
    write_ms: float = 0.0
    """Pause between two KV block writes of a prompt chunk."""
    eos_every: int = 0
    """On average every so many tokens the end-of-sequence id wins; 0: never unasked."""
    forced: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Output ids by request id."""


def mix(value: int) -> int:
    """Return the splitmix64 finaliser of ``value`` (Steele et al. 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _mix_all(values: Words) -> Words:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def chain(digest: int, token_ids: Sequence[int]) -> list[int]:
    """Return the digest after each of ``token_ids``, continuing ``digest`` (0 at the start)."""
    digests = []
    for token in token_ids:
        digest = mix((digest + _GOLDEN * (token + 1)) & _MASK)
        digests.append(digest)
    return digests


def kv_words(digests: Words, token_ids: Words, layout: KVLayout) -> Words:
    """Return the KV of positions: uint64 [n, layers, 2, heads, words of one head]."""
    words = layout.head_dim * layout.itemsize // 8
    shape = (layout.layers, 2, layout.heads, words)
    salt = (np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * np.uint64(_GOLDEN)).reshape(shape)
    kv = _mix_all(digests[:, None, None, None, None] + salt)
    kv[:, 0, 0, 0, 0] = digests
    kv[:, 0, 0, 0, 1] = token_ids
    return kv


def forced_ids(prompt: NDArray[np.int32]) -> tuple[int, ...] | None:
    """Return the ids a prompt's text asks for, ``None`` if it asks for nothing."""
    text = prompt[(prompt >= 0) & (prompt < 256)].astype(np.uint8).tobytes()
    found = _FORCED.findall(text)
    return tuple(int(word) for word in found[-1].split()) if found else None


class FakeEngine:
    """See the module's docstring; the contract is :class:`baton.ports.engine.Engine`."""

    kernels = KERNELS["fake"]
    weight_pages: Pages | None = None
    borrows = True
    borrowed = 0.0

    def __init__(
        self,
        info: ModelInfo,
        layout: KVLayout,
        knobs: FakeKnobs | None = None,
        *,
        stops: StopPoints | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        slot_bytes = layout.head_dim * layout.itemsize
        assert slot_bytes >= 16, "digest and token need two words a head"
        assert slot_bytes % 8 == 0, "KV is written in whole words"
        self.info = info
        self.layout = layout
        self.knobs = knobs or FakeKnobs()
        self._stops: StopPoints = stops or NoStopPoints()
        self._sleep = sleep
        self._arenas: dict[str, Words] = {}
        self._decoding: set[str] = set()

    def claim(self) -> None:
        """Its cores are not lent."""

    def attach(self, arena: str, blocks: memoryview) -> None:
        """Make ``blocks`` usable as ``arena``."""
        layout = self.layout
        words = np.frombuffer(blocks, dtype=np.uint64)
        shape = (layout.layers, 2, layout.block_size, layout.heads, -1)
        self._arenas[arena] = words.reshape(len(blocks) // layout.block_bytes, *shape)

    def detach(self, arena: str) -> None:
        """Drop every view of ``arena``."""
        self._arenas.pop(arena, None)

    def use_threads(self, threads: int, cores: SharedCores | None = None) -> None:
        """It has none to choose."""

    def warm_up(self) -> Rehearsed:
        """Nothing is paid for later."""
        return ()

    def step(
        self, rows: Sequence[Row], stored: Callable[[], None] = nothing
    ) -> list[Sampled | None]:
        """Compute one batch; see the contract."""
        decoding = [row for row in rows if _is_decode(row)]
        if decoding and self.knobs.step_ms:
            self._sleep(self.knobs.step_ms / 1000)
        for row in decoding:
            self._pass_decode_points(row)
        self._decoding = {row.request_id for row in decoding}
        digests: list[int] = []
        corrupt: list[KVCorrupt] = []
        for row in rows:
            try:
                digests.append(self._compute(row))
            except KVCorrupt as error:
                corrupt.append(error)
        if corrupt:
            blamed = tuple(name for error in corrupt for name in error.request_ids)
            raise KVCorrupt("; ".join(map(str, corrupt)), blamed, retryable=True)
        stored()
        return self._sample(rows, digests)

    def _pass_decode_points(self, row: Row) -> None:
        if row.request_id not in self._decoding:
            self._stops.at("D.before_first_step", row.request_id)
        assert row.sample is not None
        self._stops.at(f"D.step:{row.sample.index}", row.request_id)

    def _compute(self, row: Row) -> int:
        """Check what is before the row, write its positions, return the last digest."""
        before = self._read(row)
        tokens = [int(token) for token in row.token_ids]
        digests = np.array(chain(before, tokens), dtype=np.uint64)
        words = kv_words(digests, np.array(tokens, dtype=np.uint64), self.layout)
        if _is_decode(row):
            self._write(row, words, 0, len(tokens))
        else:
            self._write_chunk(row, words)
        return int(digests[-1])

    def _write_chunk(self, row: Row, words: Words) -> None:
        """Write block by block, with the pauses and stop points of a prompt chunk."""
        if self.knobs.prefill_ms:
            self._sleep(self.knobs.prefill_ms / 1000)
        self._stops.at("P.before_write", row.request_id)
        count, middle = len(words), len(words) // 2
        size = self.layout.block_size
        edges = {0, count, middle} | set(range(-row.start % size, count, size))
        ordered = sorted(edges)
        for begin, end in itertools.pairwise(ordered):
            if begin == middle:
                self._stops.at("P.mid_write", row.request_id)
                if row.sample is not None:
                    self._stops.at("P.last_chunk", row.request_id)
                elif row.start == 0:
                    self._stops.at("P.first_chunk", row.request_id)
            if begin and (row.start + begin) % size == 0 and self.knobs.write_ms:
                self._sleep(self.knobs.write_ms / 1000)
            self._write(row, words, begin, end)
        self._stops.at("P.after_write", row.request_id)

    def _write(self, row: Row, words: Words, begin: int, end: int) -> None:
        at = np.arange(row.start + begin, row.start + end)
        blocks = row.blocks[at // self.layout.block_size]
        arena = self._arenas[row.arena]
        arena[blocks, :, :, at % self.layout.block_size] = words[begin:end]

    def _read(self, row: Row) -> int:
        """Return the digest of everything before the row; all of it was read and is right."""
        if row.start == 0:
            return 0
        at = np.arange(row.start)
        blocks = row.blocks[at // self.layout.block_size]
        found = self._arenas[row.arena][blocks, :, :, at % self.layout.block_size]
        digests, tokens = found[:, 0, 0, 0, 0], found[:, 0, 0, 0, 1]
        previous = np.concatenate((np.zeros(1, dtype=np.uint64), digests[:-1]))
        chained = _mix_all(previous + np.uint64(_GOLDEN) * (tokens + np.uint64(1)))
        wanted = kv_words(chained, tokens, self.layout)
        if not np.array_equal(found, wanted):
            position, layer, axis, head, _ = (int(i) for i in np.argwhere(found != wanted)[0])
            raise KVCorrupt(
                f"request {row.request_id}: wrong KV at position {position} (block "
                f"{int(blocks[position])} of arena {row.arena}), layer {layer}, "
                f"{'KV'[axis]}, head {head}",
                (row.request_id,),
                retryable=True,
            )
        self._check_ids(row, tokens)
        return int(digests[-1])

    def _check_ids(self, row: Row, tokens: Words) -> None:
        """A whole prefix of somebody else is consistent in itself: compare the ids as well."""
        if row.sample is None:
            return
        ids = np.concatenate((row.sample.prompt, np.asarray(row.sample.output, dtype=np.int32)))
        wrong = np.flatnonzero(ids[: row.start].astype(np.uint64) != tokens[: len(ids)])
        if wrong.size:
            raise KVCorrupt(
                f"request {row.request_id}: KV of another prefix from position {int(wrong[0])}",
                (row.request_id,),
                retryable=True,
            )

    def _sample(self, rows: Sequence[Row], digests: Sequence[int]) -> list[Sampled | None]:
        lines = [
            self._logits(row, row.sample, digest)
            for row, digest in zip(rows, digests, strict=True)
            if row.sample is not None
        ]
        return sample_rows(rows, lines, stored=True)

    def _logits(self, row: Row, spec: SampleSpec, digest: int) -> NDArray[np.float32]:
        logits = np.full(self.info.vocab_size, -20.0, dtype=np.float32)
        noise = _mix_all(np.uint64(digest) + _TEXT_IDS.astype(np.uint64) * np.uint64(_GOLDEN))
        logits[_TEXT_IDS] = (noise >> np.uint64(44)).astype(np.float32) / 2**18
        if self.knobs.eos_every and digest % self.knobs.eos_every == 0:
            logits[EOS_ID] = _FORCED_LOGIT
        forced = self.knobs.forced.get(row.request_id)
        if forced is None:
            forced = forced_ids(spec.prompt)
        if forced is not None:
            token = forced[spec.index] if spec.index < len(forced) else EOS_ID
            if token >= len(logits):
                logits[:] = np.nan  # the prompt asks for what no vocabulary has
            else:
                logits[token] = _FORCED_LOGIT
        return logits


def _is_decode(row: Row) -> bool:
    """A row that feeds back an output id; everything else is (part of) a prompt."""
    return row.sample is not None and row.sample.index > 0 and len(row.token_ids) == 1
