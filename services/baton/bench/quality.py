"""How good the answers of each kind of kernels are: perplexity and agreement on a fixed text.

Decides the method: sequences of the text are fed token by token, all at once, and the logits of
every place are compared with those of transformers in float32 over the same prepared weights:
mean loss of the text's own next token, and how often the most likely token is the same one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.core.sampling import SamplingParams
from baton.engine.build import build_engine
from baton.engine.kernels import KernelChoice
from baton.engine.llama_engine import LlamaEngine
from baton.ports.engine import Row, SampleSpec

#: Shakespeare's sonnets, public domain.
TEXT = Path("tests/reference/sonnets.txt")
SEQUENCES = 12
LENGTH = 512
_SPEC = SampleSpec(SamplingParams(seed=0), 0, np.empty(0, np.int32), ())

#: Of each place: the loss of the next token, and the most likely one.
Places = tuple[NDArray[np.float64], NDArray[np.int64]]


def quality(folder: Path, choices: list[tuple[str, KernelChoice]], length: int) -> dict[str, Any]:
    """Return perplexity and agreement with float32 by kind; ``length`` tokens a sequence."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = np.array(tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids, np.int32)
    text = ids[: SEQUENCES * length].reshape(SEQUENCES, length)
    found = {f"transformers {dtype}": _by_modules(folder, dtype, text) for dtype in _DTYPES}
    for dtype, choice in choices:
        found[f"{choice.name} {dtype}"] = _by_steps(folder, dtype, choice, text)
    best = found["transformers float32"][1]
    return {
        name: {
            "perplexity": round(math.exp(float(losses.mean())), 3),
            "agreement": round(float((likely == best).mean()), 4),
        }
        for name, (losses, likely) in found.items()
    }


_DTYPES = ("float32", "bfloat16")


def _by_modules(folder: Path, dtype: str, text: NDArray[np.int32]) -> Places:
    """Return what transformers alone computes, with attention of its own."""
    import torch
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=getattr(torch, dtype)).eval()
    places = []
    with torch.inference_mode():
        for sequence in text:
            inputs = torch.from_numpy(sequence.astype(np.int64))[None]
            places.append(_places(model(inputs).logits[0, :-1].float().numpy(), sequence[1:]))
    return _joined(places)


def _by_steps(folder: Path, dtype: str, choice: KernelChoice, text: NDArray[np.int32]) -> Places:
    engine = build_engine(folder, dtype=dtype, threads=1, kernels=choice)
    assert isinstance(engine, LlamaEngine)
    each = -(-text.shape[1] // engine.layout.block_size)
    tables = np.arange(len(text) * each, dtype=np.int32).reshape(len(text), each)
    engine.attach("text", memoryview(bytearray(tables.size * engine.layout.block_bytes)))
    places = []
    for at in range(text.shape[1] - 1):
        rows = [
            Row(str(i), text[i, at : at + 1], at, table, "text", _SPEC)
            for i, table in enumerate(tables)
        ]
        places.append(_places(engine.logits(rows), text[:, at + 1]))
    losses, likely = (np.stack(part, 1).reshape(-1) for part in zip(*places, strict=True))
    return losses, likely


def _places(logits: NDArray[np.float32], wanted: NDArray[np.int32]) -> Places:
    wide = logits.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    total = np.log(np.exp(wide - top).sum(-1)) + top[:, 0]
    return total - wide[np.arange(len(wide)), wanted], wide.argmax(-1)


def _joined(places: list[Places]) -> Places:
    losses, likely = zip(*places, strict=True)
    return np.concatenate(losses), np.concatenate(likely)
