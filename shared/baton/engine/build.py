"""Makes the engine a worker's configuration names.

Decides which class serves a kind and a kernel set, and nothing else. Importing this module imports
neither torch nor transformers; :func:`build_engine` does, unless the whole step is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from baton.engine.fake import FakeEngine, FakeKnobs
from baton.engine.info import KERNELS, layout_of, read_info
from baton.engine.kernels import TORCH, KernelChoice
from baton.engine.llama_engine import LlamaEngine
from baton.engine.native.abi import Library
from baton.engine.stop_points import StopPoints
from baton.ports.engine import Engine


def build_engine(
    model_dir: Path,
    *,
    dtype: str = "auto",
    block_size: int = 16,
    threads: int = 0,
    kind: str = "torch",
    kernels: KernelChoice = TORCH,
    knobs: FakeKnobs | None = None,
    stops: StopPoints | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Engine:
    """Return the engine for a prepared model.

    Args:
        model_dir: what :func:`baton.engine.prepare.prepare` returned, or a fake model's folder.
        dtype: ``auto``, ``float32`` or ``bfloat16``.
        block_size: tokens a block.
        threads: of the torch engine; 0 takes the cores this process may run on.
        kind: ``torch`` (whatever computes the model) or ``fake``.
        kernels: what ``baton.engine.kernels`` chose; plain torch by default.
        knobs: of the fake engine.
        stops: of the fake engine, see ``stop_points``.
        sleep: how the fake engine spends time; the simulator passes its own.

    Raises:
        ModelNotPrepared: the folder is not a prepared model.
        ValueError: unknown ``kind`` or ``dtype``.
    """
    if kind not in KERNELS:
        raise ValueError(f"engine kind {kind!r}: allowed are {', '.join(sorted(KERNELS))}")
    info = read_info(model_dir)
    layout = layout_of(info, dtype, block_size, kernels.order)
    if kind == "fake":
        return FakeEngine(info, layout, knobs, stops=stops, sleep=sleep)
    if kernels.native is None:
        from baton.engine.torch_engine import TorchEngine

        return TorchEngine(model_dir, info, layout, threads=threads)
    library = Library(kernels.native)
    if kernels.packed is not None:
        return LlamaEngine(
            library, kernels.packed, info, layout, kernels=kernels.name, threads=threads
        )
    from baton.engine.compiled_attention import CompiledAttention
    from baton.engine.torch_engine import TorchEngine

    attention = CompiledAttention(library, layout, kernels=kernels.name, threads=threads)
    return TorchEngine(model_dir, info, layout, threads=threads, attention=attention)
