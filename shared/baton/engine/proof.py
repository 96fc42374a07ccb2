"""The proof that this engine computes what the model means.

Decides which models are served. Support is proven, not listed: two sequences, packed and chunked,
one of them longer than the sliding window or the original rope length, go through the paged
attention; every layer must have called it exactly once a step, and the logits must be those of
transformers' own eager forward. A model that never calls a registered attention, or whose positions
depend on the longest sequence of a batch, would answer wrongly without an error: it is refused here
with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from baton.core.sampling import SamplingParams
from baton.engine import experts
from baton.engine.attention import NAME
from baton.engine.info import ModelRefused, layout_of
from baton.engine.load import FOREIGN_ERRORS, load_model
from baton.engine.plan import TILE
from baton.engine.torch_engine import TorchEngine
from baton.ports.engine import ModelInfo, Row, SampleSpec, TokenIds

#: Largest difference of a logit, in standard deviations of the logits, that counts as rounding.
TOLERANCE = 5e-3
#: Most tokens of the longer sequence; a window beyond that cannot be proven, so is refused.
_LONG_MAX = 20_000
_BLOCK = 16
_GREEDY = SamplingParams(seed=0, temperature=0.0)

#: Rope types whose frequencies depend on the longest position of the whole batch.
_ROPE_REFUSED = ("dynamic", "longrope")


def prove(model_dir: Path, info: ModelInfo, progress: Callable[[float], None]) -> dict[str, Any]:
    """Return what was measured.

    Raises:
        ModelRefused: with the reason.
    """
    return prove_model(load_model(model_dir, "float32", keep=False), info, progress)


def prove_model(
    model: Any, info: ModelInfo, progress: Callable[[float], None] = lambda _: None
) -> dict[str, Any]:
    """Prove modules that are loaded already, in float32, with our attention set."""
    config = model.config.get_text_config()
    _refuse_positions(config)
    long = long_length(config, info.context_max)
    draw = np.random.default_rng(7)
    first = draw.integers(0, info.vocab_size, long).astype(np.int32)
    second = draw.integers(0, info.vocab_size, min(101, info.context_max)).astype(np.int32)
    engine = TorchEngine.around(
        model, info, layout_of(info, "float32", _BLOCK), threads=torch.get_num_threads()
    )
    run = _Run(engine, info, (first, second))
    try:
        run.packed(progress)
        solo = run.alone()
    except ModelRefused:
        raise
    except FOREIGN_ERRORS as error:
        raise ModelRefused(
            f"{info.architecture} cannot run with paged attention: {error}"
        ) from error
    worst, spread = _compare(model, (first, second), run.found)
    if not worst <= TOLERANCE * spread:
        raise ModelRefused(
            f"{info.architecture}: logits differ from transformers' own forward by "
            f"{worst / spread:.3g} standard deviations ({TOLERANCE} allowed)"
        )
    if not solo:
        raise ModelRefused(
            f"{info.architecture}: a sequence alone and in a batch differ in the last bit (its "
            "layers are not row invariant), so recovery would not be exact"
        )
    progress(1.0)
    return {
        "tokens": [long, len(second)],
        "layers": info.layers,
        "worst_logit_difference": worst,
        "logit_standard_deviation": spread,
        "row_invariant": True,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def long_length(config: Any, context_max: int) -> int:
    """Return the longer sequence's length: past a tile, the window, and the original rope."""
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings", 0) if isinstance(rope, dict) else 0
    window = getattr(config, "sliding_window", None) or 0
    wanted = max(TILE, window, original or 0) + 45
    if min(wanted, context_max) > _LONG_MAX:
        raise ModelRefused(f"a window of {wanted} positions is too long to be proven here")
    return min(wanted, context_max)


def _refuse_positions(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    layers = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for kind in (layer.get("rope_type") for layer in layers):
        if kind in _ROPE_REFUSED:
            raise ModelRefused(f"rope type {kind!r} depends on the longest position of a batch")
    if getattr(config, "attention_chunk_size", None):
        raise ModelRefused("chunked local attention is not supported")


class _Run:
    """Both sequences through the engine."""

    def __init__(self, engine: TorchEngine, info: ModelInfo, sequences: Sequence[TokenIds]) -> None:
        self._engine = engine
        self._info = info
        self._sequences = sequences
        counts = [-(-len(ids) // _BLOCK) for ids in sequences]
        numbers = np.random.default_rng(5).permutation(sum(counts)).astype(np.int32)
        self._blocks = (numbers[: counts[0]], numbers[counts[0] :])
        self._memory = bytearray(sum(counts) * engine.layout.block_bytes)
        self.found: list[dict[int, torch.Tensor]] = [{}, {}]
        """Logits by position, of each sequence."""

    def packed(self, progress: Callable[[float], None]) -> None:
        """Chunk both, uneven against each other, together in every step."""
        self._clear()
        at = [0, 0]
        sizes = (97, 23)
        while any(at[i] < len(ids) for i, ids in enumerate(self._sequences)):
            rows, names = [], []
            for i, ids in enumerate(self._sequences):
                part = ids[at[i] : at[i] + sizes[i]]
                if len(part):
                    rows.append(self._row(i, part, at[i]))
                    at[i] += len(part)
                    names.append(i)
            logits = self._engine.logits(rows)
            self._count_calls()
            for i, line in zip(names, logits, strict=True):
                self.found[i][at[i] - 1] = line.clone()
            progress(at[0] / len(self._sequences[0]) / 2)

    def alone(self) -> bool:
        """Return whether the shorter one, by itself and in other chunks, has the same bits."""
        self._clear()
        ids = self._sequences[1]
        self._engine.logits([self._row(1, ids[: len(ids) - 1], 0)])
        line = self._engine.logits([self._row(1, ids[-1:], len(ids) - 1)])[0]
        return torch.equal(line, self.found[1][len(ids) - 1])

    def _row(self, which: int, ids: TokenIds, start: int) -> Row:
        spec = SampleSpec(_GREEDY, 0, ids, ())
        return Row(str(which), ids, start, self._blocks[which], "proof", spec)

    def _clear(self) -> None:
        """Fill the arena with NaN: whatever is read without having been written shows."""
        np.frombuffer(self._memory, dtype=np.float32)[:] = np.nan
        self._engine.attach("proof", memoryview(self._memory))

    def _count_calls(self) -> None:
        calls = self._engine.last_calls
        for layer in range(self._info.layers):
            if calls.get(layer, 0) != 1:
                raise ModelRefused(
                    f"{self._info.architecture}: layer {layer} called the paged attention "
                    f"{calls.get(layer, 0)} times in a step, not once"
                )


@torch.inference_mode()
def _compare(
    model: Any, sequences: Sequence[TokenIds], found: Sequence[dict[int, torch.Tensor]]
) -> tuple[float, float]:
    """Return the largest difference from eager attention and the logits' standard deviation."""
    _use(model, attention="eager", moe="eager")
    worst, spreads = 0.0, []
    try:
        for ids, lines in zip(sequences, found, strict=True):
            keep = torch.tensor(sorted(lines))
            inputs = torch.from_numpy(ids.astype(np.int64))[None]
            logits = model(input_ids=inputs, use_cache=False, logits_to_keep=keep).logits[0].float()
            ours = torch.stack([lines[int(place)] for place in keep])
            worst = max(worst, float((ours - logits).abs().nan_to_num(torch.inf).max()))
            spreads.append(float(logits.std()))
    finally:
        _use(model, attention=NAME, moe=experts.NAME)
    return worst, min(spreads)


def _use(model: Any, *, attention: str, moe: str) -> None:
    model.set_attn_implementation(attention)
    if model._can_set_experts_implementation():
        model.set_experts_implementation(moe)
